"""Public QK-norm and rotary embedding: checks, then one marked primitive."""

from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32, Int32

from .. import contracts
from ..differentiable import differentiable
from ..pages import token_slots
from ..primitive import HOPPER, REFERENCE, define_op
from ..ragged import RaggedBatch
from .kernel_hopper import rope_hopper_op, rope_into_pages_hopper_op
from .reference import rope_into_pages_reference, rope_reference
from .topology import RopeTopology, topology_for
from .vjp import rope_backward, rope_into_pages_backward, rope_into_pages_saves


def _avals(qkv: Any, *_: Any, **__: Any) -> list[Any]:
    tokens, kv_heads, group, width = qkv.shape
    kv = ShapeDtypeStruct((tokens, kv_heads, width), qkv.dtype)
    return [ShapeDtypeStruct((tokens, kv_heads, group - 2, width), qkv.dtype), kv, kv]


_bind = define_op(
    "rope",
    out_avals=_avals,
    implementations={REFERENCE: rope_reference, HOPPER: rope_hopper_op},
)
_rope = differentiable(_bind, rope_backward)


def _avals_with_pages(qkv: Any, *operands: Any, **__: Any) -> list[Any]:
    pages = (ShapeDtypeStruct(p.shape, p.dtype) for p in operands[4:6])
    return [_avals(qkv)[0], *pages]


_bind_into_pages = define_op(
    "rope_into_pages",
    out_avals=_avals_with_pages,
    implementations={REFERENCE: rope_into_pages_reference, HOPPER: rope_into_pages_hopper_op},
)
_rope_into_pages = differentiable(
    _bind_into_pages, rope_into_pages_backward, saves=rope_into_pages_saves
)


def rope(
    qkv: Float[Array, "T Nkv G_plus_2 Dh"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    *,
    backend: str,
    q_scale: Float[Array, " Dh"] | None = None,
    k_scale: Float[Array, " Dh"] | None = None,
    eps: float = 1e-6,
    num_rows: Int32[Array, ""] | None = None,
    topology: RopeTopology | None = None,
) -> tuple[Float[Array, "T Nkv G Dh"], Float[Array, "T Nkv Dh"], Float[Array, "T Nkv Dh"]]:
    """Splits a fused qkv product, RMS-norms q and k per head if asked to, and rotates them.

    (low, high) -> (low cos - high sin, high cos + low sin), low and high the halves of a head
    (arXiv:2104.09864), in float32; norm and rotation are rounded once each.

    Args:
      qkv: [T, Nkv, G + 2, Dh]; per KV head its G query heads, then k, then v.
      cos, sin: float32 [T, Dh / 2], rows of the host-made tables.
      backend: implementation by name.
      q_scale, k_scale: [Dh] of qkv's dtype, both or neither.
      eps: of the per-head norm.
      num_rows: int32 [], tokens that hold data; None: all.
      topology: the order of operations; None: the one for Dh.

    Returns:
      q [T, Nkv, G, Dh], k [T, Nkv, Dh], v [T, Nkv, Dh] of qkv's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit (tables that are not float32 among them).
      NotImplementedError: no such backend.

    Invariance: the bits of token t depend on qkv[t], cos[t], sin[t], the scales, eps, topology
    and backend only.
    """
    absent = _check("rope", qkv, cos, sin, q_scale, k_scale)
    q, k, v = _rope(
        qkv,
        cos,
        sin,
        absent if q_scale is None else q_scale,
        absent if k_scale is None else k_scale,
        contracts.row_count(qkv, num_rows),
        backend=backend,
        eps=eps,
        qk_norm=q_scale is not None,
        topology=topology or topology_for(head_dim=qkv.shape[3]),
    )
    return q, k, v


def rope_into_pages(
    qkv: Float[Array, "T Nkv G_plus_2 Dh"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    k_pages: Float[Array, "P Nkv Tp Dh"],
    v_pages: Float[Array, "P Nkv Tp Dh"],
    batch: RaggedBatch,
    *,
    backend: str,
    q_scale: Float[Array, " Dh"] | None = None,
    k_scale: Float[Array, " Dh"] | None = None,
    eps: float = 1e-6,
    topology: RopeTopology | None = None,
) -> tuple[Float[Array, "T Nkv G Dh"], Float[Array, "P Nkv Tp Dh"], Float[Array, "P Nkv Tp Dh"]]:
    """`rope`, each real token's key and value stored at its place in the cache's pages.

    Pages that the caller gives away (donated, and not used again) are changed in place.

    Args:
      qkv, cos, sin, backend, q_scale, k_scale, eps, topology: as for `rope`.
      k_pages, v_pages: [P, Nkv, Tp, Dh] of qkv's dtype.
      batch: gives request, position and the number of real tokens.

    Returns:
      q [T, Nkv, G, Dh], and the pages with the tokens' slots replaced; padding writes nothing.

    Raises:
      ValueError: shapes or dtypes do not fit (tables that are not float32 among them).
      NotImplementedError: no such backend.

    Invariance: as for `rope`, q's rows and what is stored; two tokens never share a slot.
    """
    op = "rope_into_pages"
    absent = _check(op, qkv, cos, sin, q_scale, k_scale)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        contracts.check_same_dtype(op, "qkv", qkv, name, pages)
        contracts.check_shape(op, name, pages, (None, qkv.shape[1], None, qkv.shape[3]))
    contracts.check_shape(op, "v_pages", v_pages, k_pages.shape)
    contracts.check_shape(op, "positions", batch.positions, qkv.shape[:1])
    page, slot = token_slots(
        k_pages, batch.positions, batch.request, batch.page_table, batch.num_tokens
    )
    q, k_pages, v_pages = _rope_into_pages(
        qkv,
        cos,
        sin,
        absent if q_scale is None else q_scale,
        absent if k_scale is None else k_scale,
        k_pages,
        v_pages,
        page,
        slot,
        contracts.row_count(qkv, batch.num_tokens),
        backend=backend,
        eps=eps,
        qk_norm=q_scale is not None,
        topology=topology or topology_for(head_dim=qkv.shape[3]),
    )
    return q, k_pages, v_pages


def _check(op: str, qkv: Any, cos: Any, sin: Any, q_scale: Any, k_scale: Any) -> Any:
    """Raises ValueError where the operands do not fit; returns what stands for an absent scale."""
    contracts.check_float(op, "qkv", qkv)
    contracts.check_shape(op, "qkv", qkv, (None, None, None, None))
    for name, table in (("cos", cos), ("sin", sin)):
        contracts.check_dtype(op, name, table, jnp.float32)
        contracts.check_shape(op, name, table, (qkv.shape[0], qkv.shape[3] // 2))
    if (q_scale is None) != (k_scale is None):
        raise ValueError(f"{op}: expected q_scale and k_scale together, got one of them")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is not None:
            contracts.check_same_dtype(op, "qkv", qkv, name, scale)
            contracts.check_shape(op, name, scale, (qkv.shape[3],))
    return jnp.zeros((0,), qkv.dtype)
