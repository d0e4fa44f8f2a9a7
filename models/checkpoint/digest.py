"""One digest over all parameters, part of the identity of a completion."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

FORMAT = b"bi_jax weights 2\0"
PIECE_BYTES = 1 << 23  # hashed on its own; part of what the digest is
THREADS = min(16, os.cpu_count() or 1)
AHEAD = 8 * THREADS  # pieces of earlier parameters under way while a later one is fetched


def weights_digest(params: Mapping[str, jax.Array | np.ndarray], *, threads: int = THREADS) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all parameters.

    What is hashed is `FORMAT` and, for every path in order, `path NUL dtype NUL shape NUL` and the
    SHA-256 of each piece of 8 MiB of its little-endian bytes, so that threads can share the work.

    Args:
      params: path -> array, in any order and any sharding. Of what lies on a device, each thread
        has one piece on the host at a time.
      threads: how many hash; speed only.

    Returns:
      64 hexadecimal digits.

    Invariance: the order of the mapping, the sharding, the devices and the number of threads change
    nothing.
    """
    digest = hashlib.sha256(FORMAT)
    under_way: collections.deque[Future[bytes] | bytes] = collections.deque()

    def take() -> None:
        part = under_way.popleft()
        digest.update(part if isinstance(part, bytes) else part.result())

    with ThreadPoolExecutor(threads, thread_name_prefix="bi-jax-digest") as pool:
        for path in sorted(params):
            while len(under_way) > AHEAD:
                take()
            array = params[path]
            under_way.append(f"{path}\0{array.dtype.name}\0{array.shape}\0".encode())
            array, count = _flat(array), PIECE_BYTES // array.dtype.itemsize
            for start in range(0, array.size, count):
                under_way.append(pool.submit(_piece_digest, array, start, count))
        while under_way:
            take()
    return digest.hexdigest()


def _flat(array: Any) -> Any:
    """The array itself if pieces of it are to be fetched, else its values [N] on the host."""
    if isinstance(array, jax.Array) and _fetched_in_pieces(array):
        return array
    return np.ascontiguousarray(array).reshape(-1)


def _fetched_in_pieces(array: jax.Array) -> bool:
    # A host's array is seen without a copy. Places in larger ones are no int32.
    devices = array.devices()
    on_one = len(devices) == 1 and next(iter(devices)).platform != "cpu"
    return on_one and array.size < 2**31


def _piece_digest(array: Any, start: int, count: int) -> bytes:
    fetch: Any = device_piece if isinstance(array, jax.Array) else _host_piece
    piece = fetch(array, start, count)
    little = piece.astype(piece.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(little.view(np.uint8).data).digest()


def _host_piece(array: np.ndarray, start: int, count: int) -> np.ndarray:
    return array[start : start + count]


def device_piece(array: jax.Array, start: int, count: int) -> np.ndarray:
    """Values [start, start + count) of an array on one device, fewer at its end.

    The whole is never copied to the host: an array keeps such a copy for as long as it lives, and
    to make it holds up every other thread for seconds.
    """
    count = min(count, array.size)
    at = min(start, array.size - count)  # the last piece too has the one size
    piece = np.asarray(_cut(array, np.int32(at), count=count))
    return piece[start - at :]


@functools.partial(jax.jit, static_argnames="count")
def _cut(array: jax.Array, start: jax.Array, *, count: int) -> jax.Array:
    return jax.lax.dynamic_slice(array.reshape(-1), (start,), (count,))
