"""Gradients of the RMS norms, every operation at one fixed number of rows."""

import jax
import jax.numpy as jnp

from ..fixed_rows import for_row_blocks
from ..lanes_backward import normalize_gradient
from ..row_sums import sum_rows
from .topology import RmsNormTopology

ROWS = 4  # rows a block on a CPU


def rms_norm_gradient_reference(
    x: jax.Array,
    scale: jax.Array,
    dnormed: jax.Array,
    dstream: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    topology: RmsNormTopology,
    rows: int = ROWS,
    counted: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """x, dnormed [M, D], dstream [M, D] or [M, 0] -> dx [M, D] of x's dtype, dscale [D].

    dstream is what reaches x past the norm; it is added in float32 before the one rounding.
    """

    def body(x_rows: jax.Array, dy: jax.Array, past: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_rows, dy = x_rows.astype(jnp.float32), dy.astype(jnp.float32)
        dx, share = normalize_gradient(x_rows, scale, eps, topology.lanes, dy)
        if past.size:
            dx = jax.lax.optimization_barrier(dx) + past.astype(jnp.float32)
        return dx.astype(x.dtype), share

    arrays = (x, dnormed, dstream)
    dx, shares = for_row_blocks(body, *arrays, rows=rows, num_rows=num_rows, counted=counted)
    return dx, sum_rows(shares, num_rows, counted=counted).astype(scale.dtype)
