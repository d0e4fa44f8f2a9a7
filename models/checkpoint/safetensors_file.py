"""The container format safetensors: a header in JSON, then the tensors' bytes.

The `safetensors` package gives NumPy no bfloat16 and says "incomplete metadata" for a truncated
file, so the header is read here: an 8-byte length, then name -> dtype, shape and byte range.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor: dtype and shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """An opened safetensors file."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` in its stored dtype; NotImplementedError if that is no float we read."""
        tensor = self.tensors[name]
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise NotImplementedError(
                f"{self.path}: tensor {name} has dtype {tensor.dtype}, which is not supported "
                f"(expected one of {', '.join(DTYPES)}; quantised weights are not read)."
            )
        count = math.prod(tensor.shape)
        if tensor.num_bytes != count * dtype.itemsize:
            raise ValueError(
                f"{self.path}: tensor {name} has {tensor.num_bytes} bytes, which does not fit "
                f"shape {tensor.shape} of {tensor.dtype}."
            )
        flat = np.fromfile(self.path, dtype=dtype, count=count, offset=tensor.offset)
        if len(flat) != count:
            raise ValueError(f"{self.path} ends inside tensor {name}: it was cut while being read.")
        return flat.reshape(tensor.shape)


def open_safetensors(path: str | Path) -> SafetensorsFile:
    """Reads the header of a safetensors file; no tensor is read.

    Raises:
      ValueError: the file is no safetensors file, or ends before its last tensor does.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file.")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(
            f"{path} is truncated: its header is {length} bytes long, and {len(text)} are there."
        )
    start = 8 + length
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry, start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error}).") from None
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=start)
    if end > size:
        raise ValueError(f"{path} is truncated: its tensors end at byte {end}, it ends at {size}.")
    ranges = sorted((t.offset, t.offset + t.num_bytes) for t in tensors.values())
    if any(after[0] < before[1] for before, after in itertools.pairwise(ranges)):
        raise ValueError(f"{path} is damaged: two of its tensors lie in the same bytes.")
    return SafetensorsFile(path=path, tensors=tensors)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _stored(entry: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(extent) for extent in entry["shape"])
    if not 0 <= begin <= end or any(extent < 0 for extent in shape):
        raise ValueError(f"byte range {begin} to {end} of shape {shape}")
    return StoredTensor(
        dtype=str(entry["dtype"]), shape=shape, offset=start + begin, num_bytes=end - begin
    )
