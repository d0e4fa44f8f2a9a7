#!/usr/bin/env python3
"""Runs the invariance battery on this machine and model, and writes a certificate and a report."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036 - somebody runs it with an older one
    sys.exit(f"error: bi_jax needs Python 3.12 or newer, this is {sys.version.split()[0]}")

try:
    from bi_jax.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("bi_jax", "jax", "flax", "numpy"):
        raise
    sys.exit(f"error: {error.name} is not installed; run `make setup`, which sets all up")

if __name__ == "__main__":
    sys.exit(main(["certify", *sys.argv[1:]]))
