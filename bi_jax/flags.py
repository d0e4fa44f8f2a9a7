"""Compiler options and environment: the only reader and writer of environment variables.

Our own programs carry what they need as `compiler_options` of their jits, so they hold their bits
in a process whose backend already runs, whatever the user's environment says. `pin_flags` is for
the rest of a process: other people's jits, and NCCL. `verify` says what is really in force.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from .flag_table import (
    COMPILER_OPTIONS,
    NCCL_VARIABLES,
    NO_BITS,
    PROCESS_FLAGS,
    Flag,
    Value,
)

CACHE_DIR_VARIABLE = "BI_JAX_CACHE_DIR"


def compiler_options(platform: str) -> dict[str, Value]:
    """The options of our jits on a JAX platform ("cpu" or "gpu"), for `jax.jit`.

    Options that the installed jaxlib does not know are left out; `verify` lists them.

    Raises:
      NotImplementedError: the installed jaxlib lacks an option that we cannot do without.
    """
    platform = _platform(platform)
    wanted = {flag.name: flag for flag in COMPILER_OPTIONS if platform in flag.platforms}
    known = _known_options(tuple((flag.name, flag.value) for flag in wanted.values()))
    for name, flag in wanted.items():
        if flag.needed and name not in known:
            raise NotImplementedError(
                f"the installed jaxlib does not know the option {name}, which is needed because "
                f"{flag.reason}; it was checked with {flag.checked}"
            )
    return {name: flag.value for name, flag in wanted.items() if name in known}


@functools.cache
def _known_options(options: tuple[tuple[str, Value], ...]) -> frozenset[str]:
    """Those options that the installed jaxlib accepts.

    An unknown name in XLA_FLAGS kills the process; as an option of one compilation it is an error
    that can be caught. So names are tried there, all at once and one by one where that fails.
    """
    if _accepts(dict(options)):
        return frozenset(name for name, _ in options)
    return frozenset(name for name, value in options if _accepts({name: value}))


def _accepts(options: dict[str, Value]) -> bool:
    try:
        _probe_program().compile(compiler_options=options)
    except Exception as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def _probe_program() -> jax.stages.Lowered:
    return jax.jit(jnp.negative).lower(jax.ShapeDtypeStruct((8,), jnp.float32))


@dataclass(frozen=True, kw_only=True)
class FlagState:
    """What became of one setting.

    Attributes:
      name, wanted, reason: from the table.
      where: "our jits", "XLA_FLAGS" or "environment".
      in_force: the value in force, None where it is not set.
      note: what to know about it; empty where wanted and in force agree.
    """

    name: str
    wanted: str
    where: str
    in_force: str | None
    reason: str
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.in_force == self.wanted


def verify(platform: str | None = None) -> tuple[FlagState, ...]:
    """Reads back what is in force: our jits' options from the compiler, the rest as it is set.

    Args:
      platform: "cpu" or "gpu"; None: the default backend's, which is started if it was not.
    """
    platform = _platform(platform or jax.default_backend())
    options = compiler_options(platform)
    seen = _compiled_options(options)
    states = []
    for flag in COMPILER_OPTIONS:
        if platform not in flag.platforms:
            continue
        if flag.name not in options:
            note, in_force = "the installed jaxlib does not know this option", None
        elif flag.name in seen:
            note, in_force = "", seen[flag.name]
        else:
            # The compiler writes out only what differs from its own default.
            note, in_force = "the compiler's default", flag.text
        states.append(_state(flag, "our jits", in_force, note))
    given = _parse(os.environ.get("XLA_FLAGS", ""))
    for flag in PROCESS_FLAGS:
        if platform in flag.platforms:
            states.append(_state(flag, "XLA_FLAGS", given.get(flag.name)))
    for flag in NCCL_VARIABLES:
        if platform in flag.platforms:
            states.append(_state(flag, "environment", os.environ.get(flag.name)))
    return tuple(states)


def in_force(platform: str | None = None) -> tuple[tuple[str, str], ...]:
    """Name and value of every option that our jits are compiled with, for the identity.

    XLA_FLAGS that our options do not override are among them: `--xla_cpu_max_isa=AVX` changes bits
    of an RMS norm. What cannot change a bit (`NO_BITS`, another platform's) is left out.
    """
    platform = _platform(platform or jax.default_backend())
    known = compiler_options(platform)
    wanted = [flag for flag in COMPILER_OPTIONS if platform in flag.platforms]
    ours = tuple((f.name, f.text if f.name in known else "unknown option") for f in wanted)
    pinned = {flag.name: flag.text for flag in PROCESS_FLAGS}
    others = "xla_gpu_" if platform == "cpu" else "xla_cpu_"
    left = [
        (f"XLA_FLAGS {name}", value)
        for name, value in sorted(_parse(process_flags()).items())
        if name not in known
        and pinned.get(name) != value
        and not name.startswith((*NO_BITS, others))
    ]
    return (*ours, *left)


def process_flags() -> str:
    """XLA_FLAGS as the environment has them, which our own programs are compiled under too."""
    return os.environ.get("XLA_FLAGS", "")


def words_for_cards(cards: Sequence[int]) -> list[str]:
    """Words to put before a child process's command, so that it sees only some cards.

    It takes memory as it needs it, since others may use the same cards.

    Args:
      cards: numbers among those that this process sees.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(card) for card in range(max(cards) + 1)]
    own = ",".join(names[card] for card in cards)
    return ["env", f"CUDA_VISIBLE_DEVICES={own}", "XLA_PYTHON_CLIENT_PREALLOCATE=false"]


def pin_flags(*, collectives: bool = True) -> dict[str, str]:
    """Sets XLA_FLAGS and NCCL variables for programs that are not ours; call it before JAX starts.

    The engine and the scorer do not need it. What the user already set is kept.

    Args:
      collectives: also pin NCCL, so that a `psum` of yours repeats.

    Returns:
      The environment variables that were changed, with their new values.

    Raises:
      ValueError: the user set one of them to something else; both are named.
      RuntimeError: too late, a backend already runs and has read its flags.
    """
    if _backend_runs():
        raise RuntimeError(
            "pin_flags came too late: a JAX backend already runs and has read XLA_FLAGS; call it "
            "before the first array is made (our own programs do not need it)"
        )
    text = os.environ.get("XLA_FLAGS", "")
    given = _parse(text)
    known = _known_without_a_backend(PROCESS_FLAGS)
    added = [text] if text else []
    for flag in PROCESS_FLAGS:
        _refuse_contradiction(flag, given.get(flag.name), "XLA_FLAGS")
        if flag.name not in given and flag.name in known:
            added.append(f"--{flag.name}={flag.text}")
    changed = {"XLA_FLAGS": " ".join(added)} if " ".join(added) != text else {}
    for flag in NCCL_VARIABLES if collectives else ():
        _refuse_contradiction(flag, os.environ.get(flag.name), "the environment")
        if flag.name not in os.environ:
            changed[flag.name] = flag.text
    os.environ.update(changed)
    return changed


def default_compilation_cache_dir() -> Path:
    """Where compiled programs are kept: $BI_JAX_CACHE_DIR, else $XDG_CACHE_HOME/bi_jax/programs.

    XDG_CACHE_HOME is ~/.cache where it is not set.
    """
    own = os.environ.get(CACHE_DIR_VARIABLE)
    if own:
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "bi_jax" / "programs"


def enable_compilation_cache(directory: Path | None = None) -> Path | None:
    """Keeps compiled programs on disk, for this process, unless the user configured JAX's cache.

    Args:
      directory: None: `default_compilation_cache_dir()`.

    Returns:
      The directory in use; None where it cannot be written, which is no error.

    Invariance: an empty or a warm cache does not change a bit.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    directory = directory or default_compilation_cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(directory, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # JAX looks once, when it first compiles, whether there is a cache; now it looks again.
    compilation_cache.reset_cache()
    return directory


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "gpu") else name


def _state(flag: Flag, where: str, in_force: str | None, note: str = "") -> FlagState:
    return FlagState(
        name=flag.name,
        wanted=flag.text,
        where=where,
        in_force=in_force,
        reason=flag.reason,
        note=note,
    )


def _compiled_options(options: dict[str, Value]) -> dict[str, str]:
    """What the compiler says it compiled a program of ours with, where it differs from default."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        _probe_program().compile(compiler_options={**options, **dump})
        files = list(Path(folder).glob("*debug_options*"))
        if not files:
            return {}
        pairs = (line.split(":", 1) for line in files[0].read_text().splitlines() if ":" in line)
        return {name.strip(): value.strip().strip('"') for name, value in pairs}


def _parse(text: str) -> dict[str, str]:
    """XLA_FLAGS as name to value; a bare flag is true."""
    found = {}
    for part in text.split():
        name, _, value = part.removeprefix("--").partition("=")
        found[name] = value.lower() if value.lower() in ("true", "false") else value or "true"
    return found


def _refuse_contradiction(flag: Flag, given: str | None, where: str) -> None:
    same = {"true": "1", "false": "0"}
    if given is None or same.get(given, given) == same.get(flag.text, flag.text):
        return
    raise ValueError(
        f"{where} has {flag.name}={given}, and pin_flags needs {flag.name}={flag.text}, because "
        f"{flag.reason}; remove one of the two"
    )


def _backend_runs() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _known_without_a_backend(wanted: tuple[Flag, ...]) -> frozenset[str]:
    """Those flags that the installed jaxlib knows, tried in a child process.

    A name it does not know would kill this process later, when the backend starts.
    """
    import json
    import subprocess
    import sys

    program = (
        "import json, sys, jax\n"
        "known = []\n"
        "for name, value in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        jax.jit(lambda x: x).lower(1.0).compile(compiler_options={name: value})\n"
        "        known.append(name)\n"
        "    except Exception as error:\n"
        "        if 'No such compile option' not in str(error):\n"
        "            raise\n"
        "print(json.dumps(known))\n"
    )
    names = json.dumps([(flag.name, flag.value) for flag in wanted])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, names], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the installed jaxlib could not be asked for its flags: {done.stderr}")
    return frozenset(json.loads(done.stdout.splitlines()[-1]))
