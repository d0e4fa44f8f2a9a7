"""One digest over all parameters, part of the identity of a completion."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import numpy as np


def weights_digest(params: Mapping[str, jax.Array | np.ndarray]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters.

    Args:
      params: path -> array, in any order and any sharding.

    Returns:
      64 hexadecimal digits.

    Invariance: the order of the mapping, the sharding and the devices change nothing.
    """
    digest = hashlib.sha256()
    for path in sorted(params):
        array = np.ascontiguousarray(params[path])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        header = f"{path}\0{array.dtype.name}\0{array.shape}\0"
        digest.update(header.encode())
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
