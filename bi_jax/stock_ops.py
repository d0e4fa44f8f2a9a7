"""The same ops in plain jnp, as fast as XLA makes them: the control, and the peer in benchmarks.

Nothing here keeps the contract: a row's bits follow the number of rows. Tests use it to show that
their fixtures could have failed, benchmarks to say what the contract costs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bi_jax.models.ops import TransformerOps, whole_products
from bi_jax.pallas_kernels.attention import write_pages

from .kv_cache import LayerPages

WIDE = 32  # rows from which weights are better the right operand


def stock_ops(*, by_rows: bool = False) -> TransformerOps:
    """The ops record in plain jnp. Invariance: none.

    Args:
      by_rows: attend one row at a time, the faster form at decode on a CPU; it has no gradient.
    """
    return TransformerOps(
        matmul=_matmul,
        swiglu_matmul=_swiglu_matmul,
        rms_norm=_rms_norm,
        add_rms_norm=_add_rms_norm,
        rope=_rope,
        attend=_attend_by_rows if by_rows else _attend,
        **whole_products(_matmul),
        description=(("all", "stock jnp: not batch-invariant"),),
    )


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    dims = (((1,), (1,)), ((), ()))
    if 1 < x.shape[0] < WIDE:
        # Without the barrier XLA turns this into x @ w.T, which packs the weights every time.
        return lax.optimization_barrier(
            lax.dot_general(w, x, dims, preferred_element_type=jnp.float32)
        ).T
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def _matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    num_rows: jax.Array | None = None,
    out_dtype: str | None = None,
) -> jax.Array:
    acc = _dot(x, w)
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)[None]
    return acc.astype(out_dtype or x.dtype)


def _swiglu_matmul(
    x: jax.Array, gate_up: jax.Array, *, num_rows: jax.Array | None = None
) -> jax.Array:
    acc = _dot(x, gate_up.reshape(-1, gate_up.shape[2]))
    gate, up = jnp.split(acc, 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _normed(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * lax.rsqrt(mean + eps) * scale).astype(x.dtype)


def _rms_norm(
    x: jax.Array, scale: jax.Array, *, eps: float, num_rows: jax.Array | None = None
) -> jax.Array:
    return _normed(x, scale, eps)


def _add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    num_rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    total = x + residual
    return _normed(total, scale, eps), total


def _rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: LayerPages,
    batch: Any,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
) -> tuple[jax.Array, LayerPages]:
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
    if q_scale is not None and k_scale is not None:
        q, k = _normed(q, q_scale, eps), _normed(k, k_scale, eps)
    cos, sin = cos[:, None, None], sin[:, None, None]

    def turn(heads: jax.Array) -> jax.Array:
        low, high = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
        return turned.astype(qkv.dtype)

    return turn(q), LayerPages(*write_pages(cache.k, cache.v, turn(k)[:, :, 0], v, batch))


def _attend(
    q: jax.Array,
    cache: LayerPages,
    batch: Any,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    rows = batch.page_table.at[batch.request].get(mode="clip")
    keys, values = cache.k[rows], cache.v[rows]  # [T, Mp, Nkv, Tp, Dh]
    scores = jnp.einsum("tngd,tpnsd->tngps", q, keys, preferred_element_type=jnp.float32) * scale
    shape = scores.shape
    place = jnp.arange(shape[3] * shape[4], dtype=jnp.int32)[None]
    seen = place <= batch.positions[:, None]
    if window is not None:
        seen &= place > batch.positions[:, None] - window
    flat = jnp.where(seen[:, None, None], scores.reshape(*shape[:3], -1), -jnp.inf)
    weights = jax.nn.softmax(flat, axis=-1).astype(q.dtype).reshape(shape)
    values = jnp.where(seen.reshape(-1, shape[3], 1, shape[4], 1), values, jnp.zeros((), q.dtype))
    return jnp.einsum("tngps,tpnsd->tngd", weights, values).astype(q.dtype)


def _attend_by_rows(
    q: jax.Array,
    cache: LayerPages,
    batch: Any,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """`_attend` a row at a time, over the pages in use.

    At decode this beats gathering every row's pages for one batched product, in half the CPU time
    (a product of 3 x 64 by 64 x 64 costs less than the copies and the library's threads do).
    """
    most = batch.page_table.shape[1]
    counts = [n for n in (1 << i for i in range(most.bit_length())) if n < most] + [most]

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        heads, position = q[i], batch.positions[i]
        table = batch.page_table.at[batch.request[i]].get(mode="clip")
        in_use = position // cache.k.shape[2] + 1
        which = sum((in_use > n).astype(jnp.int32) for n in counts[:-1])

        def mix(count: int, heads: jax.Array) -> jax.Array:
            keys, values = lax.optimization_barrier(
                (_first_pages(cache.k, table, count), _first_pages(cache.v, table, count))
            )
            place = jnp.arange(keys.shape[1], dtype=jnp.int32)
            seen = place <= position
            if window is not None:
                seen &= place > position - window
            # One product of a matrix and a vector for each query head of a group.
            scores = [_float32("nsd,nd->ns", keys, heads[:, g]) for g in range(heads.shape[1])]
            masked = jnp.where(seen, jnp.stack(scores, axis=1) * scale, -jnp.inf)
            weights = jax.nn.softmax(masked, axis=-1).astype(q.dtype)
            mixed = [_float32("ns,nsd->nd", weights[:, g], values) for g in range(heads.shape[1])]
            return jnp.stack(mixed, axis=1).astype(q.dtype)

        row = lax.switch(which, [functools.partial(mix, n) for n in counts], heads)
        return lax.dynamic_update_index_in_dim(out, row, i, 0)

    return lax.fori_loop(0, batch.num_tokens, one, jnp.zeros_like(q))


def _first_pages(pages: jax.Array, table: jax.Array, count: int) -> jax.Array:
    """A request's first pages, from [P, Nkv, Tp, Dh] -> [Nkv, count Tp, Dh]."""
    parts = [lax.dynamic_index_in_dim(pages, table[p], 0, keepdims=False) for p in range(count)]
    return jnp.concatenate(lax.optimization_barrier(parts), axis=1)


def _float32(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
