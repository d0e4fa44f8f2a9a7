"""The tiny checkpoints of tests/fixtures, and copies of them to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
FAMILIES = ("llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen3")
STORED_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def copy_of(name: str, folder: Path) -> Path:
    """A writable copy of a fixture, without the expected logits."""
    target = folder / name
    shutil.copytree(CHECKPOINTS / name, target, ignore=shutil.ignore_patterns("*.npz"))
    return target


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """A whole safetensors file; the format is simple enough to be read twice over."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
            dtype=STORED_DTYPES[entry["dtype"]],
        ).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    names = {dtype: name for name, dtype in STORED_DTYPES.items()}
    names[np.dtype(np.int8)] = "I8"
    header, blobs, offset = {}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Applies `change` to the tensors of a folder that has a single file."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)


def all_tensors(name: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in sorted((CHECKPOINTS / name).glob("*.safetensors")):
        tensors |= read_tensors(path)
    return tensors
