"""Shape and dtype checks of the public ops, each with one clear sentence."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def check_float(op: str, name: str, array: Any) -> None:
    """Raises ValueError unless the array's dtype is one of `FLOAT_DTYPES`."""
    if jnp.dtype(array.dtype).name not in FLOAT_DTYPES:
        expected = ", ".join(FLOAT_DTYPES)
        raise ValueError(f"{op}: {name} must be one of {expected}, got {array.dtype}")


def check_same_dtype(op: str, first: str, a: Any, second: str, b: Any) -> None:
    """Raises ValueError unless both arrays have one dtype."""
    if a.dtype != b.dtype:
        raise ValueError(
            f"{op}: {first} and {second} must have one dtype, got {a.dtype} and {b.dtype}"
        )


def check_dtype(op: str, name: str, array: Any, dtype: Any) -> None:
    """Raises ValueError unless the array has exactly this dtype."""
    if array.dtype != jnp.dtype(dtype):
        raise ValueError(f"{op}: {name} must be {jnp.dtype(dtype).name}, got {array.dtype}")


def check_shape(op: str, name: str, array: Any, expected: Sequence[int | None]) -> None:
    """Raises ValueError unless the shape matches; None stands for any size."""
    shape = tuple(array.shape)
    fits = len(shape) == len(expected) and all(
        e is None or e == s for e, s in zip(expected, shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join("?" if e is None else str(e) for e in expected) + "]"
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(shape)}")


def row_count(rows: Any, num_rows: Any) -> Any:
    """`num_rows` as an int32 scalar array, or the number of rows of `rows` where it is None."""
    return jnp.asarray(rows.shape[0] if num_rows is None else num_rows, jnp.int32)
