"""A Hugging Face folder: config.json and one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import TransformerConfig
from ..families import config_from_hf
from .safetensors_file import SafetensorsFile, open_safetensors
from .tensors import TensorSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError if it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def read_hf_config(folder: Path) -> TransformerConfig:
    """The configuration of a Hugging Face folder."""
    generation = folder / "generation_config.json"
    raw = read_json(folder / "config.json")
    try:
        return config_from_hf(raw, read_json(generation) if generation.is_file() else {})
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{folder}: {error}") from None


def open_hf_tensors(folder: Path) -> TensorSource:
    """The tensors of a Hugging Face folder; headers are read, tensors are not.

    Raises:
      ValueError: there are no safetensors files, a shard is missing, truncated or contradicts the
        index, or two shards hold the same tensor.
      NotImplementedError: the weights are pickles.
    """
    index = folder / INDEX
    stated = _index_map(index) if index.is_file() and not (folder / SINGLE).is_file() else None
    names = sorted(set(stated.values())) if stated is not None else [_single_file(folder)]
    files = [open_safetensors(_existing(folder, name)) for name in names]
    owner: dict[str, SafetensorsFile] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor in owner:
                raise ValueError(
                    f"{folder}: tensor {tensor} is in {owner[tensor].path.name} and in "
                    f"{file.path.name}."
                )
            owner[tensor] = file
    if stated is not None:
        _check_index(index, stated, owner)
    return TensorSource(
        where=str(folder),
        shapes={name: file.tensors[name].shape for name, file in owner.items()},
        read=lambda name: owner[name].read(name),
    )


def _index_map(index: Path) -> dict[str, str]:
    stated = read_json(index).get("weight_map")
    if not isinstance(stated, dict) or not stated:
        raise ValueError(f"{index} has no weight_map.")
    for name in stated.values():
        # A name with a folder in it could lead out of the model's own folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}; expected a file of the same folder.")
        if not name.endswith(".safetensors"):
            raise NotImplementedError(f"{index} names {name!r}; only safetensors files are read.")
    return stated


def _single_file(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in found:
        return SINGLE
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{folder} has {len(found)} safetensors files but neither {SINGLE} nor {INDEX}."
        )
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise NotImplementedError(
            f"{folder} holds its weights as {pickles[0]}: such files can run code when opened, so "
            "only safetensors files are read."
        )
    raise ValueError(f"{folder} has no weights: expected {SINGLE} or {INDEX}.")


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} lacks {name}, which {INDEX} names.")
    return path


def _check_index(
    index: Path, stated: Mapping[str, str], owner: Mapping[str, SafetensorsFile]
) -> None:
    for tensor, name in stated.items():
        if tensor not in owner or owner[tensor].path.name != name:
            raise ValueError(f"{index} says that {tensor} is in {name}, and it is not.")
