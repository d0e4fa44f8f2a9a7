"""Public RMS norms: checks, then one marked primitive."""

from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32, Int32, UInt32

from .. import contracts
from ..differentiable import differentiable
from ..merge import order_of
from ..primitive import HOPPER, REFERENCE, define_op
from .kernel_hopper import add_rms_norm_hopper_op, rms_norm_hopper_op
from .kernel_peers import fits_peer_norm, peer_add_rms_norm_op
from .reference import add_rms_norm_reference, rms_norm_reference
from .topology import RmsNormTopology, topology_for
from .vjp import add_rms_norm_backward, rms_norm_backward


def _norm_avals(x: Any, *_: Any, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct(x.shape, x.dtype)]


def _add_norm_avals(x: Any, *_: Any, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct(x.shape, x.dtype)] * 2


_bind_norm = define_op(
    "rms_norm",
    out_avals=_norm_avals,
    implementations={REFERENCE: rms_norm_reference, HOPPER: rms_norm_hopper_op},
)
_bind_add_norm = define_op(
    "add_rms_norm",
    out_avals=_add_norm_avals,
    implementations={REFERENCE: add_rms_norm_reference, HOPPER: add_rms_norm_hopper_op},
)
_bind_peer_norm = define_op(
    "peer_add_rms_norm",
    out_avals=lambda part, table, residual, scale, **_: (
        [ShapeDtypeStruct(residual.shape, residual.dtype)] * 2
    ),
    implementations={HOPPER: peer_add_rms_norm_op},
)
_norm = differentiable(_bind_norm, rms_norm_backward)
_add_norm = differentiable(_bind_add_norm, add_rms_norm_backward)


def rms_norm(
    x: Float[Array, "M D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    topology: RmsNormTopology | None = None,
) -> Float[Array, "M D"]:
    """x / sqrt(mean(x^2) + eps) * scale, in float32, rounded once (arXiv:1910.07467).

    Args:
      x: [M, D] float32, bfloat16 or float16.
      scale: [D] of x's dtype.
      eps: added to the mean square.
      backend: implementation by name.
      num_rows: int32 [], rows that hold data; the others' outputs are unspecified. None: all.
      topology: the order of additions; None: the one for D.

    Returns:
      [M, D] of x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: the bits of row m depend on x[m], scale, eps, topology and backend only.
    """
    _check("rms_norm", x, scale)
    return _norm(
        x,
        scale,
        contracts.row_count(x, num_rows),
        backend=backend,
        eps=eps,
        topology=topology or topology_for(hidden_size=x.shape[1]),
    )[0]


def add_rms_norm(
    x: Float[Array, "M D"],
    residual: Float[Array, "M D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    backend: str,
    num_rows: Int32[Array, ""] | None = None,
    topology: RmsNormTopology | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """Adds x to the residual stream in float32, rounds the sum once, and norms the rounded sum.

    Args:
      x: [M, D], what a sublayer produced.
      residual: [M, D] of x's dtype, the stream.
      scale, eps, backend, num_rows, topology: as in `rms_norm`.

    Returns:
      normed [M, D] and the new stream [M, D], both of x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: the bits of row m depend on x[m], residual[m], scale, eps, topology and backend.
    """
    _check("add_rms_norm", x, scale)
    contracts.check_same_dtype("add_rms_norm", "x", x, "residual", residual)
    contracts.check_shape("add_rms_norm", "residual", residual, x.shape)
    normed, stream = _add_norm(
        x,
        residual,
        scale,
        contracts.row_count(x, num_rows),
        backend=backend,
        eps=eps,
        topology=topology or topology_for(hidden_size=x.shape[1]),
    )
    return normed, stream


def peer_add_rms_norm(
    part: Float32[Array, "M D"],
    table: UInt32[Array, "ranks_and_one 2"],
    residual: Float[Array, "M D"],
    scale: Float[Array, " D"],
    *,
    tree: bool,
    eps: float,
    backend: str,
    topology: RmsNormTopology | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "M D"]]:
    """The ranks' terms added as by `merge.peer_sum`, and the sum handed to `add_rms_norm`.

    Args:
      part: float32 [M, D], this rank's term, of a shape that `fits_peer_norm`.
      table, tree: as in `merge.peer_sum`.
      residual: [M, D] bfloat16 or float16, the stream; the sum is rounded to its dtype.
      scale, eps, backend, topology: as in `rms_norm`.

    Returns:
      normed [M, D] and the new stream [M, D], both of residual's dtype, the same on every rank.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: the bits of the two ops that it stands for.
    """
    _check("peer_add_rms_norm", residual, scale)
    contracts.check_dtype("peer_add_rms_norm", "part", part, jnp.float32)
    contracts.check_dtype("peer_add_rms_norm", "table", table, jnp.uint32)
    contracts.check_shape("peer_add_rms_norm", "part", part, residual.shape)
    if not fits_peer_norm(part.shape) or residual.dtype == jnp.float32:
        raise ValueError(
            f"peer_add_rms_norm does not take a term {list(part.shape)} and a {residual.dtype} "
            "stream"
        )
    normed, stream = _bind_peer_norm(
        part,
        table,
        residual,
        scale,
        backend=backend,
        eps=eps,
        merge=order_of(tree=tree),
        topology=topology or topology_for(hidden_size=part.shape[1]),
    )
    return normed, stream


def _check(op: str, x: Any, scale: Any) -> None:
    contracts.check_float(op, "x", x)
    contracts.check_shape(op, "x", x, (None, None))
    contracts.check_same_dtype(op, "x", x, "scale", scale)
    contracts.check_shape(op, "scale", scale, (x.shape[1],))
