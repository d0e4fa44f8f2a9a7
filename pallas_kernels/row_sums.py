"""Sums over token rows in one stated order, for the gradients of what all rows share.

Rows are met in blocks of `ROWS` at fixed places, ascending, rows beyond `num_rows` counting as
zeros, so that neither the size of the array nor what its padding holds can change a bit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .fixed_rows import num_blocks

ROWS = 64  # rows a block; a power of two; part of the bits

Sum = Callable[..., jax.Array]


def over_row_blocks(
    block_sum: Sum, *arrays: jax.Array, num_rows: jax.Array, rows: int = ROWS
) -> jax.Array:
    """The float32 sum of `block_sum(*blocks [rows, ...])` over the blocks, ascending.

    Args:
      block_sum: sums over the rows of one block; rows beyond num_rows come to it as zeros.
      *arrays: [M, ...] each.
      num_rows: int32 [], rows that hold data.
      rows: rows a block.
    """
    total = arrays[0].shape[0]
    padded = -(-total // rows) * rows
    arrays = tuple(
        jnp.pad(a, [(0, padded - total)] + [(0, 0)] * (a.ndim - 1)) if padded > total else a
        for a in arrays
    )
    blocks = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in arrays]
    out = jax.eval_shape(block_sum, *blocks)
    place = jnp.arange(rows, dtype=jnp.int32)

    def clean(array: jax.Array, start: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(array, start, rows)
        real = (start + place < num_rows).reshape(rows, *[1] * (array.ndim - 1))
        # A select, because padding may hold NaN and 0 x NaN is not 0.
        return jnp.where(real, block, jnp.zeros((), array.dtype))

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        cleaned = lax.optimization_barrier(tuple(clean(a, i * rows) for a in arrays))
        part = lax.optimization_barrier(block_sum(*cleaned))
        return lax.optimization_barrier(acc + part)

    start = jnp.zeros(out.shape, jnp.float32)
    count = num_blocks(num_rows, rows)
    return lax.fori_loop(0, count, step, start)


def sum_rows(values: jax.Array, num_rows: jax.Array, *, counted: bool = True) -> jax.Array:
    """float32 [M, ...] -> [...]: a block's rows are added by halves, then the blocks ascending."""

    def by_halves(block: jax.Array) -> jax.Array:
        while block.shape[0] > 1:
            half = block.shape[0] // 2
            block = block[:half] + block[half:]
        return block[0]

    if counted:
        return over_row_blocks(by_halves, values, num_rows=num_rows)
    # The same additions, those of all blocks side by side: they are elementwise, and nothing is
    # multiplied that could be contracted into them.
    total = values.shape[0]
    blocks = -(-total // ROWS)
    values = jnp.pad(values, [(0, blocks * ROWS - total)] + [(0, 0)] * (values.ndim - 1))
    real = jnp.arange(blocks * ROWS, dtype=jnp.int32) < num_rows
    values = jnp.where(real.reshape(-1, *[1] * (values.ndim - 1)), values, jnp.float32(0))
    values = lax.optimization_barrier(values).reshape(blocks, ROWS, *values.shape[1:])
    sums = lax.optimization_barrier(by_halves(jnp.swapaxes(values, 0, 1)))
    acc, _ = lax.scan(
        lambda acc, part: (acc + part, None),
        jnp.zeros(sums.shape[1:], jnp.float32),
        sums,
        unroll=min(blocks, 8),
    )
    return lax.optimization_barrier(acc)
