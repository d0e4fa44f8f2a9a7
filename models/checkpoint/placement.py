"""From a host array to a device array of the wanted dtype and sharding."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import ml_dtypes
import numpy as np

# One sharding for all parameters, or one for each path.
Shardings = jax.sharding.Sharding | Mapping[str, jax.sharding.Sharding] | None
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def host_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a parameter dtype's name; ValueError for an unknown one."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def sharding_of(shardings: Shardings, path: str) -> jax.sharding.Sharding | None:
    """The sharding of one parameter; ValueError if a mapping does not name it."""
    if not isinstance(shardings, Mapping):
        return shardings
    if path not in shardings:
        raise ValueError(f"sharding has no entry for parameter {path}.")
    return shardings[path]


def cast(array: np.ndarray, dtype: np.dtype, path: str) -> np.ndarray:
    """Rounds to nearest, ties to even; ValueError if a finite weight overflows."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype)
    # Only float16 has a smaller range than what checkpoints hold; bfloat16 keeps float32's.
    if dtype == np.float16 and np.isinf(rounded).sum() != np.isinf(array).sum():
        raise ValueError(overflow_message(path))
    return rounded


def overflow_message(path: str) -> str:
    return f"parameter {path} does not fit into float16: a weight overflows."


def place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Copies to the devices; with a sharding each device gets its own part only."""
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
