"""Gradients of paged causal attention on a GPU: a block of queries meets a block of keys.

As in the reference, with p = exp(scale q k - lse), delta = sum(out dout) - dlse and
ds = p (dout v - delta):

    dq = scale sum over keys of ds k, dk = scale sum over queries of ds q, dv = sum of p dout

One pair of blocks at a time, queries ascending and for each of them keys ascending, at absolute
positions of one sequence; a KV head's query heads stand in one product. All five products of a KV
head are launches of the matmul kernel: one accumulator each, and the pairs' results are added in
order. What is element-wise runs for all heads at once, at the one shape of a pair. No array has a
side of queries and a side of keys beyond one pair.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..fixed_rows import for_row_blocks
from .reference_backward import clean, sees, slopes
from .topology import AttentionTopology

Arrays = tuple[jax.Array, ...]
BLOCK = 512  # queries and keys of a pair; part of the bits

Product = Callable[[jax.Array, jax.Array], jax.Array]  # x [M, K], w [N, K] -> float32 [M, N]


def attention_gradient_blocks(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    positions: jax.Array,
    request: jax.Array,
    query_start: jax.Array,
    page_table: jax.Array,
    num_tokens: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    *,
    scale: float,
    window: int | None,
    topology: AttentionTopology,
    product: Product,
    block: int = BLOCK,
) -> Arrays:
    """q, out, dout [T, Nkv, G, Dh], lse, dlse [T, Nkv, G] -> dq like q, dk and dv [T, Nkv, Dh].

    `product` has to give each row and column the same bits whatever the others hold. One launch a
    product and KV head, and a sequence of up to n blocks takes n (n + 1) / 2 pairs.
    """
    del topology  # the order of the forward pass: p is recomputed from its log-sum-exp
    tokens_a_page, width = k_pages.shape[2], q.shape[3]
    heads, group, requests = *q.shape[1:3], page_table.shape[0]
    blocks = -(-page_table.shape[1] * tokens_a_page // block)
    pairs = jnp.asarray(_pairs(blocks, block, window))
    in_block = jnp.arange(block, dtype=jnp.int32)
    real = jnp.arange(positions.shape[0], dtype=jnp.int32) < num_tokens

    def row_delta(out_rows: jax.Array, dout_rows: jax.Array, dlse_rows: jax.Array) -> Arrays:
        products = out_rows.astype(jnp.float32) * dout_rows.astype(jnp.float32)
        return (jnp.sum(lax.optimization_barrier(products), axis=-1) - dlse_rows,)

    (delta,) = for_row_blocks(
        row_delta, out, dout, dlse, rows=block, num_rows=num_tokens, counted=False
    )

    def products(xs: jax.Array, ws: jax.Array) -> jax.Array:
        """x [Nkv, M, K] and w [Nkv, N, K] of every KV head -> float32 [Nkv, M, N]."""
        return jnp.stack([product(x, w) for x, w in zip(xs, ws, strict=True)])

    def sequence(done: Arrays, b: jax.Array) -> tuple[Arrays, None]:
        begin, end = query_start[b], query_start[b + 1]
        first = jnp.minimum(begin, positions.shape[0] - 1)
        offset = begin - positions[first]  # the flat row of position 0, were it in the batch

        def meet(n: jax.Array, state: Arrays) -> Arrays:
            i, j = pairs[n, 0], pairs[n, 1]
            place, where = i * block + in_block, j * block + in_block
            flat = place + offset
            mine = (flat >= begin) & (flat < end)
            flat = jnp.where(mine, flat, 0)
            seen = sees(place[:, None], where[None], window) & mine[:, None]
            page = page_table.at[b, where // tokens_a_page].get(mode="clip")
            at = where % tokens_a_page
            met = jnp.any(seen, axis=0)
            k, v = (clean(a.at[page, :, at].get(mode="clip"), met) for a in (k_pages, v_pages))
            rows = [clean(a[flat], mine) for a in (q, dout, lse, delta)]
            k, v, x, dy, lse_rows, delta_rows = (jnp.moveaxis(a, 1, 0) for a in (k, v, *rows))
            x, dy = (a.reshape(heads, block * group, width) for a in (x, dy))
            x, dy, k, v = lax.optimization_barrier((x, dy, k, v))
            p, ds = slopes(
                products(x, k).reshape(heads, block, group, block),
                products(dy, v).reshape(heads, block, group, block),
                lse_rows[..., None],
                delta_rows[..., None],
                seen[None, :, None],
                scale,
                q.dtype,
            )
            p, ds = (a.reshape(heads, block * group, block) for a in (p, ds))
            parts = (
                products(ds, _turned(k)),
                products(_turned(ds), _turned(x)),
                products(_turned(p), _turned(dy)),
            )
            starts = i * (block * group), j * block, j * block
            return tuple(map(_add_at, state, starts, parts))

        heights = blocks * block * group, blocks * block, blocks * block
        start = tuple(jnp.zeros((heads, height, width), jnp.float32) for height in heights)
        state = lax.fori_loop(0, pairs.shape[0], meet, start)
        own = real & (request == b)
        results = []
        for old, acc, factor in zip(done, state, (scale, scale, 1.0), strict=True):
            new = (acc * jnp.float32(factor)).astype(q.dtype)
            new = new.reshape(heads, blocks * block, *old.shape[2:])
            new = jnp.moveaxis(new, 0, 1).at[positions].get(mode="clip")
            results.append(jnp.where(own.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        return tuple(results), None

    empty = jnp.zeros((positions.shape[0], heads, width), q.dtype)
    done = (jnp.zeros(q.shape, q.dtype), empty, empty)
    done, _ = lax.scan(sequence, done, jnp.arange(requests, dtype=jnp.int32))
    return done


def _pairs(blocks: int, block: int, window: int | None) -> np.ndarray:
    """int32 [pairs, 2]: query block and key block, in the order in which they meet."""
    found = []
    for i in range(blocks):
        first = 0 if window is None else max(i * block - (window - 1), 0) // block
        found += [(i, j) for j in range(first, i + 1)]
    return np.asarray(found, np.int32)


def _turned(array: jax.Array) -> jax.Array:
    return jnp.swapaxes(array, 1, 2)


def _add_at(acc: jax.Array, start: jax.Array, part: jax.Array) -> jax.Array:
    """acc [Nkv, rows, Dh] with part added to its rows from `start` on; nothing is multiplied."""
    old = lax.dynamic_slice_in_dim(acc, start, part.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(acc, old + part, start, axis=1)
