"""Paged causal attention on a CPU, every operation at one fixed number of queries."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .topology import AttentionTopology

ROWS = 1  # query tokens a block: each meets its own pages, so more would not share anything

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

    def body(queries: jax.Array, place: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads, position, table = queries[0], place[0], page_table[row[0]]
        first = 0 if window is None else jnp.maximum(position - (window - 1), 0) // block

        def meet(j: jax.Array, state: State) -> State:
            where = j * block + jnp.arange(block, dtype=jnp.int32)
            seen = where <= position
            if window is not None:
                seen &= where > position - window
            keys = read_block(k_pages, table, j, block)
            values = read_block(v_pages, table, j, block)
            q, k, v, s = lax.optimization_barrier((heads, keys, values, seen))
            return update(state, q, k, v, s, scale)

        start = (
            jnp.full(heads.shape[:2], -jnp.inf, jnp.float32),
            jnp.zeros(heads.shape[:2], jnp.float32),
            jnp.zeros(heads.shape, jnp.float32),
        )
        end = position // block + 1
        top, total, acc = lax.optimization_barrier(lax.fori_loop(first, end, meet, start))
        return (acc / total[..., None]).astype(q.dtype)[None], (top + jnp.log(total))[None]

    out, lse = for_row_blocks(body, q, positions, page_row, rows=ROWS, num_rows=num_tokens)
    return out, lse


def read_block(pages: jax.Array, table: jax.Array, j: jax.Array, block: int) -> jax.Array:
    """Tokens j * block .. (j + 1) * block - 1 of a request, from pages [P, Nkv, Tp, Dh]
    -> [Nkv, block, Dh]."""
    _, heads, page_size, width = pages.shape
    if page_size >= block:
        page, offset = table[j * block // page_size], j * block % page_size
        return lax.dynamic_slice(pages, (page, 0, offset, 0), (1, heads, block, width))[0]
    count = block // page_size
    parts = [lax.dynamic_index_in_dim(pages, table[j * count + i], 0, False) for i in range(count)]
    return jnp.concatenate(parts, axis=1)


def update(
    state: State,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    scale: float,
) -> State:
    """One online-softmax step (arXiv:2205.14135) over a block of keys.

    queries [Nkv, G, Dh], keys and values [Nkv, S, Dh], seen [S]; at least one key is seen.
    """
    top, total, acc = state
    mask = seen[None, None, :]
    scores = lax.dot_general(
        queries, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask, lax.optimization_barrier(scores) * scale, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
    decay = jnp.exp(top - new_top)
    weights, decay = lax.optimization_barrier((weights, decay))
    # Keys that are not seen may hold anything, NaN too, and 0 x NaN is not 0.
    clean = jnp.where(seen[None, :, None], values, jnp.zeros((), values.dtype))
    mixed = lax.dot_general(
        weights.astype(values.dtype),
        clean,
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    mixed = lax.optimization_barrier(mixed)
    sums = lax.optimization_barrier(jnp.sum(weights, axis=-1))
    old_total, old_acc = lax.optimization_barrier((total * decay, acc * decay[..., None]))
    return new_top, old_total + sums, old_acc + mixed
