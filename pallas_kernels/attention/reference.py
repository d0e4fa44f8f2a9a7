"""Paged causal attention on a CPU, every operation at one fixed number of queries."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from .topology import AttentionTopology

ROWS = 4  # query tokens a block; each meets its own keys

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
    keys_a_page = k_pages.shape[2]
    page_of = jnp.minimum(request, page_table.shape[0] - 1)
    # Padding may hold any position, and a large one would only make the loop long.
    real = jnp.arange(positions.shape[0], dtype=jnp.int32) < num_tokens
    positions = jnp.where(real, positions, 0)

    def body(queries: jax.Array, place: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages_of_rows = page_table[row]
        first = 0 if window is None else jnp.min(jnp.maximum(place - (window - 1), 0)) // block
        last = jnp.max(place) // block + 1

        def meet(j: jax.Array, state: State) -> State:
            where = j * block + jnp.arange(block, dtype=jnp.int32)
            pages = jnp.take_along_axis(
                pages_of_rows, jnp.broadcast_to(where // keys_a_page, (ROWS, block)), 1, mode="clip"
            )
            slot = where % keys_a_page
            keys = k_pages.at[pages, :, slot[None]].get(mode="clip")
            values = v_pages.at[pages, :, slot[None]].get(mode="clip")
            seen = where[None] <= place[:, None]
            if window is not None:
                seen &= where[None] > place[:, None] - window
            queries_, keys, values, seen = lax.optimization_barrier((queries, keys, values, seen))
            return update(state, queries_, keys, values, seen, scale)

        shape = queries.shape[:3]
        start = (
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(queries.shape, jnp.float32),
        )
        top, total, acc = lax.optimization_barrier(lax.fori_loop(first, last, meet, start))
        return (acc / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = for_row_blocks(body, q, positions, page_of, rows=ROWS, num_rows=num_tokens)
    return out, lse


def update(
    state: State,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    scale: float,
) -> State:
    """One online-softmax step (arXiv:2205.14135) over a block of keys.

    queries [R, Nkv, G, Dh], keys and values [R, S, Nkv, Dh], seen [R, S]. A row that sees none of
    the block keeps its state to the bit.
    """
    top, total, acc = state
    mask = seen[:, None, None, :]
    scores = lax.dot_general(
        queries, keys, (((3,), (3,)), ((0, 1), (0, 2))), preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask, lax.optimization_barrier(scores) * scale, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.where(mask, jnp.exp(scores - safe_top[..., None]), 0.0)
    decay = jnp.exp(top - safe_top)
    weights, decay = lax.optimization_barrier((weights, decay))
    # Keys that are not seen may hold anything, NaN too, and 0 x NaN is not 0.
    clean = jnp.where(seen[:, :, None, None], values, jnp.zeros((), values.dtype))
    mixed = lax.dot_general(
        weights.astype(values.dtype),
        clean,
        (((3,), (1,)), ((0, 1), (0, 2))),
        preferred_element_type=jnp.float32,
    )
    mixed = lax.optimization_barrier(mixed)
    sums = lax.optimization_barrier(jnp.sum(weights, axis=-1))
    old_total, old_acc = lax.optimization_barrier((total * decay, acc * decay[..., None]))
    any_seen = jnp.any(seen, axis=-1)[:, None, None]
    return (
        jnp.where(any_seen, new_top, top),
        jnp.where(any_seen, old_total + sums, total),
        jnp.where(any_seen[..., None], old_acc + mixed, acc),
    )
