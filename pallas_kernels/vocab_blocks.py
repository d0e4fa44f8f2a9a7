"""How the references lay out a row of logits: [blocks, strips, LANES], in order of token id.

Columns beyond the vocabulary hold -inf.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128


def as_blocks(row: jax.Array, block: int) -> jax.Array:
    """float32 [V] -> [blocks, strips, LANES] with `block` columns a block."""
    padded = -(-row.shape[0] // block) * block
    row = jnp.pad(row, (0, padded - row.shape[0]), constant_values=-jnp.inf)
    return row.reshape(padded // block, block // LANES, LANES)


def token_ids(blocks: jax.Array) -> jax.Array:
    """int32 ids of the columns, in the shape of the blocks."""
    return lax.iota(jnp.int32, blocks.size).reshape(blocks.shape)


def fold(join: Callable[[jax.Array, jax.Array], jax.Array], blocks: jax.Array) -> jax.Array:
    """Joins integers [blocks, strips, LANES] over strips and lanes -> [blocks].

    Written out because a CPU's own reduction takes twice the time; the order does not matter.
    """
    total = blocks[:, 0]
    for i in range(1, blocks.shape[1]):
        total = join(total, blocks[:, i])
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = join(total[:, :half], total[:, half:])
    return total[:, 0]
