"""The gradient of the token table: one token after the other."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import num_blocks


def embedding_gradient_reference(
    dy: jax.Array, tokens: jax.Array, num_rows: jax.Array, *, vocab_size: int, out_dtype: str
) -> tuple[jax.Array]:
    """dy [T, D], tokens [T] -> [V, D]: row v adds dy[t] of its tokens, t ascending, in float32."""
    tokens = jnp.clip(tokens, 0, vocab_size - 1)

    def step(t: jax.Array, acc: jax.Array) -> jax.Array:
        new = lax.dynamic_slice_in_dim(dy, t, 1).astype(jnp.float32)
        old = lax.dynamic_slice_in_dim(acc, tokens[t], 1)
        total = lax.optimization_barrier(old + new)
        return lax.dynamic_update_slice_in_dim(acc, total, tokens[t], axis=0)

    start = jnp.zeros((vocab_size, dy.shape[1]), jnp.float32)
    return (lax.fori_loop(0, num_blocks(num_rows, 1), step, start).astype(out_dtype),)
