"""Gradients of paged causal attention on a CPU, every operation at one fixed number of tokens.

With p = exp(scale q k - lse), delta = sum(out dout) - dlse and ds = p (dout v - delta):

    dq[t] = scale sum over keys of ds k        blocks of keys at absolute positions, ascending
    dk[t] = scale sum over queries of ds q     blocks of queries at absolute positions, ascending
    dv[t] = sum over queries of p dout         likewise, a block's query heads in one product

p and ds are rounded to the operands' dtype before they are multiplied; sums are float32. No array
has a side of queries and a side of keys beyond one block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .topology import AttentionTopology

ROWS = 4  # tokens a block

Arrays = tuple[jax.Array, ...]


def attention_gradient_reference(
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
) -> Arrays:
    """q, out, dout [T, Nkv, G, Dh], lse, dlse [T, Nkv, G] -> dq like q, dk and dv [T, Nkv, Dh].

    dk and dv are those of the batch's own tokens.
    """
    block, tokens_a_page = topology.kv_block, k_pages.shape[2]
    real = jnp.arange(positions.shape[0], dtype=jnp.int32) < num_tokens
    positions = jnp.where(real, positions, 0)
    request = jnp.minimum(request, page_table.shape[0] - 1)
    page = jnp.take_along_axis(
        page_table[request], (positions // tokens_a_page)[:, None], 1, mode="clip"
    )[:, 0]
    slot = positions % tokens_a_page
    in_block = jnp.arange(block, dtype=jnp.int32)

    def to_queries(
        queries: jax.Array,
        dout_rows: jax.Array,
        out_rows: jax.Array,
        lse_rows: jax.Array,
        dlse_rows: jax.Array,
        place: jax.Array,
        row: jax.Array,
    ) -> Arrays:
        products = out_rows.astype(jnp.float32) * dout_rows.astype(jnp.float32)
        delta = jnp.sum(lax.optimization_barrier(products), axis=-1) - dlse_rows
        pages_of_rows = page_table[row]
        first = 0 if window is None else jnp.min(jnp.maximum(place - (window - 1), 0)) // block

        def meet(j: jax.Array, acc: jax.Array) -> jax.Array:
            where = j * block + in_block
            column = jnp.broadcast_to(where // tokens_a_page, (ROWS, block))
            pages = jnp.take_along_axis(pages_of_rows, column, 1, mode="clip")
            at = (where % tokens_a_page)[None]
            seen = sees(place[:, None], where[None], window)
            keys = clean(k_pages.at[pages, :, at].get(mode="clip"), seen)
            values = clean(v_pages.at[pages, :, at].get(mode="clip"), seen)
            keys, values, seen = lax.optimization_barrier((keys, values, seen))
            scores = _dot(queries, keys, ((3,), (3,)), ((0, 1), (0, 2)))
            back = _dot(dout_rows, values, ((3,), (3,)), ((0, 1), (0, 2)))
            _, ds = slopes(
                scores,
                back,
                lse_rows[..., None],
                delta[..., None],
                seen[:, None, None],
                scale,
                q.dtype,
            )
            return lax.optimization_barrier(acc + _dot(ds, keys, ((3,), (1,)), ((0, 1), (0, 2))))

        start = jnp.zeros(queries.shape, jnp.float32)
        acc = lax.fori_loop(first, jnp.max(place) // block + 1, meet, start)
        return (acc * scale).astype(q.dtype), delta

    def to_keys(key: jax.Array, value: jax.Array, place: jax.Array, row: jax.Array) -> Arrays:
        begin, end = query_start[row], query_start[row + 1]
        offset = begin - positions[begin]  # the flat row of position 0, were it in the batch
        last = jnp.maximum(end - 1 - offset, place)
        if window is not None:
            last = jnp.minimum(last, place + (window - 1))

        def meet(j: jax.Array, state: Arrays) -> Arrays:
            dk, dv = state
            where = (j * block + in_block)[None]
            flat = where + offset[:, None]
            seen = sees(where, place[:, None], window)
            seen &= (flat >= begin[:, None]) & (flat < end[:, None])
            flat = jnp.where(seen, flat, 0)
            taken = [clean(a.at[flat].get(mode="clip"), seen) for a in (q, dout, lse, delta)]
            queries, dout_rows, lse_rows, delta_rows = lax.optimization_barrier(taken)
            scores = _dot(key, queries, ((2,), (4,)), ((0, 1), (0, 2)))
            back = _dot(value, dout_rows, ((2,), (4,)), ((0, 1), (0, 2)))
            lse_rows, delta_rows = (a.transpose(0, 2, 1, 3) for a in (lse_rows, delta_rows))
            p, ds = slopes(
                scores, back, lse_rows, delta_rows, seen[:, None, :, None], scale, q.dtype
            )
            dims = (((2, 3), (1, 3)), ((0, 1), (0, 2)))
            return lax.optimization_barrier(
                (dk + _dot(ds, queries, *dims), dv + _dot(p, dout_rows, *dims))
            )

        start = jnp.zeros(key.shape, jnp.float32)
        blocks = jnp.min(place) // block, jnp.max(last) // block + 1
        dk, dv = lax.fori_loop(*blocks, meet, (start, start))
        return (dk * scale).astype(q.dtype), dv.astype(q.dtype)

    rows = (q, dout, out, lse, dlse, positions, request)
    dq, delta = for_row_blocks(to_queries, *rows, rows=ROWS, num_rows=num_tokens)
    own = (k_pages.at[page, :, slot].get(mode="clip"), v_pages.at[page, :, slot].get(mode="clip"))
    dk, dv = for_row_blocks(to_keys, *own, positions, request, rows=ROWS, num_rows=num_tokens)
    return dq, dk, dv


def slopes(
    scores: jax.Array,
    back: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    seen: jax.Array,
    scale: float,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """p and ds = p (back - delta), zero where not seen, rounded to `dtype`."""
    exponent = lax.optimization_barrier(scores * scale) - lse
    p = lax.optimization_barrier(jnp.where(seen, jnp.exp(exponent), 0.0))
    ds = jnp.where(seen, p * (back - delta), 0.0)
    return lax.optimization_barrier((p.astype(dtype), ds.astype(dtype)))


def sees(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def clean(values: jax.Array, seen: jax.Array) -> jax.Array:
    """What is not seen may hold anything, NaN too, and 0 x NaN is not 0."""
    mask = seen.reshape(*seen.shape, *[1] * (values.ndim - seen.ndim))
    return jnp.where(mask, values, jnp.zeros((), values.dtype))


def _dot(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    batch: tuple[tuple[int, ...], tuple[int, ...]],
) -> jax.Array:
    return lax.optimization_barrier(
        lax.dot_general(a, b, (contracted, batch), preferred_element_type=jnp.float32)
    )
