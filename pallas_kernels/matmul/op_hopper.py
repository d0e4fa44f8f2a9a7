"""The Hopper matrix products as implementations of the marked primitives."""

import jax

from .kernel_hopper import matmul_hopper, swiglu_matmul_hopper
from .schedule import schedule_for
from .topology import MatmulTopology


def matmul_hopper_op(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
) -> tuple[jax.Array]:
    """x [M, K], w [N, K], bias [N] or [0] -> [M, N], schedule by the table."""
    del num_rows  # rows beyond it are computed and not looked at
    _require_one_segment(topology)
    schedule = schedule_for(x.shape[0], *w.shape, out_dtype=out_dtype)
    offsets = bias if bias.size else None
    return (matmul_hopper(x, w, offsets, out_dtype=out_dtype, schedule=schedule),)


def swiglu_hopper_op(
    x: jax.Array,
    gate_up: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: str,
    topology: MatmulTopology,
) -> tuple[jax.Array]:
    """x [M, K], gate_up [2, F, K] -> [M, F], schedule by the table."""
    del num_rows
    _require_one_segment(topology)
    parts, width, depth = gate_up.shape
    schedule = schedule_for(x.shape[0], width, depth, parts=parts, out_dtype=out_dtype)
    return (swiglu_matmul_hopper(x, gate_up, out_dtype=out_dtype, schedule=schedule),)


def _require_one_segment(topology: MatmulTopology) -> None:
    if topology.k_segments != 1:
        raise NotImplementedError(
            f"matmul on Hopper runs k_segments=1 so far, got k_segments={topology.k_segments}"
        )
