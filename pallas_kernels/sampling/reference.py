"""Token choice on a CPU, one row at a time, so that a row's work can follow its own request."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..float_order import NEG_INF, POS_INF, from_order_key, is_kept, order_key
from ..vocab_blocks import as_blocks, fold, token_ids
from . import wide
from .threefry import threefry2x32
from .topology import SamplingTopology
from .weights import block_sums, first_exceeding, scaled_gap, total, weights

ROWS = 1  # rows a block


def choose_token_reference(
    logits: jax.Array,
    key_words: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: SamplingTopology,
) -> tuple[jax.Array, jax.Array]:
    """logits [R, V] -> (token int32 [R], bad_row bool [R])."""

    def body(*row: jax.Array) -> tuple[jax.Array, jax.Array]:
        token, bad = _choose(*(a[0] for a in row), topology=topology)
        return token[None], bad[None]

    zero = jnp.zeros_like(key_words[:, 0])
    bits = jnp.stack(threefry2x32(key_words[:, 0], key_words[:, 1], zero, zero), axis=1)
    rows = (logits, bits, inv_temperature, cut_key, cut_id)
    token, bad = for_row_blocks(body, *rows, rows=ROWS, num_rows=num_rows)
    return token, bad


def _choose(
    row: jax.Array,
    bits: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    *,
    topology: SamplingTopology,
) -> tuple[jax.Array, jax.Array]:
    blocks = as_blocks(row, topology.block)
    keys, ids = order_key(blocks), token_ids(blocks)
    top_key = jnp.max(fold(jnp.maximum, keys))
    bad = (top_key >= POS_INF) | (top_key <= NEG_INF)

    def greedy() -> jax.Array:
        return jnp.min(fold(jnp.minimum, jnp.where(keys == top_key, ids, keys.size)))

    def drawn() -> jax.Array:
        gap = scaled_gap(blocks, from_order_key(top_key), inv_temperature)
        limbs = weights(gap, is_kept(keys, ids, cut_key, cut_id))
        sums = block_sums(limbs)
        threshold = wide.multiply_high((bits[0], bits[1]), total(sums))
        return first_exceeding(limbs, sums, lax.optimization_barrier(threshold))

    token = lax.cond(inv_temperature > 0, drawn, greedy)
    return jnp.where(bad, 0, token), bad


def top_tokens_reference(logits: jax.Array, num_rows: jax.Array, *, count: int) -> tuple[jax.Array]:
    """logits [R, V] -> the ids of the `count` largest, int32 [R, count]."""

    def body(row: jax.Array) -> tuple[jax.Array]:
        # Only compares; zeros of either sign become 0.0, so that they tie.
        return (lax.top_k(from_order_key(order_key(row)), count)[1],)

    return (for_row_blocks(body, logits, rows=ROWS, num_rows=num_rows)[0],)
