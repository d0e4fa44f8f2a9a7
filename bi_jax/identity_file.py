"""identity.json: the identity beside what was made under it (a checkpoint, a trace)."""

import json
from pathlib import Path

from .identity import Identity
from .whole_file import write_whole

NAME = "identity.json"


def write_identity(folder: Path, identity: Identity) -> Path:
    """Writes `identity.json` into an existing folder; the file is there whole or not at all."""
    path = folder / NAME
    write_whole(path, json.dumps(identity.to_dict(), indent=2) + "\n")
    return path


def read_identity(folder: Path) -> Identity:
    """The identity that `write_identity` wrote.

    Raises:
      ValueError: there is no such file, or it is damaged.
    """
    path = folder / NAME
    try:
        return Identity.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
