"""A profile of an engine at work, with the identity under which it was made beside it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from .engine import Engine
from .identity_file import write_identity


@contextlib.contextmanager
def trace(folder: str | Path, engine: Engine) -> Iterator[Path]:
    """Profiles what runs inside the `with`, and says in identity.json what made it.

    Args:
      folder: made if it is not there; XProf and TensorBoard read it, and Perfetto the
        `*.trace.json.gz` below it.
      engine: whose identity is written, as it is at the start.

    Returns:
      The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_identity(folder, engine.identity)
    with jax.profiler.trace(str(folder)):
        yield folder
