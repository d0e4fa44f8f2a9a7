"""The weight gradient on Hopper: the forward kernel on transposed operands.

Order of additions: one float32 accumulator per element, rows ascending. Rows beyond `num_rows` and
those that fill the last step up are zeros at the end, so the size of the array changes no bit.
"""

import jax
import jax.numpy as jnp

from .kernel_hopper import K_MULTIPLE
from .op_hopper import matmul_hopper_op
from .topology import DEFAULT


def weight_gradient_hopper(
    dy: jax.Array, x: jax.Array, num_rows: jax.Array, *, out_dtype: str
) -> tuple[jax.Array]:
    """sum over rows m of dy[m, n] x[m, k]: dy [M, N], x [M, K] -> [N, K], rounded once."""
    rows = dy.shape[0]
    real = jnp.arange(rows, dtype=jnp.int32)[:, None] < num_rows
    extra = -rows % K_MULTIPLE

    def turned(array: jax.Array) -> jax.Array:
        # A select, because padding may hold NaN and 0 x NaN is not 0.
        clean = jnp.where(real, array, jnp.zeros((), array.dtype))
        return jnp.pad(clean, ((0, extra), (0, 0))).T

    absent = jnp.zeros((0,), x.dtype)
    return matmul_hopper_op(
        turned(dy), turned(x), absent, num_rows, out_dtype=out_dtype, topology=DEFAULT
    )
