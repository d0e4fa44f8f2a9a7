"""The one cast from stored parameters to the compute dtype, shared by sampler and trainer."""

import jax
import jax.numpy as jnp
from jax import lax

_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}


def to_compute_dtype(param: jax.Array, dtype: str) -> jax.Array:
    """Rounds a parameter to `dtype`, nearest even, once.

    Args:
      param: any shape, float32, bfloat16 or float16.
      dtype: the compute dtype.

    Returns:
      The parameter in `dtype`; the same array where it already is.

    Invariance: element-wise; equal whether a sampler casts ahead of time or a trainer inside its
    step, because the rounding point is explicit and no compiler may drop it.
    """
    if param.dtype == jnp.dtype(dtype):
        return param
    if param.dtype == jnp.float32 and dtype in _BITS:
        exponent, mantissa = _BITS[dtype]
        param = lax.reduce_precision(param, exponent_bits=exponent, mantissa_bits=mantissa)
    return param.astype(dtype)
