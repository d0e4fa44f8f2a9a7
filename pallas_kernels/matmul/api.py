"""Public matrix products: checks, then one marked primitive."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .. import contracts
from ..differentiable import differentiable
from ..primitive import HOPPER, REFERENCE, define_op
from .op_hopper import matmul_hopper_op, swiglu_hopper_op
from .reference import matmul_reference, swiglu_reference
from .topology import DEFAULT, MatmulTopology
from .vjp import matmul_backward, swiglu_backward


def _matmul_avals(x: Any, w: Any, *_: Any, out_dtype: str, **__: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.dtype(out_dtype))]


def _swiglu_avals(x: Any, gate_up: Any, *_: Any, out_dtype: str, **__: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct((x.shape[0], gate_up.shape[1]), jnp.dtype(out_dtype))]


_bind_matmul = define_op(
    "matmul",
    out_avals=_matmul_avals,
    implementations={REFERENCE: matmul_reference, HOPPER: matmul_hopper_op},
)
_bind_swiglu = define_op(
    "swiglu_matmul",
    out_avals=_swiglu_avals,
    implementations={REFERENCE: swiglu_reference, HOPPER: swiglu_hopper_op},
)
_matmul = differentiable(_bind_matmul, matmul_backward(_bind_matmul))
_swiglu = differentiable(_bind_swiglu, swiglu_backward(_bind_matmul))


def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    bias: Float[Array, " N"] | None = None,
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    out_dtype: str | None = None,
    topology: MatmulTopology = DEFAULT,
) -> Float[Array, "M N"]:
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n].

    Args:
      x: [M, K] float32, bfloat16 or float16.
      w: [N, K] of x's dtype, in a checkpoint's (out, in) layout.
      bias: [N] of x's dtype, added in float32 before the one rounding.
      backend: implementation by name.
      num_rows: int32 [], rows that hold data; the others' outputs are unspecified. None: all.
      out_dtype: dtype of the result; None: x's.
      topology: the order of additions.

    Returns:
      [M, N], rounded once from the float32 accumulator.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend, or it cannot run this topology.

    Invariance: the bits of row m depend on x[m], w, bias, out_dtype, topology and backend; not on
    M, num_rows, the row's place or the other rows.
    """
    contracts.check_float("matmul", "x", x)
    contracts.check_same_dtype("matmul", "x", x, "w", w)
    contracts.check_shape("matmul", "x", x, (None, None))
    contracts.check_shape("matmul", "w", w, (None, x.shape[1]))
    if bias is None:
        bias = jnp.zeros((0,), x.dtype)
    else:
        contracts.check_same_dtype("matmul", "x", x, "bias", bias)
        contracts.check_shape("matmul", "bias", bias, (w.shape[0],))
    return _matmul(
        x,
        w,
        bias,
        contracts.row_count(x, num_rows),
        backend=backend,
        out_dtype=out_dtype or x.dtype.name,
        topology=topology,
    )[0]


def swiglu_matmul(
    x: Float[Array, "M K"],
    gate_up: Float[Array, "2 F K"],
    *,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    out_dtype: str | None = None,
    topology: MatmulTopology = DEFAULT,
) -> Float[Array, "M F"]:
    """silu(gate) * up with gate = x gate_up[0]^T and up = x gate_up[1]^T.

    silu(g) = g / (1 + exp(-g)); both products stay float32 accumulators until the one rounding.

    Args:
      x: [M, K] float32, bfloat16 or float16.
      gate_up: [2, F, K] of x's dtype.
      backend, num_rows, out_dtype, topology: as in `matmul`.

    Returns:
      [M, F].

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend, or it cannot run this topology.

    Invariance: as `matmul`.
    """
    contracts.check_float("swiglu_matmul", "x", x)
    contracts.check_same_dtype("swiglu_matmul", "x", x, "gate_up", gate_up)
    contracts.check_shape("swiglu_matmul", "x", x, (None, None))
    contracts.check_shape("swiglu_matmul", "gate_up", gate_up, (2, None, x.shape[1]))
    return _swiglu(
        x,
        gate_up,
        contracts.row_count(x, num_rows),
        backend=backend,
        out_dtype=out_dtype or x.dtype.name,
        topology=topology,
    )[0]
