"""Paged causal attention on a CPU: one query at a time, every operation at one fixed shape.

A block of `kv_block` keys is one online-softmax update, and is met in parts of `PART` keys at
absolute positions, ascending: the scores of all parts, one maximum, then the parts' values added in
order. Parts that a query cannot see are left out, which its own position alone decides.

The products are matrix by vector, a query head at a time: those run in the compiler's own loops,
while the library that runs matrix by matrix costs more to enter than such a small product takes.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .topology import AttentionTopology

ROWS = 1  # query tokens a block: each meets its own pages, so more would not share anything
PART = 64  # keys of a block that one product meets; part of the reference's bits

State = tuple[jax.Array, jax.Array, jax.Array]


def attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    positions: jax.Array,
    request: jax.Array,
    query_start: jax.Array,
    page_table: jax.Array,
    num_tokens: jax.Array,
    *,
    scale: float,
    window: int | None,
    topology: AttentionTopology,
) -> tuple[jax.Array, jax.Array]:
    """q [T, Nkv, G, Dh], pages [P, Nkv, Tp, Dh] -> out like q, lse float32 [T, Nkv, G]."""
    del query_start  # each query finds its own pages
    if topology.kv_split is not None:
        raise NotImplementedError(
            f"attention: the reference runs kv_split=None, got {topology.kv_split}"
        )
    block = topology.kv_block
    page_row = jnp.minimum(request, page_table.shape[0] - 1)
    # Padding may hold any position, and a large one would only make the loop long.
    real = jnp.arange(positions.shape[0], dtype=jnp.int32) < num_tokens
    positions = jnp.where(real, positions, 0)

    part = math.gcd(block, PART)

    def body(queries: jax.Array, place: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads, position, table = queries[0], place[0], page_table[row[0]]
        columns = lax.optimization_barrier([heads[:, g] for g in range(heads.shape[1])])
        oldest = 0 if window is None else jnp.maximum(position - (window - 1), 0)

        def meet(j: jax.Array, state: State) -> State:
            start = j * block
            seen = _is_seen(start + jnp.arange(block, dtype=jnp.int32), position, window)
            first = jnp.maximum(oldest - start, 0) // part
            end = jnp.minimum((position - start) // part + 1, block // part)

            def score(i: jax.Array, scores: jax.Array) -> jax.Array:
                keys = lax.optimization_barrier(read(k_pages, table, start + i * part, part))
                return lax.dynamic_update_slice_in_dim(scores, _scores(columns, keys), i * part, 2)

            scores = lax.fori_loop(
                first, end, score, jnp.zeros((*heads.shape[:2], block), jnp.float32)
            )
            top, total, acc, weights = _update(state, scores, seen, scale)
            weights = weights.astype(v_pages.dtype)

            def mix(i: jax.Array, acc: jax.Array) -> jax.Array:
                values = read(v_pages, table, start + i * part, part)
                mask = lax.dynamic_slice_in_dim(seen, i * part, part)
                # Keys that are not seen may hold anything, NaN too, and 0 x NaN is not 0.
                values = jnp.where(mask[None, :, None], values, jnp.zeros((), values.dtype))
                some = lax.dynamic_slice_in_dim(weights, i * part, part, 2)
                return lax.optimization_barrier(acc + _mixed(some, values))

            return top, total, lax.fori_loop(first, end, mix, acc)

        start = (
            jnp.full(heads.shape[:2], -jnp.inf, jnp.float32),
            jnp.zeros(heads.shape[:2], jnp.float32),
            jnp.zeros(heads.shape, jnp.float32),
        )
        blocks = oldest // block, position // block + 1
        top, total, acc = lax.optimization_barrier(lax.fori_loop(*blocks, meet, start))
        return (acc / total[..., None]).astype(q.dtype)[None], (top + jnp.log(total))[None]

    out, lse = for_row_blocks(body, q, positions, page_row, rows=ROWS, num_rows=num_tokens)
    return out, lse


def read(pages: jax.Array, table: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Tokens start .. start + count - 1 of a request, from pages [P, Nkv, Tp, Dh]
    -> [Nkv, count, Dh]; start is a multiple of count."""
    _, heads, page_size, width = pages.shape
    if page_size % count == 0:
        place = (table[start // page_size], 0, start % page_size, 0)
        return lax.dynamic_slice(pages, place, (1, heads, count, width))[0]
    if count % page_size == 0:
        ids = [table[start // page_size + i] for i in range(count // page_size)]
        parts = [lax.dynamic_index_in_dim(pages, i, 0, keepdims=False) for i in ids]
        # The barrier leaves whole copies to the compiler, not a choice at every element.
        return jnp.concatenate(lax.optimization_barrier(parts), axis=1)
    where = start + jnp.arange(count, dtype=jnp.int32)
    tokens = pages.at[table[where // page_size], :, where % page_size].get(mode="clip")
    return jnp.swapaxes(tokens, 0, 1)


def _is_seen(where: jax.Array, position: jax.Array, window: int | None) -> jax.Array:
    seen = where <= position
    return seen if window is None else seen & (where > position - window)


def _scores(columns: Sequence[jax.Array], keys: jax.Array) -> jax.Array:
    """G query heads [Nkv, Dh] and keys [Nkv, S, Dh] -> float32 [Nkv, G, S]."""
    dims = (((2,), (1,)), ((0,), (0,)))
    return jnp.stack([_dot(keys, column, dims) for column in columns], axis=1)


def _mixed(weights: jax.Array, values: jax.Array) -> jax.Array:
    """weights [Nkv, G, S] and values [Nkv, S, Dh] -> float32 [Nkv, G, Dh]."""
    values = lax.optimization_barrier(values)
    heads = lax.optimization_barrier([weights[:, g] for g in range(weights.shape[1])])
    dims = (((1,), (1,)), ((0,), (0,)))
    return jnp.stack([_dot(head, values, dims) for head in heads], axis=1)


def _dot(a: jax.Array, b: jax.Array, dims: lax.DotDimensionNumbers) -> jax.Array:
    return lax.optimization_barrier(lax.dot_general(a, b, dims, preferred_element_type=jnp.float32))


def _update(
    state: State, scores: jax.Array, seen: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One online-softmax step (arXiv:2205.14135) over a block of keys, all but its values.

    scores [Nkv, G, S], seen [S], at least one of them true -> the new maximum and total [Nkv, G],
    the old sum of values rescaled [Nkv, G, Dh], the weights of the block [Nkv, G, S].
    """
    top, total, acc = state
    mask = seen[None, None, :]
    scores = jnp.where(mask, lax.optimization_barrier(scores) * scale, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
    decay = jnp.exp(top - new_top)
    weights, decay = lax.optimization_barrier((weights, decay))
    sums = lax.optimization_barrier(jnp.sum(weights, axis=-1))
    old_total, old_acc = lax.optimization_barrier((total * decay, acc * decay[..., None]))
    return new_top, old_total + sums, old_acc, weights
