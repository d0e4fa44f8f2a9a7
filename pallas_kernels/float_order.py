"""The order of logits as integers, so that no comparison depends on a compiler's float rules.

Larger float, larger key; -0.0 and 0.0 share one key; a NaN of either sign has the largest. Among
equal keys the lower token id comes first, everywhere.
"""

import jax
import jax.numpy as jnp
from jax import lax

LOWEST = -(2**31)  # below every key
NAN = 2**31 - 1
POS_INF = 0x7F800000
NEG_INF = -POS_INF - 1
_MAGNITUDE = 0x7FFFFFFF


def order_key(values: jax.Array) -> jax.Array:
    """float32 [...] -> int32 [...] of the same order."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitude = bits & _MAGNITUDE
    keys = jnp.where((bits < 0) & (magnitude > 0), bits ^ _MAGNITUDE, magnitude)
    # In this order: of a constant first Mosaic GPU makes unsigned numbers (lane semantics).
    return jnp.where(magnitude <= POS_INF, keys, NAN)


def from_order_key(keys: jax.Array) -> jax.Array:
    """The float32 values of keys; zeros come back as 0.0."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ _MAGNITUDE, keys), jnp.float32)


def is_kept(keys: jax.Array, ids: jax.Array, cut_key: jax.Array, cut_id: jax.Array) -> jax.Array:
    """Whether (key, id) comes no later than the cut in descending order, lowest id first."""
    return (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
