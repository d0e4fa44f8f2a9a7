"""Runs a reference body over blocks of a fixed number of rows.

On a CPU even element-wise code is not safe: the compiler vectorises by the array's length and
contracts multiply-adds by what it happens to fuse. So a reference computes every operation at
one shape that the row count cannot change, in a loop whose trip count the compiler cannot see,
with barriers around the body so that nothing outside fuses into it.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Body = Callable[..., Sequence[jax.Array]]


def num_blocks(num_rows: jax.Array, rows: int) -> jax.Array:
    """ceil(num_rows / rows) as an int32 that the compiler cannot constant-fold."""
    count = lax.optimization_barrier(jnp.asarray(num_rows, jnp.int32))
    return (count + (rows - 1)) // rows


def for_row_blocks(
    body: Body, *arrays: jax.Array, rows: int, num_rows: jax.Array, counted: bool = True
) -> tuple[jax.Array, ...]:
    """Applies `body` to consecutive blocks of `rows` rows.

    Args:
      body: ``(*blocks [rows, ...]) -> outputs [rows, ...]``; row r of an output may depend on
        row r of the blocks only.
      *arrays: [M, ...] each, padded here to a multiple of `rows`.
      rows: rows a block, the one shape at which the body is compiled.
      num_rows: int32 [], rows that hold data.
      counted: blocks beyond num_rows are not run. For a GPU False: it asks its host before every
        iteration of a loop whose length it does not know, which takes longer than some padding.

    Returns:
      The outputs, [M, ...] each; rows of blocks that were not run are zero.

    Invariance: the bits of a row depend on that row alone, not on M, on num_rows, on the row's
    place or on what the other rows hold.
    """
    total = arrays[0].shape[0]
    padded = -(-total // rows) * rows
    arrays = tuple(_pad_rows(a, padded) for a in arrays)
    blocks = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in arrays]
    outs = jax.eval_shape(body, *blocks)
    init = tuple(jnp.zeros((padded, *out.shape[1:]), out.dtype) for out in outs)

    def step(i: jax.Array, done: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * rows
        sliced = tuple(lax.dynamic_slice_in_dim(a, start, rows) for a in arrays)
        results = lax.optimization_barrier(tuple(body(*lax.optimization_barrier(sliced))))
        return tuple(
            lax.dynamic_update_slice_in_dim(d, r, start, axis=0)
            for d, r in zip(done, results, strict=True)
        )

    count = num_blocks(num_rows, rows) if counted else padded // rows
    done = lax.fori_loop(0, count, step, init)
    return tuple(d[:total] for d in done)


def _pad_rows(array: jax.Array, padded: int) -> jax.Array:
    extra = padded - array.shape[0]
    if extra == 0:
        return array
    return jnp.pad(array, [(0, extra)] + [(0, 0)] * (array.ndim - 1))
