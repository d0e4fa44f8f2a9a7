"""One row in one CTA on Hopper: its blocks, the list of its largest logits, sums over all of it."""

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..float_order import NEG_INF, POS_INF, from_order_key, order_key
from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, PLACE_LAYOUT, PLACES, Vocabulary
from . import wide
from .hopper_list import likelihood
from .hopper_scatter import append
from .hopper_walk import weight_of
from .hopper_weights import limb_sums, limb_values

U32 = jnp.uint32
_AT_ONCE = 4  # blocks that are loaded together


@dataclasses.dataclass(frozen=True)
class Row:
    """What the stages of one CTA share.

    Attributes:
      index: its row.
      gmem, smem: arrays by name.
      top, top_key: the row's maximum and its key.
      inverse: of the row; None where logits are ordered and not weighed.
      vocabulary, vocab_size: how the row is cut into blocks, and its real columns.
      interpret: whether this is the interpreter.
    """

    index: jax.Array
    gmem: types.SimpleNamespace
    smem: types.SimpleNamespace
    top: jax.Array
    top_key: jax.Array
    inverse: jax.Array | None
    vocabulary: Vocabulary
    vocab_size: int
    interpret: bool

    def block(self, index):
        """Values, ids and which are not the block's own, [block] each."""
        return self._block(self._load(index), index)

    def _load(self, index):
        return blocks.load_values(self.gmem.logits, self.index, index, self.vocabulary)

    def _block(self, values, index):
        block = blocks.as_block(values, index, self.vocabulary)
        foreign = block.ids >= self.vocab_size
        if block.foreign is not None:
            foreign |= block.foreign
        return block.values, block.ids, foreign

    def needed_blocks(self, maxima, bound):
        """Lists the blocks that have keys above the bound in `places`, and returns their number."""
        place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
        self._reset()
        dropped = (order_key(maxima) <= bound) | (place >= self.vocabulary.blocks)
        append(self.smem.places, self.smem.count, [place], dropped, self.interpret)
        plgpu.commit_smem()
        return self.smem.count[0]

    def collect(self, count, dropped: Callable, *, more: bool = False):
        """Adds (bits, id) of the listed blocks to the entries, but for what is dropped(x, ids).

        Returns: how many there are now, whether they fit or not.
        """
        if not more:
            self._reset()

        def step(i, carry):
            places = [i * _AT_ONCE + n for n in range(_AT_ONCE)]
            indices = [self.smem.places[0, jnp.minimum(place, count - 1)] for place in places]
            loaded = [self._load(index) for index in indices]
            for place, index, values in zip(places, indices, loaded, strict=True):
                x, ids, foreign = self._block(values, index)
                left_out = dropped(x, ids) | foreign | (place >= count)
                entries = [lax.bitcast_convert_type(x, I32), ids]
                append(self.smem.entries, self.smem.count, entries, left_out, self.interpret)
            return carry

        lax.fori_loop(
            I32(0), (count + (_AT_ONCE - 1)) >> I32(_AT_ONCE.bit_length() - 1), step, I32(0)
        )
        plgpu.commit_smem()
        return self.smem.count[0]

    def _reset(self):
        plgpu.commit_smem()
        self.smem.count[0] = I32(0)
        plgpu.commit_smem()

    def total(self, dropped: Callable, *, counting: bool) -> wide.Wide:
        """The number or the weight of all but what is dropped(x, ids), from global memory."""

        def step(index, sums):
            x, ids, foreign = self.block(index)
            left_out = dropped(x, ids) | foreign
            if counting:
                more = U32(0), count_kept(left_out, ids).astype(U32)
            else:
                e = likelihood(x, self.top, self.inverse)
                more = weight_of(*limb_sums(jnp.where(left_out, jnp.zeros_like(e), e)))
            return wide.add(sums, more)

        return lax.fori_loop(I32(0), I32(self.vocabulary.blocks), step, (U32(0), U32(0)))

    def in_block(self, value: Callable, key):
        """A value of a key, beside each column of a block."""
        return value(key, self.vocabulary.block, self.vocabulary.layout)

    def weight_at(self, key) -> wide.Wide:
        """The weight of one logit."""
        limbs = limb_values(likelihood(value_of(key), self.top, self.inverse))
        return weight_of(*map(jnp.max, limbs))  # they are all the same

    def tie(self, key, count):
        """The id of the count-th logit that has the key, count from 1 on; ids ascend by block."""
        value = self.in_block(value_of, key)

        def ones(index, before=None):
            x, ids, foreign = self.block(index)
            left_out = (x != value) | foreign
            if before is not None:
                left_out |= ids >= before
            return count_kept(left_out, ids)

        def further(state):
            index, left, here = state
            return (here < left) & (index < self.vocabulary.blocks - 1)

        def step(state):
            index, left, here = state
            return index + 1, left - here, ones(index + 1)

        index, left, _ = lax.while_loop(further, step, (I32(0), count, ones(I32(0))))
        bits = self.vocabulary.block.bit_length() - 1
        start = index * self.vocabulary.block

        def try_bit(i, passed):
            raised = passed + (I32(1) << (I32(bits - 1) - i))
            return jnp.where(ones(index, start + raised) < left, raised, passed)

        return start + lax.fori_loop(I32(0), I32(bits), try_bit, I32(0))


def count_kept(dropped, ids):
    """How many are not dropped."""
    return jnp.sum(jnp.where(dropped, jnp.zeros_like(ids), jnp.full_like(ids, 1)))


def exact_value(key, size: int = PLACES, layout=PLACE_LAYOUT):
    """The float32 that has the key, NaN if none has, in each of `size` places."""
    return from_order_key(plgpu.layout_cast(jnp.broadcast_to(key, (size,)), layout))


def value_of(key, size: int = PLACES, layout=PLACE_LAYOUT):
    """As `exact_value`, but an infinity for keys beyond those of logits."""
    return exact_value(jnp.minimum(jnp.maximum(key, NEG_INF), POS_INF), size, layout)
