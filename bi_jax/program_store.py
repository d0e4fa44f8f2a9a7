"""Audited step programs kept on disk, so that a second process starts without making them again.

JAX's own compilation cache spares the compiler only: every process still traces, lowers (on a GPU
that is most of the wait), proves the CPU's loops and audits. Here a program is found by a digest of
all that made it (`context_of`), so none of that is repeated. The file holds the very executable
that was audited, with its report. A program that failed its audit is never written. Any other
source, version, processor, card, option or shape is another digest; a damaged file, or one of
somebody else, counts as none.

It is off until `enable_program_store` is called; `bi-jax generate` does so. Like JAX's cache, a
file holds machine code, and whoever can write to the folder can run code as you. So it must belong
to you and be writable by nobody else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from . import flags, versions
from .audit_report import AuditReport

_CODE = ("bi_jax", "models", "pallas_kernels")
_MAGIC = b"bi_jax program 1\n"
# JAX settings that say where things are kept, and nothing about the program.
_PLACES = ("cache", "dump", "log", "profiler", "traceback")

_folder: Path | None = None
_switching = threading.Lock()
_fresh = 0  # threads within `fresh_compilation`
_cache_was_on = True


def enable_program_store(directory: Path | None) -> Path | None:
    """Keeps audited programs in `directory` from now on, in this process; None turns it off.

    Programs over several devices are not kept.

    Returns:
      The directory; None where it is off or the directory is not safely the user's own.
    """
    global _folder
    _folder = None
    if directory is not None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        _folder = directory if _is_own(directory) else None
    return _folder


def program_store(context: Mapping[str, Any]) -> ProgramStore | None:
    """The store for programs of this context; None where it is off."""
    if _folder is None:
        return None
    return ProgramStore(_folder, context_of(context))


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """Within it JAX's own cache is not used, in the whole process; several threads may be in it.

    A program that came out of that cache cannot be written again: jaxlib 0.11.2 leaves its
    functions out.
    """
    global _fresh, _cache_was_on
    with _switching:
        _fresh += 1
        if _fresh == 1:
            _cache_was_on = bool(jax.config.jax_enable_compilation_cache)
            _switch_jax_cache(False)
    try:
        yield
    finally:
        with _switching:
            _fresh -= 1
            if _fresh == 0:
                _switch_jax_cache(_cache_was_on)


def _switch_jax_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # otherwise JAX does not look at the setting again


class ProgramStore:
    """Programs of one context, by their arguments.

    Args:
      folder: where the files are.
      context: digest of all that fixes a program but its arguments.
    """

    def __init__(self, folder: Path, context: str) -> None:
        self._folder, self._context = folder, context
        self.found = 0

    def path(self, args: Any, kwargs: Any) -> Path:
        """The file of the program for these arguments: their tree, shapes, dtypes, and the rest."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        described = [_describe(leaf) for leaf in leaves]
        text = json.dumps([self._context, str(tree), described, _device_of(leaves).id])
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.program"

    def load(self, path: Path, args: Any, kwargs: Any) -> tuple[Any, AuditReport] | None:
        """The program and the report of its audit; None where there is no sound file.

        Args:
          path: of `path(...)`.
          args, kwargs: the arguments that the program is called with, without static ones.
        """
        try:
            if not _is_own(path):
                return None
            content = path.read_bytes()
        except OSError:
            return None
        head, body = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if head != _MAGIC + hashlib.sha256(body).digest():
            return None
        data, out, report = pickle.loads(body)
        device = _device_of(jax.tree.leaves((args, kwargs)))
        program = serialize_executable.deserialize_and_load(
            data,
            jax.tree.structure((args, kwargs)),
            jax.tree.structure(out),
            backend=device.client,
            execution_devices=[device],
        )
        self.found += 1
        return program, AuditReport(**report)

    def save(self, path: Path, program: Any, report: AuditReport) -> None:
        """Writes a program that passed its audit, whole or not at all."""
        assert report.passed
        data, _, out_tree = serialize_executable.serialize(program)
        # A tree of our own classes is pickled as an example of it.
        out = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
        body = pickle.dumps((data, out, fields))
        partial = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                partial = file.name
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            os.replace(partial, path)
        except OSError:  # a full disk costs time, not bits; and nobody would ever tidy up
            if partial is not None:
                Path(partial).unlink(missing_ok=True)


def context_of(context: Mapping[str, Any]) -> str:
    """Digest of the caller's context, our source, libraries, processor and settings."""
    settings = {
        name: repr(value)
        for name, value in jax.config.values.items()
        if not any(place in name for place in _PLACES)
    }
    everything = {
        "context": {name: repr(value) for name, value in context.items()},
        "source": _source_digest(),
        "versions": _versions(),
        "processor": _processor(),
        "platform": _platform(),
        "devices": [jax.device_count(), os.cpu_count(), len(os.sched_getaffinity(0))],
        "settings": settings,
        "flags": flags.process_flags(),
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@functools.cache
def _source_digest() -> str:
    """Digest of every source file of ours; what cannot change a bit is not told apart."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for package in _CODE:
        folder = here if package == "bi_jax" else _folder_of(package)
        for file in sorted(folder.rglob("*.py")):
            text = file.read_bytes()
            digest.update(f"{package}/{file.relative_to(folder)} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


def _folder_of(package: str) -> Path:
    import importlib

    module = importlib.import_module(f"bi_jax.{package}")
    assert module.__file__ is not None
    return Path(module.__file__).resolve().parent


@functools.cache
def _versions() -> list[str]:
    import importlib.metadata
    import platform

    names = ("jax", "jaxlib", "flax", "numpy")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return [*found, platform.python_version(), platform.platform()]


@functools.cache
def _processor() -> str:
    """What the kernel says about the first processor, without its present speed."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return "unknown"
    return "\n".join(line for line in first.splitlines() if "MHz" not in line)


@functools.cache
def _platform() -> list[str]:
    """The accelerator, its driver and the libraries that run or compile on it; nothing on a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return ["cpu"]
    libraries = versions.library_versions(device.platform)
    named = [f"{name} {version}" for name, version in libraries]
    return [versions.chip_name(device), versions.driver_version(), *named]


def _device_of(leaves: list[Any]) -> Any:
    """The one device that a program with these arguments runs on."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            (device,) = leaf.devices()
            return device
    return jax.devices()[0]


def _describe(leaf: Any) -> list[str]:
    if isinstance(leaf, (bool, int, float, str)) or leaf is None:
        return ["value", repr(leaf)]
    aval = jax.typeof(leaf)
    return [str(aval), str(getattr(aval, "weak_type", False))]


def _is_own(path: Path) -> bool:
    """Whether a file or folder is the user's and nobody else may write to it."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022
