"""Log-probabilities on a CPU, every operation at one fixed shape."""

import jax
import jax.numpy as jnp
from jax import lax

from ..fixed_rows import for_row_blocks
from ..float_order import NEG_INF, POS_INF, from_order_key, is_kept, order_key
from ..lanes import sum_over_lanes
from ..vocab_blocks import as_blocks, fold, token_ids
from .topology import LogSoftmaxTopology

ROWS = 1  # rows a block of the sums: a row of logits is long enough to fill the vector units
TARGETS = 64  # targets a block


def target_logprobs_reference(
    logits: jax.Array,
    target: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: LogSoftmaxTopology,
) -> tuple[jax.Array, jax.Array]:
    """logits [R, V], target [R, N] -> (logprob [R, N], log_sum_exp [R])."""

    def sums(row: jax.Array, inverse: jax.Array, key: jax.Array, last: jax.Array):
        return _sums(row[0], inverse[0], key[0], last[0], topology)

    rows = (logits, inv_temperature, cut_key, cut_id)
    top, log_sum, log_sum_exp = for_row_blocks(sums, *rows, rows=ROWS, num_rows=num_rows)

    width = target.shape[1]
    value = jnp.take_along_axis(logits, target, axis=1, mode="clip")
    inside = (target >= 0) & (target < logits.shape[1])
    kept = is_kept(order_key(value), target, cut_key[:, None], cut_id[:, None])

    def spread(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a[:, None], target.shape).reshape(-1)

    columns = (value, inside, kept)
    (logprob,) = for_row_blocks(
        _logprob,
        *(a.reshape(-1) for a in columns),
        *(spread(a) for a in (top, inv_temperature, log_sum)),
        rows=TARGETS,
        num_rows=num_rows * width,
    )
    return logprob.reshape(target.shape), log_sum_exp


def _sums(
    row: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    topology: LogSoftmaxTopology,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One row [V] -> its maximum, the log of the sum relative to it, the log-sum-exp; [1] each."""
    blocks = as_blocks(row, topology.block)
    keys = order_key(blocks)
    # A NaN or +inf is never cut away: it must show.
    kept = is_kept(keys, token_ids(blocks), cut_key, cut_id) | (keys >= POS_INF)
    block_keys = fold(jnp.maximum, jnp.where(kept, keys, NEG_INF))
    top = from_order_key(jnp.max(block_keys, keepdims=True))
    block_tops = from_order_key(block_keys)
    # A block of nothing but -inf has no maximum to subtract; its terms are exp(-inf) = 0.
    origin = jnp.where(block_tops == -jnp.inf, 0.0, block_tops)[:, None, None]
    gaps = jnp.where(kept, (blocks - origin) * inv_temperature, -jnp.inf)
    terms = lax.optimization_barrier(jnp.exp(lax.optimization_barrier(gaps)))
    factors = jnp.exp(lax.optimization_barrier((block_tops - top) * inv_temperature))
    # The barrier keeps the products out of the adds, where they could become FMAs.
    sums = sum_over_lanes(terms.reshape(-1, topology.block), topology.lanes)
    parts = lax.optimization_barrier(sums * factors)
    length = parts[:1]
    for b in range(1, parts.shape[0]):
        length = length + parts[b : b + 1]
    log_sum = jnp.log(lax.optimization_barrier(length))
    scaled_top = lax.optimization_barrier(top * inv_temperature)
    return top, log_sum, scaled_top + log_sum


def _logprob(
    value: jax.Array,
    inside: jax.Array,
    kept: jax.Array,
    top: jax.Array,
    inv_temperature: jax.Array,
    log_sum: jax.Array,
) -> tuple[jax.Array]:
    gap = lax.optimization_barrier((value - top) * inv_temperature)
    logprob = jnp.where(kept | jnp.isnan(log_sum), gap - log_sum, -jnp.inf)
    return (jnp.where(inside, logprob, jnp.nan),)
