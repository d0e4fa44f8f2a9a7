"""Public sums of partial results: checks, then one marked primitive."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt32

from .. import contracts
from ..differentiable import differentiable
from ..primitive import HOPPER, REFERENCE, define_op
from .hopper_peers import merge_peers_op
from .kernel_hopper import merge_hopper_op
from .reference import merge_reference
from .topology import ASCENDING, TREE, MergeTopology, order_of
from .vjp import merge_backward


def _avals(parts: Any, *, out_dtype: str, topology: MergeTopology) -> list[Any]:
    del topology
    return [jax.ShapeDtypeStruct(parts.shape[1:], jnp.dtype(out_dtype))]


_merge = differentiable(
    define_op(
        "merge_parts",
        out_avals=_avals,
        implementations={REFERENCE: merge_reference, HOPPER: merge_hopper_op},
    ),
    merge_backward,
)


def _peer_avals(x: Any, table: Any, *, out_dtype: str, topology: MergeTopology) -> list[Any]:
    del table, topology
    return [jax.ShapeDtypeStruct(x.shape, jnp.dtype(out_dtype))]


_merge_peers = define_op(
    "merge_peers", out_avals=_peer_avals, implementations={HOPPER: merge_peers_op}
)


def ordered_sum(
    parts: Float32[Array, "n ..."], *, out_dtype: Any = "float32", backend: str
) -> Float[Array, "..."]:
    """((parts[0] + parts[1]) + parts[2]) + ..., in float32, rounded once to out_dtype.

    Args:
      parts: float32 [n, ...], n at least 1.
      out_dtype: float32, bfloat16 or float16.
      backend: implementation by name.

    Returns:
      [...] of out_dtype.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: element by element, of the n terms in their order.
    """
    return _checked("ordered_sum", parts, ASCENDING, out_dtype, backend)


def tree_sum(
    parts: Float32[Array, "n ..."], *, out_dtype: Any = "float32", backend: str
) -> Float[Array, "..."]:
    """The n terms added by one balanced binary tree of neighbours, in float32.

    ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)) for n = 8. Rounded once, at the root, if
    out_dtype asks for it; so a tree_sum in float32 over each run of 2^k terms, then a tree_sum of
    the results, is the tree_sum of all.

    Args:
      parts: float32 [n, ...], n a power of two.
      out_dtype: float32, bfloat16 or float16.
      backend: implementation by name.

    Returns:
      [...] of out_dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or n is no power of two.
      NotImplementedError: no such backend.

    Invariance: element by element, of the n terms in their order; not of where the tree is cut.
    """
    return _checked("tree_sum", parts, TREE, out_dtype, backend)


def peer_sum(
    x: Float32[Array, "..."],
    table: UInt32[Array, "ranks_and_one 2"],
    *,
    tree: bool,
    out_dtype: Any = "float32",
    backend: str,
) -> Float[Array, "..."]:
    """The ranks' terms added, by a kernel that moves them through the ranks' own memory.

    Args:
      x: float32, this rank's term, a multiple of 4 elements.
      table: where the ranks' workspaces are, see `hopper_peers`.
      tree: as `tree_sum`; else as `ordered_sum`.
      out_dtype: float32, bfloat16 or float16.
      backend: implementation by name; it has no derivative.

    Returns:
      [...] of out_dtype, the same on every rank.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: no such backend.

    Invariance: element by element, of the ranks' terms in their order; the bits of `ordered_sum` or
    `tree_sum` of the gathered terms.
    """
    contracts.check_dtype("peer_sum", "x", x, jnp.float32)
    contracts.check_dtype("peer_sum", "table", table, jnp.uint32)
    if table.ndim != 2 or table.shape[1] != 2 or table.shape[0] < 3:
        raise ValueError(f"peer_sum: table must be [ranks + 1, 2], got {list(table.shape)}")
    if not fits_peers(x.shape):
        raise ValueError(f"peer_sum: x must hold a multiple of 4 elements, got {list(x.shape)}")
    name, topology = jnp.dtype(out_dtype).name, order_of(tree=tree)
    return _merge_peers(x, table, backend=backend, out_dtype=name, topology=topology)[0]


def fits_peers(shape: tuple[int, ...]) -> bool:
    """Whether `peer_sum` takes a term of this shape."""
    elements = math.prod(shape)
    return elements > 0 and elements % 4 == 0


def _checked(op: str, parts: Any, order: str, out_dtype: Any, backend: str) -> jax.Array:
    contracts.check_dtype(op, "parts", parts, jnp.float32)
    name = jnp.dtype(out_dtype).name
    if name not in contracts.FLOAT_DTYPES:
        expected = ", ".join(contracts.FLOAT_DTYPES)
        raise ValueError(f"{op}: out_dtype must be one of {expected}, got {name}")
    if parts.ndim < 1 or parts.shape[0] < 1:
        raise ValueError(f"{op}: parts must hold at least one term, got shape {list(parts.shape)}")
    count = parts.shape[0]
    if order == TREE and count & (count - 1):
        raise ValueError(f"{op}: the number of terms must be a power of two, got {count}")
    if parts.size == 0:
        return jnp.zeros(parts.shape[1:], name)
    topology = MergeTopology(order=order)
    return _merge(parts, backend=backend, out_dtype=name, topology=topology)[0]
