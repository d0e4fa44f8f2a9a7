"""Arithmetic on gradients in plain JAX, kept apart from whatever surrounds it."""

import jax
import jax.numpy as jnp
from jax import lax

LANES = 4096  # partial sums of a sum of squares; part of the bits
STRIPS = 8  # added in one step of its loop; schedule


def merge_reference(a: jax.Array, b: jax.Array) -> tuple[jax.Array]:
    """a + b."""
    a, b = lax.optimization_barrier((a, b))
    return (lax.optimization_barrier(a + b),)


def nonnegative_zero_reference(a: jax.Array) -> tuple[jax.Array]:
    """a, with 0.0 where it is a zero of either sign."""
    return (jnp.where(a == 0, jnp.zeros((), a.dtype), a),)


def tree_sum_reference(leaves: jax.Array, *, out_dtype: str) -> tuple[jax.Array]:
    """[n, ...] -> [...]: 2i and 2i + 1 are added, then the pairs, and so on; n a power of two."""
    # Sums alone: there is no product that could be contracted into one of them.
    nodes = list(lax.optimization_barrier(leaves).astype(out_dtype))
    nodes = [nonnegative_zero_reference(node)[0] for node in nodes]
    while len(nodes) > 1:
        nodes = [a + b for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return (lax.optimization_barrier(nodes[0]),)


def scale_reference(a: jax.Array, factor: jax.Array) -> tuple[jax.Array]:
    """a * factor, in float32."""
    a, factor = lax.optimization_barrier((a, factor))
    return (lax.optimization_barrier(a.astype(jnp.float32) * factor).astype(a.dtype),)


def sum_of_squares_reference(a: jax.Array) -> tuple[jax.Array]:
    """Sum of a^2 over all elements, lane by lane."""
    flat = a.reshape(-1)
    together = min(-(-flat.shape[0] // LANES), STRIPS)
    steps = -(-flat.shape[0] // (together * LANES))
    flat = jnp.pad(flat, (0, steps * together * LANES - flat.shape[0])).reshape(-1, LANES)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        strips = lax.dynamic_slice_in_dim(flat, i * together, together).astype(jnp.float32)
        # The barrier keeps the squares out of the adds, where they could become FMAs.
        for strip in lax.optimization_barrier(strips * strips):
            acc = acc + strip
        return acc

    total = lax.fori_loop(0, steps, step, jnp.zeros((LANES,), jnp.float32))
    while total.shape[0] > 1:
        half = total.shape[0] // 2
        total = lax.optimization_barrier(total[:half] + total[half:])
    return (total[0],)


def clip_factor_reference(squares: jax.Array, max_norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sqrt(squares), and max_norm / norm where the norm is larger, else 1."""
    norm = lax.optimization_barrier(jnp.sqrt(lax.optimization_barrier(squares)))
    return norm, jnp.where(norm > max_norm, max_norm / norm, 1.0)
