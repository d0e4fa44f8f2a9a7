"""The gradient of the token table: the first token of each id, then the second ones, and so on."""

import jax
import jax.numpy as jnp
from jax import lax


def embedding_gradient_reference(
    dy: jax.Array, tokens: jax.Array, num_rows: jax.Array, *, vocab_size: int, out_dtype: str
) -> tuple[jax.Array]:
    """dy [T, D], tokens [T] -> [V, D]: row v adds dy[t] of its tokens, t ascending, in float32.

    A pass meets each row of the table at most once, so that nothing is left to the order in which a
    scatter adds; there are as many passes as the commonest id has tokens.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    real = index < num_rows
    tokens = jnp.where(real, jnp.clip(tokens, 0, vocab_size - 1), vocab_size + index)
    order = jnp.argsort(tokens, stable=True).astype(jnp.int32)
    ranked = tokens[order]
    starts = jnp.where((index == 0) | (ranked != jnp.roll(ranked, 1)), index, 0)
    turn = jnp.zeros_like(index).at[order].set(index - lax.cummax(starts), unique_indices=True)

    def step(n: jax.Array, acc: jax.Array) -> jax.Array:
        # What is not met now goes to rows that do not exist, each to its own.
        row = jnp.where(real & (turn == n), tokens, vocab_size + index)
        new = lax.optimization_barrier(dy.astype(jnp.float32))
        added = acc.at[row].add(new, mode="drop", unique_indices=True)
        return lax.optimization_barrier(added)

    passes = lax.optimization_barrier(jnp.max(jnp.where(real, turn, -1)) + 1)
    start = jnp.zeros((vocab_size, dy.shape[1]), jnp.float32)
    return (lax.fori_loop(0, passes, step, start).astype(out_dtype),)
