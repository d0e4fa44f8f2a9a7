"""Explicit rounding points, which no compiler may drop."""

import jax
import jax.numpy as jnp
from jax import lax

_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}


def round_to(values: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
    """Values in `dtype`, rounded once to the nearest even where it is narrower than float32."""
    dtype = jnp.dtype(dtype)
    if values.dtype == dtype:
        return values
    if values.dtype == jnp.float32 and dtype.name in _BITS:
        exponent, mantissa = _BITS[dtype.name]
        values = lax.reduce_precision(values, exponent_bits=exponent, mantissa_bits=mantissa)
    return values.astype(dtype)
