#!/usr/bin/env python3
"""A model answers prompts; with no arguments SmolLM2-135M answers one on whatever is here."""

import sys

if sys.version_info < (3, 12):  # noqa: UP036 - somebody runs it with an older one
    sys.exit(f"error: bi_jax needs Python 3.12 or newer, this is {sys.version.split()[0]}")

try:
    from bi_jax.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("bi_jax", "jax", "flax", "numpy"):
        raise
    sys.exit(f"error: {error.name} is not installed; run `make generate`, which sets all up")

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
