"""Products in segments of K, each with its accumulator, merged by one balanced tree."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .. import contracts
from ..merge.reference import merge_reference
from ..merge.topology import TREE, MergeTopology
from ..primitive import HOPPER, REFERENCE, define_op
from .op_hopper import segmented_hopper_op
from .reference import matmul_reference
from .topology import DEFAULT


def _avals(x: Any, w: Any, *_: Any, out_dtype: str) -> list[Any]:
    return [jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.dtype(out_dtype))]


def _segmented_reference(
    x: jax.Array, w: jax.Array, num_rows: jax.Array, *, out_dtype: str
) -> tuple[jax.Array]:
    """One product after the other, then the merge."""
    absent, depth = jnp.zeros((0,), x.dtype), w.shape[2]
    parts = [
        matmul_reference(
            x[:, s * depth : (s + 1) * depth],
            w[s],
            absent,
            num_rows,
            out_dtype="float32",
            topology=DEFAULT,
        )[0]
        for s in range(w.shape[0])
    ]
    topology = MergeTopology(order=TREE)
    (out,) = merge_reference(jnp.stack(parts), out_dtype=out_dtype, topology=topology)
    return (out,)


_bind = define_op(
    "segmented_matmul",
    out_avals=_avals,
    implementations={
        REFERENCE: _segmented_reference,
        HOPPER: segmented_hopper_op,
    },
)


def segmented_matmul(
    x: Float[Array, "M SK"],
    w: Float[Array, "S N K"],
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    out_dtype: str | None = None,
) -> Float[Array, "M N"]:
    """sum over s of x[:, segment s] w[s]^T: a float32 sum for each segment, added by one tree.

    Args:
      x: [M, S * K] float32, bfloat16 or float16, the segments side by side.
      w: [S, N, K] of x's dtype, S a power of two.
      backend: implementation by name.
      num_rows: int32 [], rows that hold data; the others' outputs are unspecified. None: all.
      out_dtype: dtype of the result; None: x's.

    Returns:
      [M, N], rounded once, at the root of the tree. No derivative: a trainer's weights are whole.

    Raises:
      ValueError: shapes or dtypes do not fit, or S is no power of two.
      NotImplementedError: no such backend, or it cannot run these segments.

    Invariance: as `matmul`. It is the `tree_sum` of the S products, each in float32.
    """
    op = "segmented_matmul"
    contracts.check_float(op, "x", x)
    contracts.check_same_dtype(op, "x", x, "w", w)
    contracts.check_shape(op, "w", w, (None, None, None))
    contracts.check_shape(op, "x", x, (None, w.shape[0] * w.shape[2]))
    if w.shape[0] & (w.shape[0] - 1):
        raise ValueError(f"{op}: w must hold a power of two of segments, got {w.shape[0]}")
    count = contracts.row_count(x, num_rows)
    return _bind(x, w, count, backend=backend, out_dtype=out_dtype or x.dtype.name)[0]
