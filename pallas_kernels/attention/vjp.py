"""Backward passes of paged attention and of the store into its pages.

Gradients reach the keys and values of the batch's own tokens; what earlier steps left in the pages
counts as a constant.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from ..differentiable import backward_backend
from ..matmul.kernel_hopper import matmul_hopper
from ..matmul.schedule import schedule_for
from ..pages import clear, put, take, token_slots
from ..primitive import BLOCKS, REFERENCE, define_op
from .gradient_blocks import attention_gradient_blocks
from .reference_backward import attention_gradient_reference

Pages = tuple[jax.Array, jax.Array]


def _avals(q: Any, k_pages: Any, *_: Any, **__: Any) -> list[Any]:
    kv = ShapeDtypeStruct((q.shape[0], k_pages.shape[1], k_pages.shape[3]), q.dtype)
    return [ShapeDtypeStruct(q.shape, q.dtype), kv, kv]


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    schedule = schedule_for(x.shape[0], *w.shape, out_dtype="float32")
    return matmul_hopper(x, w, out_dtype="float32", schedule=schedule)


_on_hopper = functools.partial(attention_gradient_blocks, product=_product)
_bind = define_op(
    "attention_gradient",
    out_avals=_avals,
    implementations={REFERENCE: attention_gradient_reference, BLOCKS: _on_hopper},
)


def attention_backward(
    operands: Any, outputs: Any, cotangents: Any, *, backend: str, **params: Any
) -> tuple[jax.Array | None, ...]:
    """Backward pass of `attention`, for `differentiable`."""
    _, k_pages, v_pages, positions, request, _, page_table, num_tokens = operands
    backend = backward_backend(backend)
    dq, dk, dv = _bind(*operands, *outputs, *cotangents, backend=backend, **params)
    page, slot = token_slots(k_pages, positions, request, page_table, num_tokens)

    def spread(pages: jax.Array, new: jax.Array) -> jax.Array:
        return put(jnp.zeros_like(pages), new, page, slot)

    return dq, spread(k_pages, dk), spread(v_pages, dv), None, None, None, None, None


def _store(k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, page, slot) -> Pages:
    return put(k_pages, k, page, slot), put(v_pages, v, page, slot)


store: Callable[..., Pages] = jax.custom_vjp(_store)
store.__doc__ = "k and v [T, Nkv, Dh] at their (page, slot); copies forwards and backwards."


def _store_forward(k_pages: Any, v_pages: Any, k: Any, v: Any, page: Any, slot: Any):
    return _store(k_pages, v_pages, k, v, page, slot), (page, slot)


def _store_backward(saved: Any, cotangents: Any) -> tuple[Any, ...]:
    page, slot = saved
    dk_pages, dv_pages = cotangents
    kept = [clear(d, page, slot) for d in (dk_pages, dv_pages)]
    taken = [take(d, page, slot) for d in (dk_pages, dv_pages)]
    return *kept, *taken, None, None


store.defvjp(_store_forward, _store_backward)  # type: ignore[attr-defined]
