"""The RMS norm on a CPU, every operation at one fixed number of rows."""

import jax
import jax.numpy as jnp

from ..fixed_rows import for_row_blocks
from ..lanes import normalize
from .topology import RmsNormTopology

ROWS = 4  # rows a block


def rms_norm_reference(
    x: jax.Array,
    scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array]:
    """x [M, D] -> normed [M, D]."""

    def body(rows: jax.Array) -> tuple[jax.Array]:
        normed = normalize(rows.astype(jnp.float32), scale, eps, topology.lanes)
        return (normed.astype(x.dtype),)

    return (for_row_blocks(body, x, rows=ROWS, num_rows=num_rows)[0],)


def add_rms_norm_reference(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    num_rows: jax.Array,
    *,
    eps: float,
    topology: RmsNormTopology,
) -> tuple[jax.Array, jax.Array]:
    """x, residual [M, D] -> (normed, new residual); the sum is rounded before it is normed."""

    def body(rows: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = (rows.astype(jnp.float32) + stream.astype(jnp.float32)).astype(x.dtype)
        # A rounding point of the contract: without the barrier a compiler may keep float32.
        total = jax.lax.optimization_barrier(total)
        normed = normalize(total.astype(jnp.float32), scale, eps, topology.lanes)
        return normed.astype(x.dtype), total

    normed, total = for_row_blocks(body, x, residual, rows=ROWS, num_rows=num_rows)
    return normed, total
