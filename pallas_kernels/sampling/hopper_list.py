"""The short list of a row's largest logits in shared memory, and the search for a cut in it.

The list is in no order. Every search is for the largest key that enough lies at or above, bit by
bit: sums of integers, exact in any order.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..float_order import LOWEST, NEG_INF, from_order_key, is_kept, order_key
from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, PLACE_LAYOUT, PLACES
from . import wide
from .hopper_walk import weight_of
from .hopper_weights import add_up, limb_values

U32 = jnp.uint32
CAPACITY = 31 * PLACES  # high limbs of so many weights, 2^20 at most, have a sum below 2^32 - 2^12
_MOST_TIES_BITS = 18  # of a row


@dataclasses.dataclass(frozen=True)
class ShortList:
    """Entries in shared memory: keys and ids int32 [2, CAPACITY], limbs uint32 [2, CAPACITY].

    Attributes:
      tiles: how many PLACES hold entries; the rest of the last one has key LOWEST and weight 0.
    """

    entries: jax.Array
    limbs: jax.Array
    tiles: jax.Array

    def tile(self, ref, n: int, index):
        at = pl.ds(index * PLACES, PLACES)
        return plgpu.load(ref.at[n, at], layout=PLACE_LAYOUT, optimized=False)

    def fold(self, of_tile: Callable, join: Callable):
        """Joins the arrays of all tiles; then it is for the caller to join what threads hold."""
        return lax.fori_loop(
            I32(1),
            self.tiles,
            lambda i, acc: jax.tree.map(join, acc, of_tile(i)),
            of_tile(I32(0)),
        )

    def each(self, visit: Callable) -> None:
        def step(i, carry):
            visit(i)
            return carry

        lax.fori_loop(I32(0), self.tiles, step, I32(0))
        plgpu.commit_smem()

    def take_bits(self, count, top, inverse) -> None:
        """From the bits of `count` logits to keys, and to weights where there is a temperature."""
        place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)

        def visit(i):
            at = pl.ds(i * PLACES, PLACES)
            filled = i * PLACES + place < count
            x = lax.bitcast_convert_type(self.tile(self.entries, 0, i), jnp.float32)
            if inverse is not None:
                kept = jnp.where(filled, x, -jnp.inf)
                for n, limb in enumerate(limb_values(likelihood(kept, top, inverse))):
                    self.limbs[n, at] = limb
            self.entries[0, at] = jnp.where(filled, order_key(x), LOWEST)

        self.each(visit)

    def drop_after(self, cut_key, cut_id) -> None:
        """Takes the weight of what is not kept."""

        def visit(i):
            kept = is_kept(
                self.tile(self.entries, 0, i), self.tile(self.entries, 1, i), cut_key, cut_id
            )
            for n in range(2):
                limb = self.tile(self.limbs, n, i)
                self.limbs[n, pl.ds(i * PLACES, PLACES)] = jnp.where(
                    kept, limb, jnp.zeros_like(limb)
                )

        self.each(visit)

    def count_from(self, lowest) -> wide.Wide:
        """How many keys are `lowest` or more."""

        def of_tile(i):
            keys = self.tile(self.entries, 0, i)
            return jnp.where(keys >= lowest, jnp.full_like(keys, 1), jnp.zeros_like(keys))

        return U32(0), jnp.sum(self.fold(of_tile, jnp.add)).astype(U32)

    def weight_from(self, lowest) -> wide.Wide:
        """The weight of all keys that are `lowest` or more."""

        def of_tile(i):
            chosen = self.tile(self.entries, 0, i) >= lowest
            limbs = (self.tile(self.limbs, n, i) for n in range(2))
            return tuple(jnp.where(chosen, limb, jnp.zeros_like(limb)) for limb in limbs)

        return weight_of(*map(add_up, self.fold(of_tile, jnp.add)))

    def lowest_id_of(self, key, beyond: int):
        """How many entries have the key, and the lowest id among them."""

        def of_tile(i):
            at = self.tile(self.entries, 0, i) == key
            ids = self.tile(self.entries, 1, i)
            one = jnp.where(at, jnp.full_like(ids, 1), jnp.zeros_like(ids))
            return one, jnp.where(at, ids, jnp.full_like(ids, beyond))

        def join(ones, ids, i):
            one, more = of_tile(i)
            return ones + one, jnp.minimum(ids, more)

        ones, ids = lax.fori_loop(I32(1), self.tiles, lambda i, a: join(*a, i), of_tile(I32(0)))
        return jnp.sum(ones), jnp.min(ids)


def likelihood(x, top, inverse):
    """exp of the scaled gaps, as everywhere."""
    gap = lax.optimization_barrier((x - top) * inverse)
    return lax.optimization_barrier(blocks.exponential(gap))


def search(from_key: Callable, need: wide.Wide, lowest, top) -> tuple[jax.Array, wide.Wide]:
    """The largest key from `lowest` to `top` at or above which lies `need`, and what lies above it.

    from_key: what lies at or above a key; at `lowest` at least `need`, above `top` nothing.
    """
    differing = I32(32) - lax.clz(lowest ^ top)
    shift = jnp.minimum(differing, 31)
    start = jnp.where(differing == 32, I32(LOWEST), (top >> shift) << shift)

    def try_bit(i, state):
        cut, above = state[0], (state[1], state[2])
        raised = cut ^ (I32(1) << (differing - 1 - i))
        reached = from_key(raised)
        enough = wide.less_equal(need, reached)
        above = (jnp.where(enough, old, new) for old, new in zip(above, reached, strict=True))
        return jnp.where(enough, raised, cut), *above

    # The last key refused is the next one up.
    cut, *above = lax.fori_loop(I32(0), differing, try_bit, (start, U32(0), U32(0)))
    return cut, tuple(above)


def lowest_key(holds: Callable, top_key):
    """The lowest key of a logit for which `holds`; true at the top, and once true, true above.

    holds: float32 [PLACES] -> bool [PLACES]. One key a thread, five times.
    """
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    refused = I32(LOWEST)
    for shift in (25, 18, 11, 4, 0):
        keys = refused + (place << I32(shift))
        within = jnp.minimum(jnp.maximum(keys, NEG_INF), top_key)
        true = (keys >= NEG_INF) & ((keys >= top_key) | holds(from_order_key(within)))
        zeros = jnp.zeros_like(place)
        # A last round of PLACES keys has only 16 of its own; those beyond are true like theirs.
        refused += (jnp.sum(jnp.where(true, zeros, zeros + 1)) - 1) << I32(shift)
    return refused + 1


def ties_needed(weight: wide.Wide, need: wide.Wide):
    """The smallest count, 1 or more, of equal weights that reaches `need`."""

    def step(i, fewer):
        more = fewer + (I32(1) << (I32(_MOST_TIES_BITS - 1) - i))
        short = ~wide.less_equal(need, times(weight, more.astype(U32)))
        return jnp.where(short, more, fewer)

    return lax.fori_loop(I32(0), I32(_MOST_TIES_BITS), step, I32(0)) + 1


def times(weight: wide.Wide, count) -> wide.Wide:
    high, low = wide.multiply_32(weight[1], count)
    return high + weight[0] * count, low
