"""The Hopper matrix products as implementations of the marked primitives."""

import jax
import jax.numpy as jnp

from ..merge.kernel_hopper import merge_hopper_op
from ..merge.topology import TREE, MergeTopology
from .kernel_hopper import matmul_hopper, pad_weights, swiglu_matmul_hopper
from .schedule import schedule_for, segmented_schedule_for
from .topology import DEFAULT, MatmulTopology

ONE_LAUNCH_ROWS = 64  # beyond, the waiting sums of a tile leave too little room for the product


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
    segments, width = topology.k_segments, w.shape[0]
    if segments == 1:
        x, w = _padded(x, w)
        bias = jnp.pad(bias, (0, w.shape[0] - width)) if bias.size else bias
    if segments == 1:
        schedule = schedule_for(x.shape[0], *w.shape, out_dtype=out_dtype)
    else:
        schedule = segmented_schedule_for(
            x.shape[0], *w.shape, segments=segments, out_dtype=out_dtype
        )
    offsets = bias if bias.size else None
    out = matmul_hopper(x, w, offsets, out_dtype=out_dtype, schedule=schedule, segments=segments)
    return (out[:, :width],)


def segmented_hopper_op(
    x: jax.Array, w: jax.Array, num_rows: jax.Array, *, out_dtype: str
) -> tuple[jax.Array]:
    """x [M, S * K], w [S, N, K] -> [M, N]: S float32 sums, added by one balanced tree.

    One launch for few rows, else a product for each segment and then a merge: the same bits.
    """
    segments, width, depth = w.shape
    rows = x.shape[0]
    if segments > 1 and rows <= ONE_LAUNCH_ROWS:
        schedule = segmented_schedule_for(
            rows, width, segments * depth, segments=segments, out_dtype=out_dtype
        )
        out = matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule, segments=segments)
        return (out,)
    absent = jnp.zeros((0,), x.dtype)
    columns = jnp.split(x, segments, axis=1)
    parts = [
        matmul_hopper_op(part, piece, absent, num_rows, out_dtype="float32", topology=DEFAULT)[0]
        for part, piece in zip(columns, w, strict=True)
    ]
    topology = MergeTopology(order=TREE)
    (out,) = merge_hopper_op(jnp.stack(parts), out_dtype=out_dtype, topology=topology)
    return (out,)


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
    width = gate_up.shape[1]
    x, gate_up = _padded(x, gate_up)
    parts, padded, depth = gate_up.shape
    schedule = schedule_for(x.shape[0], padded, depth, parts=parts, out_dtype=out_dtype)
    out = swiglu_matmul_hopper(x, gate_up, out_dtype=out_dtype, schedule=schedule)
    return (out[:, :width],)


def _padded(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both with zeros up to sizes that the kernel takes; those that fit come back as they are.

    Padding copies the weights in every call. The one array of real models that needs it, a table of
    an odd vocabulary, is padded once by the engine (`Runner`).
    """
    padded = pad_weights(w)
    extra = padded.shape[-1] - x.shape[1]
    return (jnp.pad(x, ((0, 0), (0, extra))) if extra else x), padded


def _require_one_segment(topology: MatmulTopology) -> None:
    if topology.k_segments != 1:
        raise NotImplementedError(
            f"swiglu_matmul on Hopper runs k_segments=1, got k_segments={topology.k_segments}"
        )
