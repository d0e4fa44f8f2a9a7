"""Chip and library versions: what an identity and a certificate say about the machine."""

from __future__ import annotations

import functools
import importlib.metadata
import platform as host
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ABSENT = "absent"

# NumPy makes the rotary tables; flax, orbax and the tokenizer move data only.
_PACKAGES = ("jax", "jaxlib", "numpy")
_VECTOR_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "asimd")


@functools.cache
def library_versions(platform: str) -> tuple[tuple[str, str], ...]:
    """Versions of the libraries whose code runs, or compiles what runs, sorted by name."""
    found = {name: _version(name) for name in _PACKAGES}
    if platform in ("gpu", "cuda"):
        for distribution in importlib.metadata.distributions():
            name = (distribution.name or "").lower()
            ours = ("nvidia-", "jax-cuda", "jax_cuda", "triton")
            if name.startswith(ours) and name != "nvidia-ml-py":
                found[name] = distribution.version
        found["ptxas"] = ptxas_version()
    return tuple(sorted(found.items()))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


@functools.cache
def ptxas_version() -> str:
    """Version of the assembler that comes with the CUDA wheels, else of the one on PATH."""
    tool = _wheel_ptxas() or shutil.which("ptxas")
    if tool is None:
        return ABSENT
    done = subprocess.run([str(tool), "--version"], capture_output=True, text=True)
    match = re.search(r"V(\d[\d.]*)", done.stdout)
    return match.group(1) if match else "unknown"


def _wheel_ptxas() -> Path | None:
    try:
        import nvidia  # type: ignore[import-not-found]
    except ImportError:
        return None
    for folder in nvidia.__path__:
        found = sorted(Path(folder).glob("*/bin/ptxas"))
        if found:
            return found[0]
    return None


@functools.cache
def chip_name(device: Any) -> str:
    """The device's name and architecture; for a CPU also the vector instructions it has."""
    if device.platform == "cpu":
        return _cpu_name()
    capability = getattr(device, "compute_capability", "")
    return f"{device.device_kind} sm{capability}" if capability else str(device.device_kind)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{host.machine()} {host.processor() or 'unknown'}"
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    has = set(flags.group(1).split()) if flags else set()
    features = " ".join(feature for feature in _VECTOR_FEATURES if feature in has)
    return f"{name.group(1).strip() if name else host.machine()} [{features or 'no vectors known'}]"


def driver_version() -> str:
    """Version of the NVIDIA kernel driver; "absent" without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ABSENT
    match = re.search(r"Module(?: for \S+)?\s+(\d[\d.]*)", text)
    return match.group(1) if match else "unknown"
