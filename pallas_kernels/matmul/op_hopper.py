"""The Hopper matrix products as implementations of the marked primitives."""

import jax
import jax.numpy as jnp

from .kernel_hopper import matmul_hopper, pad_weights, swiglu_matmul_hopper
from .schedule import schedule_for, segmented_schedule_for
from .topology import DEFAULT, MatmulTopology


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

    One launch: the bits of a product for each segment and a merge of them.
    """
    segments, width, depth = w.shape
    if segments == 1:
        absent = jnp.zeros((0,), x.dtype)
        return matmul_hopper_op(x, w[0], absent, num_rows, out_dtype=out_dtype, topology=DEFAULT)
    w = pad_weights(w)
    padded, extra = w.shape[1], w.shape[2] - depth
    if extra:
        x = jnp.pad(x.reshape(-1, segments, depth), ((0, 0), (0, 0), (0, extra)))
        x = x.reshape(x.shape[0], -1)
    schedule = segmented_schedule_for(
        x.shape[0], padded, x.shape[1], segments=segments, out_dtype=out_dtype
    )
    out = matmul_hopper(x, w, out_dtype=out_dtype, schedule=schedule, segments=segments)
    return (out[:, :width],)


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
