"""What a file of measurements says about its run: when, where, with what, by which command."""

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from bi_jax.versions import chip_name, library_versions

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run_header(script: str) -> dict[str, Any]:
    """Date, devices, versions, command and how the cards are linked."""
    device = jax.devices()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "device": chip_name(device),
        "devices": len(jax.devices()),
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": dict(library_versions(device.platform)),
        "driver": _asked("--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _asked("topo", "-m"),
        "command": command_line(script),
    }


def command_line(script: str) -> str:
    """The command of this run, files without their folders: where they lay is nobody's need."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python", f"scripts/{Path(script).name}", *words])


def _asked(*options: str) -> list[str]:
    """Lines that nvidia-smi prints; none where there is no card."""
    if jax.default_backend() != "gpu" or shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True)
    return [_ANSI.sub("", line) for line in done.stdout.strip().splitlines()]
