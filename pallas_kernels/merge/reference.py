"""The sum of partial results in plain JAX, one addition at a time."""

import jax
from jax import lax

from ..rounding import round_to
from .topology import MergeTopology, merged


def merge_reference(
    parts: jax.Array, *, out_dtype: str, topology: MergeTopology
) -> tuple[jax.Array]:
    """parts float32 [n, ...] -> [...] of out_dtype.

    Element by element, every addition is rounded on its own: there is no product that it could be
    contracted with, and the barriers keep it apart from whatever stands around it.
    """

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.optimization_barrier(a + b)

    terms = lax.optimization_barrier(tuple(parts[i] for i in range(parts.shape[0])))
    return (lax.optimization_barrier(round_to(merged(terms, topology, add), out_dtype)),)
