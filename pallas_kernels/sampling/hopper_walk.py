"""From block sums to a token on Hopper: find the block, then the column inside it.

Both are searches by halving over running sums: 7 steps for the block, log2(block) for the column,
each a sum of integers over the warpgroup. Where the row's sums of exponentials are there too, the
same CTA scores the token, with the functions of `log_softmax.kernel_hopper`. Grid: one CTA a row.
"""

import dataclasses
import functools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, PLACE_LAYOUT, PLACES, Block, Vocabulary
from ..log_softmax.kernel_hopper import log_probability, log_sum_exp, merge_blocks
from . import wide
from .hopper_weights import add_up, limbs_of

U32 = jnp.uint32


@dataclasses.dataclass(frozen=True)
class Row:
    """What the stages of one CTA share: its row, global arrays by name, and the row's maximum."""

    index: jax.Array
    gmem: types.SimpleNamespace
    maxima: jax.Array
    top: jax.Array
    vocabulary: Vocabulary

    def places(self, name: str, beyond):
        return blocks.load_places(getattr(self.gmem, name), self.index, beyond, self.vocabulary)

    def block(self, index) -> Block:
        values = blocks.load_values(self.gmem.logits, self.index, index, self.vocabulary)
        return blocks.as_block(values, index, self.vocabulary)


def _body(*refs, names: tuple[str, ...], vocabulary: Vocabulary, vocab_size: int):
    gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    index = lax.axis_index("row")

    @pl.when(index < gmem.num_rows[0])
    def _choose():
        maxima = blocks.load_places(gmem.maxima, index, -jnp.inf, vocabulary)
        row = Row(index, gmem, maxima, blocks.row_top(maxima), vocabulary)
        # Comparisons are false for a NaN.
        good = (row.top < jnp.inf) & (row.top > -jnp.inf)

        def greedy():
            return first_at_top(row)

        def choose():
            if not hasattr(gmem, "bits"):
                return greedy()
            return lax.cond(gmem.inverse[index] > 0.0, lambda: drawn(row), greedy)

        token = lax.cond(good, choose, lambda: I32(0))
        if hasattr(gmem, "given"):
            given = gmem.given[index]
            token = jnp.where(given >= 0, given, token)
        gmem.token[index] = token
        gmem.bad[index] = jnp.where(good, 0, 1).astype(I32)
        if hasattr(gmem, "sums"):
            score(token, row, vocab_size)


def drawn(row: Row):
    """The token that the row's 64 random bits choose."""
    gmem, r = row.gmem, row.index
    high, low = row.places("high", U32(0)), row.places("low", U32(0))
    index, rest = find_block(high, low, (gmem.bits[r, 0], gmem.bits[r, 1]))
    cut = gmem.cut_value[r], gmem.cut_id[r]
    limbs = limbs_of(row.block(index), row.top, gmem.inverse[r], *cut, row.vocabulary)
    return find_column(limbs, rest, index, row.vocabulary)


def score(token, row: Row, vocab_size: int):
    """Writes the token's log-probability, NaN outside the vocabulary, and the log-sum-exp."""
    gmem, r = row.gmem, row.index
    inverse, cut = gmem.score_inverse[r], (gmem.score_cut_value[r], gmem.score_cut_id[r])
    top, log_sum = merge_blocks(row.maxima, row.places("sums", 0.0), inverse)
    value = gmem.logits[r, jnp.clip(token, 0, vocab_size - 1)]
    logprob = log_probability(value, token, cut, top, log_sum, inverse)
    gmem.logprob[r] = jnp.where(token < vocab_size, logprob, jnp.nan)
    gmem.log_sum_exp[r] = log_sum_exp(top, log_sum, inverse)


def first_at_top(row: Row):
    """The lowest id whose logit is the row's maximum."""
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    last = row.vocabulary.blocks - 1
    block = row.block(jnp.min(jnp.where(row.maxima == row.top, place, last)))
    return jnp.min(jnp.where(block.values == row.top, block.ids, row.vocabulary.size))


def find_block(high, low, bits: wide.Wide):
    """The block that holds the threshold floor(bits * total / 2^64), and what is left inside it.

    high, low: uint32 [PLACES], sums of the limbs of each block's weights, below 2^32 each.
    """
    place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
    carried = high + (low >> U32(wide.LIMB_BITS))
    mask = U32(2**wide.LIMB_BITS - 1)
    digits = carried >> U32(wide.LIMB_BITS), carried & mask, low & mask

    def before(end) -> wide.Wide:
        """The weight of the blocks in front of `end`."""
        within = place < end
        sums = [add_up(jnp.where(within, d, jnp.zeros_like(d))) for d in digits]
        return from_digits(*sums)

    threshold = wide.multiply_high(bits, before(I32(PLACES)))
    index = _halving(PLACES, before, threshold)
    return index, wide.subtract(threshold, before(index))


def find_column(limbs, rest: wide.Wide, index, vocabulary: Vocabulary):
    """The first id of the block whose running sum exceeds `rest`."""
    shape = (vocabulary.block,)
    place = plgpu.broadcasted_iota(I32, shape, 0, layout=vocabulary.layout)
    high, low = limbs
    zero = jnp.zeros_like(high)

    def before(end) -> wide.Wide:
        within = place < end
        high_sum = add_up(jnp.where(within, high, zero))
        low_sum = add_up(jnp.where(within, low, zero))
        carried = high_sum + (low_sum >> U32(wide.LIMB_BITS))
        mask = U32(2**wide.LIMB_BITS - 1)
        return from_digits(carried >> U32(wide.LIMB_BITS), carried & mask, low_sum & mask)

    start = jnp.minimum(index * vocabulary.block, vocabulary.size - vocabulary.block)
    return start + _halving(vocabulary.block, before, rest)


def _halving(count: int, before, threshold: wide.Wide):
    """How many of `count` (a power of two) entries have a running sum up to the threshold.

    The sum of all of them exceeds it.
    """
    steps = count.bit_length() - 1

    def step(i, passed):
        further = passed + (I32(1) << (I32(steps - 1) - i))
        return jnp.where(wide.less_equal(before(further), threshold), further, passed)

    return lax.fori_loop(I32(0), I32(steps), step, I32(0))


def from_digits(top, middle, low) -> wide.Wide:
    """`wide.from_digits` of three scalars, without an array of them."""
    bits = wide.LIMB_BITS
    middle = middle + (low >> U32(bits))
    high = top + (middle >> U32(bits))
    mask = U32(2**bits - 1)
    upper = (high << U32(2 * bits - 32)) | ((middle & mask) >> U32(32 - bits))
    return upper, (middle << U32(bits)) | (low & mask)


@functools.partial(jax.jit, static_argnames=("vocabulary", "vocab_size", "interpret"))
def pick_token(
    arrays: dict[str, jax.Array],
    *,
    vocabulary: Vocabulary,
    vocab_size: int,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, ...]:
    """Block maxima, and perhaps weights and sums, -> (token int32 [R], bad_row int32 [R], ...).

    Args:
      arrays: always logits [R, V], inverse and cut_value float32 [R], cut_id int32 [R], num_rows
        int32 [1], maxima float32 [R, PLACES]; for a draw also bits uint32 [R, 2], and high and
        low uint32 [R, PLACES], the sums of the limbs; for a score also sums float32 [R, PLACES],
        and score_inverse, score_cut_value float32 [R] and score_cut_id int32 [R]; for tokens that
        are not chosen but given also given int32 [R], below 0 where the token is chosen.
      vocabulary: how the row is cut into blocks.
      vocab_size: the real number of columns.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Returns: token and bad_row; for a score also logprob and log_sum_exp float32 [R].

    Invariance: row r depends on the rows r of all arrays only.
    """
    rows = arrays["logits"].shape[0]
    outs = {"token": jnp.int32, "bad": jnp.int32}
    if "sums" in arrays:
        outs |= {"logprob": jnp.float32, "log_sum_exp": jnp.float32}
    kernel = plgpu.kernel(
        functools.partial(
            _body, names=(*arrays, *outs), vocabulary=vocabulary, vocab_size=vocab_size
        ),
        out_type=tuple(jax.ShapeDtypeStruct((rows,), dtype) for dtype in outs.values()),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=blocks.compiler_params(),
        kernel_name="choose_token",
        interpret=blocks.interpret_params(interpret),
    )
    return tuple(kernel(*arrays.values()))
