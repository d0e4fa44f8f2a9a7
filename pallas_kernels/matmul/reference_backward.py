"""Gradients of the matrix products, every operation at one fixed shape."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..row_sums import over_row_blocks, sum_rows

ROWS = 4  # rows a block of the element-wise part on a CPU


def weight_gradient_reference(
    dy: jax.Array, x: jax.Array, num_rows: jax.Array, *, out_dtype: str
) -> tuple[jax.Array]:
    """sum over rows m of dy[m, n] x[m, k]: dy [M, N], x [M, K] -> [N, K], rounded once."""

    def product(dy_rows: jax.Array, x_rows: jax.Array) -> jax.Array:
        dims = (((0,), (0,)), ((), ()))
        return lax.dot_general(dy_rows, x_rows, dims, preferred_element_type=jnp.float32)

    return (over_row_blocks(product, dy, x, num_rows=num_rows).astype(out_dtype),)


def bias_gradient_reference(
    dy: jax.Array, num_rows: jax.Array, *, out_dtype: str
) -> tuple[jax.Array]:
    """sum over rows m of dy[m, n]: [M, N] -> [N], rounded once."""
    return (sum_rows(dy.astype(jnp.float32), num_rows).astype(out_dtype),)


def swiglu_gradient_reference(
    gate_up: jax.Array,
    dy: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    rows: int = ROWS,
    counted: bool = True,
) -> tuple[jax.Array]:
    """d(silu(gate) up): gate_up float32 [M, 2 F], dy [M, F] -> (dgate, dup) as [M, 2 F].

    With s = 1 / (1 + exp(-gate)): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
    """
    width = dy.shape[1]

    def body(both_rows: jax.Array, dy_rows: jax.Array) -> tuple[jax.Array]:
        gate, up = both_rows[:, :width], both_rows[:, width:]
        dy_rows = dy_rows.astype(jnp.float32)
        s = lax.optimization_barrier(1.0 / (1.0 + jnp.exp(-gate)))
        bend = lax.optimization_barrier(gate * (1.0 - s))
        slope = s * (1.0 + bend)
        both = jnp.concatenate([dy_rows * up * slope, dy_rows * (gate * s)], axis=1)
        return (both.astype(out_dtype),)

    arrays = gate_up, dy
    (both,) = for_row_blocks(body, *arrays, rows=rows, num_rows=num_rows, counted=counted)
    return (both,)
