"""From block sums to a token on Hopper: find the block, then the column inside it.

The block and, within 128 columns, the column are counted from running sums that are made in shared
memory; the 128 columns within the block are found by halving. Where the row's sums of exponentials
are there too, the same CTA scores the token, with the functions of `log_softmax.kernel_hopper`.
Grid: one CTA a row.
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
from .threefry import threefry2x32

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

    def first_column(self, index):
        size = self.vocabulary.block
        return jnp.minimum(index * size, self.vocabulary.size - size)

    def block(self, index) -> Block:
        values = blocks.load_values(self.gmem.logits, self.index, index, self.vocabulary)
        return blocks.as_block(values, index, self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a draw needs of its row, loaded while the maximum is found."""

    high: jax.Array
    low: jax.Array
    key: tuple[jax.Array, jax.Array]
    cut: tuple[jax.Array, jax.Array]

    @classmethod
    def load(cls, gmem, r, vocabulary: Vocabulary) -> "Draw":
        high, low = (
            blocks.load_places(ref, r, U32(0), vocabulary) for ref in (gmem.high, gmem.low)
        )
        key = gmem.key_words[r, 0], gmem.key_words[r, 1]
        return cls(high, low, key, (gmem.cut_value[r], gmem.cut_id[r]))


def _body(*refs, names: tuple[str, ...], vocabulary: Vocabulary, vocab_size: int):
    *refs, sums, limbs = refs
    gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    index = lax.axis_index("row")

    @pl.when(index < gmem.num_rows[0])
    def _choose():
        maxima = blocks.load_places(gmem.maxima, index, -jnp.inf, vocabulary)
        inverse = gmem.inverse[index]
        draw = Draw.load(gmem, index, vocabulary) if hasattr(gmem, "high") else None
        row = Row(index, gmem, maxima, blocks.row_top(maxima), vocabulary)
        # Comparisons are false for a NaN.
        good = (row.top < jnp.inf) & (row.top > -jnp.inf)

        def greedy():
            return first_at_top(row)

        def choose():
            if draw is None:
                return greedy()
            return lax.cond(inverse > 0.0, lambda: drawn(row, draw, inverse, sums, limbs), greedy)

        token = lax.cond(good, choose, lambda: I32(0))
        if hasattr(gmem, "given"):
            given = gmem.given[index]
            token = jnp.where(given >= 0, given, token)
        gmem.token[index] = token
        gmem.bad[index] = jnp.where(good, 0, 1).astype(I32)
        if hasattr(gmem, "sums"):
            score(token, row, vocab_size)


def drawn(row: Row, draw: Draw, inverse, sums, limbs):
    """The token that the row's key chooses; `sums` and `limbs` are shared memory to work in."""
    bits = threefry2x32(*draw.key, U32(0), U32(0))
    index, rest = find_block(draw.high, draw.low, bits, sums)
    values = limbs_of(row.block(index), row.top, inverse, *draw.cut, row.vocabulary)
    for limb, value in enumerate(values):
        limbs[limb] = value
    return row.first_column(index) + find_column(values, rest, row.vocabulary, sums, limbs)


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


def find_block(high, low, bits: wide.Wide, sums):
    """The block that holds the threshold floor(bits * total / 2^64), and what is left inside it.

    high, low: uint32 [PLACES], sums of the limbs of each block's weights, below 2^32 each; `sums`
    as `running_sums` wants it.
    """
    upto = running_sums(high, low, sums)
    threshold = wide.multiply_high(bits, sum_before(I32(PLACES), sums))
    index = passed(upto, threshold)
    return index, wide.subtract(threshold, sum_before(index, sums))


def find_column(values, rest: wide.Wide, vocabulary: Vocabulary, sums, limbs):
    """The first column of the block whose running sum exceeds `rest`: its strip, then its lane.

    values: uint32 [block], the limbs of the block's weights, which also stand in `limbs`. A strip
    is PLACES columns.
    """
    place = plgpu.broadcasted_iota(I32, (vocabulary.block,), 0, layout=vocabulary.layout)
    zero = jnp.zeros_like(values[0])

    def before(strip) -> wide.Wide:
        within = place < strip * PLACES
        return weight_of(*(add_up(jnp.where(within, limb, zero)) for limb in values))

    strip = _halving(vocabulary.block // PLACES, before, rest)
    rest = wide.subtract(rest, before(strip))
    plgpu.commit_smem()
    columns = pl.ds(strip * PLACES, PLACES)
    upto = running_sums(*(_load_places(limbs.at[n, columns]) for n in range(2)), sums)
    return strip * PLACES + passed(upto, rest)


def _halving(count: int, before, threshold: wide.Wide):
    """How many of `count` (a power of two) entries have a running sum up to the threshold.

    The sum of all of them exceeds it.
    """
    steps = count.bit_length() - 1

    def step(i, passed):
        further = passed + (I32(1) << (I32(steps - 1) - i))
        return jnp.where(wide.less_equal(before(further), threshold), further, passed)

    return lax.fori_loop(I32(0), I32(steps), step, I32(0))


def weight_of(high, low) -> wide.Wide:
    """high * 2^20 + low, uint32 each, high below 2^32 - 2^12."""
    carried = high + (low >> U32(wide.LIMB_BITS))
    low = low & U32(2**wide.LIMB_BITS - 1)
    return carried >> U32(32 - wide.LIMB_BITS), (carried << U32(wide.LIMB_BITS)) | low


def running_sums(high, low, sums) -> wide.Wide:
    """`running_weights` of sums of limbs, uint32 [PLACES] each."""
    return running_weights(weight_of(high, low), sums)


def running_weights(value: wide.Wide, sums) -> wide.Wide:
    """Of the weights at places 0 to n, for every n; uint32 [PLACES] each.

    Each of seven steps adds what stands 1, 2, 4, ... places before, which costs a fraction of a sum
    over the warpgroup. `sums` (shared memory, uint32 [2, 2, 2 * PLACES]) holds zeros in front of
    place 0; its second half holds the running sums afterwards.
    """
    plgpu.commit_smem()  # whoever still reads the sums before
    for buffer in range(2):
        for word in range(2):
            sums[buffer, word, pl.ds(0, PLACES)] = jnp.zeros_like(value[0])
    steps = PLACES.bit_length() - 1
    for step in range(steps + 1):
        here = sums.at[(step + steps + 1) % 2]  # the last step stores into the second half
        for word in range(2):
            here[word, pl.ds(PLACES, PLACES)] = value[word]
        plgpu.commit_smem()
        if step < steps:
            start = PLACES - (1 << step)
            value = add_arrays(
                value, [_load_places(here.at[w, pl.ds(start, PLACES)]) for w in range(2)]
            )
    return value


def _load_places(ref):
    return plgpu.load(ref, layout=PLACE_LAYOUT, optimized=False)


def add_arrays(a, b) -> wide.Wide:
    """`wide.add` without a conversion from bool."""
    low = a[1] + b[1]
    one, zero = jnp.full_like(low, 1), jnp.zeros_like(low)
    return a[0] + b[0] + jnp.where(low < b[1], one, zero), low


def sum_before(place, sums) -> wide.Wide:
    """The sum of the weights in front of a place, after `running_sums`."""
    at = place + (PLACES - 1)
    return sums[1, 0, at], sums[1, 1, at]


def passed(upto: wide.Wide, threshold: wide.Wide):
    """How many running sums do not exceed the threshold."""
    zero = jnp.zeros_like(upto[0]).astype(jnp.int32)
    equal = (upto[0] == threshold[0]) & (upto[1] <= threshold[1])
    return jnp.sum(jnp.where((upto[0] < threshold[0]) | equal, zero + 1, zero))


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
        int32 [1], maxima float32 [R, PLACES]; for a draw also key_words uint32 [R, 2], and high and
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
        scratch_types=[
            plgpu.SMEM((2, 2, 2 * PLACES), U32),
            plgpu.SMEM((2, vocabulary.block), U32),
        ],
        compiler_params=blocks.compiler_params(unsafe_no_auto_barriers=True),
        kernel_name="choose_token",
        interpret=blocks.interpret_params(interpret),
    )
    return tuple(kernel(*arrays.values()))
