"""Operands on which a wrong order of additions, or a leak between rows, shows.

Standard-normal operands hide most faults: their sums round the same way in many orders. These are
spread over many powers of two, cancel, sit on ties, or are poison. All are made on the host from a
seed, so a failure is found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Row counts around the points where libraries change their mind.
ROW_COUNTS = (
    *(1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33),
    *(63, 64, 65, 127, 128, 129, 255, 256, 257, 2048),
)

NEIGHBOURS = ("nan", "inf", "-inf", "huge", "-huge", "zero", "-zero", "subnormal")

# Powers of two that keep products and sums of a few thousand terms finite.
_SPREAD = {"float32": (-20, 20), "bfloat16": (-20, 20), "float64": (-20, 20), "float16": (-8, 4)}


def spread(
    shape: Sequence[int],
    dtype: Any = "float32",
    *,
    seed: int = 0,
    powers: tuple[int, int] | None = None,
) -> np.ndarray:
    """Values of both signs spread evenly over powers of two, half of them nearly cancelling.

    Args:
      shape: any; cancelling partners stand along the last axis, far apart.
      dtype: a float dtype.
      seed: of the generator.
      powers: lowest and highest power of two; None: 2^-20..2^20, less for float16.

    Returns:
      An array of that shape and dtype.
    """
    dtype = jnp.dtype(dtype)
    low, high = powers or _SPREAD.get(dtype.name, (-8, 4))
    rng = np.random.default_rng(seed)
    values = rng.uniform(1.0, 2.0, shape) * np.exp2(rng.integers(low, high, shape))
    values *= rng.choice([-1.0, 1.0], shape)
    width = shape[-1] if len(shape) else 0
    half = width // 2
    if half:
        order = rng.permutation(width)
        mine, partner = order[: half // 2], order[half : half + half // 2]
        almost = 1.0 + rng.uniform(-(2.0**-6), 2.0**-6, (*shape[:-1], len(mine)))
        values[..., partner] = -values[..., mine] * almost
    return values.astype(dtype)


def poison(shape: Sequence[int], dtype: Any, kind: str) -> np.ndarray:
    """What a neighbour, a padding row or an unwritten page may hold.

    Args:
      shape: any.
      dtype: a float dtype.
      kind: one of `NEIGHBOURS`.

    Raises:
      ValueError: no such kind.
    """
    dtype = jnp.dtype(dtype)
    info = jnp.finfo(dtype)
    huge = min(1e30, float(info.max))
    values = {
        "nan": np.nan,
        "inf": np.inf,
        "-inf": -np.inf,
        "huge": huge,
        "-huge": -huge,
        "zero": 0.0,
        "-zero": -0.0,
        "subnormal": float(info.smallest_subnormal),
    }
    if kind not in values:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(NEIGHBOURS)}")
    return np.full(tuple(shape), values[kind], np.float64).astype(dtype)


def tied_logits(shape: Sequence[int], *, seed: int = 0, levels: int = 3) -> np.ndarray:
    """float32 logits of a few exactly equal values, signed zeros among them: ties everywhere."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-levels, levels + 1, shape).astype(np.float32)
    zeros = rng.choice([-0.0, 0.0], shape).astype(np.float32)
    return np.where(values == 0, zeros, values)


def lengths_around(*marks: int) -> tuple[int, ...]:
    """Lengths one below, at and one above each mark (a page, a block, a split), positive ones."""
    found = {mark + step for mark in marks for step in (-1, 0, 1)}
    return tuple(sorted(length for length in found if length > 0))
