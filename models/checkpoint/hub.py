"""Models named by a hub id, `owner/name`; needs the optional package huggingface_hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Everything but weights. Nothing of it is executed: the list has no *.py.
DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
INDEX = "model.safetensors.index.json"
# Repositories hold the same weights under other names too ("consolidated.safetensors").
SINGLE = "model.safetensors"


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return HUB_ID.fullmatch(name) is not None


def download(name: str, *, weights: bool) -> Path:
    """The local folder of a hub model, downloaded if need be.

    Args:
      name: owner/name.
      weights: also the safetensors files, not only configuration and tokenizer.

    Raises:
      ValueError: the package is not installed, or the model cannot be had (offline, for example).
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            f"{name} is no local path, and a model of the hub needs the package huggingface_hub; "
            "install it, or name a folder or a GGUF file."
        ) from None
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=DESCRIPTION))
        if weights:
            wanted = DESCRIPTION + _weight_files(folder)
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
        return folder
    except Exception as error:  # among others whatever its HTTP library raises
        raise ValueError(
            f"{name} is no local path, and the hub's model of that name cannot be had "
            f"({type(error).__name__}): this machine may be offline, or the name is wrong."
        ) from None


def _weight_files(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(
        set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    )
