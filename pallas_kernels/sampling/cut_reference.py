"""Where top-k, top-p and min-p cut a row, on a CPU.

A short list of the largest logits answers nearly every row; a search over all bits of the key
answers the rest. Both give the cut that `SamplingTopology` defines.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..float_order import LOWEST, from_order_key, is_kept, order_key
from ..vocab_blocks import as_blocks, fold, token_ids
from . import wide
from .topology import SamplingTopology
from .weights import block_sums, first_exceeding, only, scaled_gap, total, weights

ROWS = 1  # rows a block
SHORT_LIST = 256

Cut = tuple[jax.Array, jax.Array]


def find_cut_reference(
    logits: jax.Array,
    inv_temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    log_min_p: jax.Array,
    num_rows: jax.Array,
    *,
    topology: SamplingTopology,
    short_list: int = SHORT_LIST,
) -> Cut:
    """logits [R, V] -> (cut_key int32 [R], cut_id int32 [R]); short_list=0 searches every row."""
    vocab = logits.shape[1]

    def body(*rows: jax.Array) -> Cut:
        row, inverse, k, p, min_gap = (a[0] for a in rows)
        filtered = ((k > 0) & (k < vocab)) | (p > 0) | (min_gap > -jnp.inf)
        cut_key, cut_id = lax.cond(
            filtered & (inverse > 0),
            lambda: _search(row, inverse, k, p, min_gap, topology, min(short_list, vocab)),
            lambda: (jnp.int32(LOWEST), jnp.int32(vocab)),
        )
        return cut_key[None], cut_id[None]

    rows = (logits, inv_temperature, top_k, top_p, log_min_p)
    cut_key, cut_id = for_row_blocks(body, *rows, rows=ROWS, num_rows=num_rows)
    return cut_key, cut_id


def _search(
    row: jax.Array,
    inv_temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    log_min_p: jax.Array,
    topology: SamplingTopology,
    short_list: int,
) -> Cut:
    vocab = row.shape[0]
    blocks = as_blocks(row, topology.block)
    keys, ids = order_key(blocks), token_ids(blocks)
    top = from_order_key(jnp.max(fold(jnp.maximum, keys)))
    gap = scaled_gap(blocks, top, inv_temperature)
    likely = jnp.sum(fold(jnp.add, (gap >= log_min_p).astype(jnp.int32)))
    most = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    most = jnp.clip(jnp.minimum(most, likely), 1, vocab)
    limbs = weights(gap, ids < vocab)

    def search() -> Cut:
        return _search_bits(keys, ids, limbs, most, top_p)

    if short_list == 0:
        return search()
    values, listed = lax.top_k(from_order_key(order_key(row)), short_list)
    digits = wide.to_digits(*(a.reshape(-1)[listed] for a in limbs))
    counted = jnp.where((lax.iota(jnp.int32, short_list) < most)[None], digits, jnp.uint32(0))
    everything, listed_only = total(block_sums(limbs)), total(counted)
    whole = (
        jnp.where(most == vocab, everything[0], listed_only[0]),
        jnp.where(most == vocab, everything[1], listed_only[1]),
    )
    running = wide.from_digits(jnp.cumsum(digits, axis=1, dtype=jnp.uint32))
    reached = wide.less_equal(wide.multiply_fraction_up(whole, top_p), running)
    place = jnp.where(top_p > 0, jnp.sum(~reached, dtype=jnp.int32), most - 1)
    known = ((most <= short_list) | (most == vocab)) & (place < short_list)
    place = jnp.minimum(place, short_list - 1)
    return lax.cond(known, lambda: (order_key(values[place]), listed[place]), search)


def _search_bits(
    keys: jax.Array, ids: jax.Array, limbs: wide.Wide, most: jax.Array, top_p: jax.Array
) -> Cut:
    """Cuts twice: where the count reaches `most`, then where the weight reaches top_p."""

    def cut_once(turn: jax.Array, cut: Cut) -> Cut:
        counting = turn == 0
        kept = is_kept(keys, ids, *cut)
        high = jnp.where(counting, jnp.uint32(0), limbs[0])
        low = jnp.where(counting, jnp.uint32(1), limbs[1])
        counted = only(kept, (high, low))
        share = wide.multiply_fraction_up(total(block_sums(counted)), top_p)
        need = (
            jnp.where(counting, jnp.uint32(0), share[0]),
            jnp.where(counting, most.astype(jnp.uint32), share[1]),
        )
        return _cut_at(keys, counted, need)

    everything = (jnp.int32(LOWEST), jnp.int32(keys.size))
    return lax.fori_loop(0, jnp.where(top_p > 0, 2, 1), cut_once, everything)


def _cut_at(keys: jax.Array, limbs: wide.Wide, need: wide.Wide) -> Cut:
    """The end of the shortest prefix of the order whose weight reaches `need`, 1 or more."""

    def try_bit(i: jax.Array, best: tuple[jax.Array, wide.Wide]) -> tuple[jax.Array, wide.Wide]:
        cut, above = best
        # From the top bit down; flipping bit 31 of LOWEST gives 0.
        raised = cut ^ (jnp.int32(1) << (31 - i))
        reached = _weight_from(raised, keys, limbs)
        enough = wide.less_equal(need, reached)
        above = (
            jnp.where(enough, above[0], reached[0]),
            jnp.where(enough, above[1], reached[1]),
        )
        return jnp.where(enough, raised, cut), above

    zero = (jnp.uint32(0), jnp.uint32(0))
    # The last key refused is the next one up, so `above` ends as the weight above the cut.
    cut, above = lax.fori_loop(0, 32, try_bit, (jnp.int32(LOWEST), zero))
    ties = only(keys == cut, limbs)
    before_last = wide.subtract(wide.subtract(need, above), (jnp.uint32(0), jnp.uint32(1)))
    return cut, first_exceeding(ties, block_sums(ties), before_last)


def _weight_from(lowest: jax.Array, keys: jax.Array, limbs: wide.Wide) -> wide.Wide:
    """The weight of all keys from `lowest` on."""

    def strip(i: int) -> wide.Wide:
        return only(keys[:, i] >= lowest, (limbs[0][:, i], limbs[1][:, i]))

    # Strip by strip, so that the masked weights need not be written down.
    high, low = strip(0)
    for i in range(1, keys.shape[1]):
        more = strip(i)
        high, low = high + more[0], low + more[1]
    return total(block_sums((high[:, None], low[:, None])))
