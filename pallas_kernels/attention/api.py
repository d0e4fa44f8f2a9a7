"""Public paged attention: checks, then one marked primitive."""

from typing import Any

import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32

from .. import contracts
from ..differentiable import differentiable
from ..pages import token_slots
from ..primitive import HOPPER, REFERENCE, define_op
from ..ragged import RaggedBatch
from .kernel_hopper import attention_hopper_op
from .reference import attention_reference
from .topology import AttentionTopology, topology_for
from .vjp import attention_backward, store


def _avals(q: Any, *_: Any, **__: Any) -> list[Any]:
    return [ShapeDtypeStruct(q.shape, q.dtype), ShapeDtypeStruct(q.shape[:3], jnp.float32)]


_bind = define_op(
    "attention",
    out_avals=_avals,
    implementations={REFERENCE: attention_reference, HOPPER: attention_hopper_op},
)
_attention = differentiable(_bind, attention_backward)


def attention(
    q: Float[Array, "T Nkv G Dh"],
    k_pages: Float[Array, "P Nkv Tp Dh"],
    v_pages: Float[Array, "P Nkv Tp Dh"],
    batch: RaggedBatch,
    *,
    backend: str,
    scale: float,
    window: int | None = None,
    topology: AttentionTopology | None = None,
) -> tuple[Float[Array, "T Nkv G Dh"], Float32[Array, "T Nkv G"]]:
    """softmax(scale q k^T) v over the keys at or before each query, online (arXiv:2205.14135).

    Prefill, chunked prefill, decode and scoring are this one op: a query's keys are read from the
    pages, its own key included, in blocks of `topology.kv_block` tokens at absolute positions.

    Args:
      q: [T, Nkv, G, Dh] float32, bfloat16 or float16; G query heads share a KV head.
      k_pages, v_pages: [P, Nkv, Tp, Dh] of q's dtype; slots after a query's position may hold
        anything.
      batch: where each token belongs; see `RaggedBatch`.
      backend: implementation by name.
      scale: multiplies the scores, in float32.
      window: a query sees itself and the window - 1 tokens before it; None: all of them.
      topology: the order of additions; None: the one for Dh.

    Returns:
      [T, Nkv, G, Dh] of q's dtype and the log-sum-exp of the scaled scores, float32 [T, Nkv, G].

    Raises:
      ValueError: shapes or dtypes do not fit, or pages and kv_block do not divide.
      NotImplementedError: no such backend, or it cannot run this topology.

    Invariance: the bits of token t depend on q[t], on the keys and values at its request's
    positions up to its own, on scale, window, topology and backend; not on T, the other tokens,
    chunking, page ids, page size, or the length of the page table.
    """
    topology = topology or topology_for(head_dim=q.shape[3])
    _check(q, k_pages, v_pages, batch, window, topology)
    out, lse = _attention(
        q,
        k_pages,
        v_pages,
        batch.positions,
        batch.request,
        batch.query_start,
        batch.page_table,
        batch.num_tokens,
        backend=backend,
        scale=scale,
        window=window,
        topology=topology,
    )
    return out, lse


def write_pages(
    k_pages: Float[Array, "P Nkv Tp Dh"],
    v_pages: Float[Array, "P Nkv Tp Dh"],
    k: Float[Array, "T Nkv Dh"],
    v: Float[Array, "T Nkv Dh"],
    batch: RaggedBatch,
) -> tuple[Float[Array, "P Nkv Tp Dh"], Float[Array, "P Nkv Tp Dh"]]:
    """Stores each real token's key and value at its place; data movement only.

    Args:
      k_pages, v_pages: [P, Nkv, Tp, Dh].
      k, v: [T, Nkv, Dh] of the pages' dtype.
      batch: gives request, position and the number of real tokens.

    Returns:
      The pages with the tokens' slots replaced; padding tokens write nothing.

    Raises:
      ValueError: dtypes or shapes do not fit.

    Invariance: copies values; two tokens never share a slot.
    """
    for name, pages, new in (("k", k_pages, k), ("v", v_pages, v)):
        contracts.check_same_dtype("write_pages", f"{name}_pages", pages, name, new)
        expected = (batch.positions.shape[0], pages.shape[1], pages.shape[3])
        contracts.check_shape("write_pages", name, new, expected)
    page, slot = token_slots(
        k_pages, batch.positions, batch.request, batch.page_table, batch.num_tokens
    )
    return store(k_pages, v_pages, k, v, page, slot)


def _check(
    q: Any, k_pages: Any, v_pages: Any, batch: RaggedBatch, window: Any, topology: Any
) -> None:
    contracts.check_float("attention", "q", q)
    contracts.check_shape("attention", "q", q, (None, None, None, None))
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        contracts.check_same_dtype("attention", "q", q, name, pages)
        contracts.check_shape("attention", name, pages, (None, q.shape[1], None, q.shape[3]))
    contracts.check_shape("attention", "v_pages", v_pages, k_pages.shape)
    for name in ("positions", "request"):
        array = getattr(batch, name)
        contracts.check_dtype("attention", name, array, jnp.int32)
        contracts.check_shape("attention", name, array, (q.shape[0],))
    block, tokens_a_page = topology.kv_block, k_pages.shape[2]
    if block % tokens_a_page and tokens_a_page % block:
        raise ValueError(
            f"attention: the page size {tokens_a_page} must divide kv_block={block} or be a "
            "multiple of it"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be positive")
