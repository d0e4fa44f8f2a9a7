"""Integer weights of one row and the walk over them, shared by the references of this folder."""

import jax
import jax.numpy as jnp
from jax import lax

from ..vocab_blocks import LANES, fold
from . import wide
from .wide import Wide


def scaled_gap(blocks: jax.Array, top: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    """d = (logit - max) * inv_temperature."""
    return lax.optimization_barrier((blocks - top) * inv_temperature)


def weights(gap: jax.Array, kept: jax.Array) -> Wide:
    """The two limbs of floor(exp(gap) * 2^40), uint32 in the shape of `gap`."""
    likelihood = lax.optimization_barrier(jnp.exp(gap))
    scaled = jnp.where(kept, jnp.minimum(likelihood, 1.0), 0.0) * float(2**wide.LIMB_BITS)
    high = scaled.astype(jnp.int32)  # rounds towards zero; exact from here on
    low = ((scaled - high.astype(jnp.float32)) * float(2**wide.LIMB_BITS)).astype(jnp.int32)
    return high.astype(jnp.uint32), low.astype(jnp.uint32)


def only(kept: jax.Array, limbs: Wide) -> Wide:
    """The weights of kept tokens, 0 for the others."""
    return jnp.where(kept, limbs[0], jnp.uint32(0)), jnp.where(kept, limbs[1], jnp.uint32(0))


def block_sums(limbs: Wide) -> jax.Array:
    """Sums of weights [blocks, strips, LANES] over each block, as digits [3, blocks]."""
    return wide.to_digits(fold(jnp.add, limbs[0]), fold(jnp.add, limbs[1]))


def total(digits: jax.Array) -> Wide:
    """The sum over the last axis of digits [3, n]."""
    return wide.from_digits(jnp.sum(digits, axis=1, dtype=jnp.uint32))


def first_exceeding(limbs: Wide, sums: jax.Array, threshold: Wide) -> jax.Array:
    """The first id whose running sum of weights exceeds the threshold, which is below the total.

    limbs [blocks, strips, LANES] and their block sums: the walk goes over blocks, then over the
    strips of one block, then over the lanes of one strip.
    """
    block, rest = _step(sums, threshold)
    high, low = limbs[0][block], limbs[1][block]
    strips = (jnp.sum(high, axis=1, dtype=jnp.uint32), jnp.sum(low, axis=1, dtype=jnp.uint32))
    strip, rest = _step(wide.to_digits(*strips), rest)
    lane, _ = _step(wide.to_digits(high[strip], low[strip]), rest)
    return (block * limbs[0].shape[1] + strip) * LANES + lane


def _step(digits: jax.Array, threshold: Wide) -> tuple[jax.Array, Wide]:
    """The first of n entries whose running sum exceeds the threshold, and what is left inside."""
    place = lax.iota(jnp.int32, digits.shape[1])
    # All running sums at once, which compiles to less than a scan.
    upto = (place[:, None] <= place[None, :])[None]
    running = jnp.sum(jnp.where(upto, digits[:, :, None], jnp.uint32(0)), axis=1, dtype=jnp.uint32)
    passed = wide.less_equal(wide.from_digits(running), threshold)
    index = jnp.sum(passed, dtype=jnp.int32)
    before = total(jnp.where((place < index)[None], digits, jnp.uint32(0)))
    return index, wide.subtract(threshold, before)
