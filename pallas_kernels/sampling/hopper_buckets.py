"""Where the weight of a row lies, by bucket of the logit: one pass, for rows that top-p alone cuts.

    bucket[v] = round((max - x[v]) * inv_temperature * 4 / ln 2), at most 127
    weight[b] = sum of w[v] in bucket b, the last one's with all that top-p cannot reach

w are the integer weights of `hopper_weights`; a bucket is a quarter of an octave. Every warp adds
to sums of its own in shared memory; they are integers, exact in any order. Grid: (segment of
blocks, row), the last ones first as in `hopper_weights`.
"""

import functools
import types

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import I32, LOG2_E, PLACE_LAYOUT, PLACES, Block, Vocabulary
from ..log_softmax.schedule import Schedule
from .hopper_groups import Filters
from .hopper_scatter import WARPS, add_at
from .hopper_walk import add_arrays
from .hopper_weights import signed_limbs
from .wide import LIMB_BITS

U32 = jnp.uint32
BUCKETS = PLACES
MOST_BLOCKS = 7  # a CTA: 512 weights of a block a warp, 3584 high limbs of 2^20 fit 32 bits
_SHIFT = float(2**23)
_SHIFT_BITS = 0x4B000000


def bucket_of(gap, light=BUCKETS - 1):
    """int32 bucket of float32 scaled gaps, 0 for the maximum; never falls as the gap falls.

    light: float32, a whole number; buckets from there on are the last one.
    """
    # The choice stands between the product and the sum, which must not become one operation.
    place = gap * (-4.0 * LOG2_E)
    place = jnp.where(place < light - 0.5, place, float(BUCKETS - 1))
    nearest = lax.optimization_barrier(place + _SHIFT)
    return lax.bitcast_convert_type(nearest, I32) - _SHIFT_BITS


def first_light(top_p, vocab_size: int):
    """A bucket from which on all weights together are less than what top-p leaves out.

    The largest weight of a row is 2^40; from there on each is below 2^40 (1 - p) / V.
    """
    left_out = U32(0) - top_p  # (1 - p) * 2^32
    octaves = (vocab_size - 1).bit_length() + lax.clz(left_out).astype(I32) + 1
    return jnp.minimum(4 * octaves + 1, BUCKETS - 1).astype(jnp.float32)


def _body(*refs, names, vocabulary: Vocabulary, schedule: Schedule, vocab_size: int, interpret):
    *refs, table = refs
    gmem = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
    rows = gmem.logits.shape[0]
    segments = -(-vocabulary.blocks // schedule.blocks_a_cta)
    segment = segments - 1 - lax.axis_index("segment")
    row = rows - 1 - lax.axis_index("row")
    filters = Filters.load(gmem, row, vocab_size)

    @pl.when((row < gmem.num_rows[0]) & filters.weight_alone)
    def _weigh():
        zero = plgpu.layout_cast(jnp.zeros((PLACES,), I32), PLACE_LAYOUT)
        for warp in range(WARPS):
            for limb in range(2):
                table[warp, limb] = zero

        def visitor():
            top = blocks.row_top(blocks.load_places(gmem.maxima, row, -jnp.inf, vocabulary))
            light = first_light(filters.top_p, vocab_size)
            plgpu.commit_smem()

            def visit(block: Block):
                x = block.values
                if block.foreign is not None:
                    x = blocks.kept_logits(block, -jnp.inf, vocab_size, vocabulary)
                gap = lax.optimization_barrier((x - top) * filters.inverse)
                limbs = signed_limbs(lax.optimization_barrier(blocks.exponential(gap)))
                # The cut is in front of the light ones: one bucket will do.
                add_at(table, bucket_of(gap, light), limbs, interpret)

            return visit

        walk = segment, schedule.blocks_a_cta, vocabulary
        blocks.walk_blocks(gmem.logits, row, *walk, visitor)
        plgpu.commit_smem()
        weight = U32(0), U32(0)
        for warp in range(WARPS):
            high, low = (
                plgpu.load(table.at[warp, limb], layout=PLACE_LAYOUT, optimized=False)
                for limb in range(2)
            )
            carried = (high + (low >> I32(LIMB_BITS))).astype(U32)  # the shift keeps the sign
            low = (low & I32(2**LIMB_BITS - 1)).astype(U32)
            more = carried >> U32(32 - LIMB_BITS), (carried << U32(LIMB_BITS)) | low
            weight = more if warp == 0 else add_arrays(weight, more)
        for word in range(2):
            gmem.buckets[row, segment, word] = weight[word]


@functools.partial(jax.jit, static_argnames=("vocabulary", "vocab_size", "schedule", "interpret"))
def bucket_weights(
    arrays: dict[str, jax.Array],
    *,
    vocabulary: Vocabulary,
    vocab_size: int,
    schedule: Schedule,
    interpret: blocks.Interpret = False,
) -> jax.Array:
    """logits [R, V] -> weights of buckets uint32 [R, segments, 2, BUCKETS], high words first.

    Args:
      arrays: logits, num_rows int32 [1], the FILTERS [R], maxima float32 [R, PLACES].
      schedule: up to MOST_BLOCKS a CTA.

    Invariance: row r depends on the rows r of all arrays only; the segments' sum on no schedule.
    """
    assert schedule.blocks_a_cta <= MOST_BLOCKS
    rows = arrays["logits"].shape[0]
    segments = -(-vocabulary.blocks // schedule.blocks_a_cta)
    return plgpu.kernel(
        functools.partial(
            _body,
            names=(*arrays, "buckets"),
            vocabulary=vocabulary,
            schedule=schedule,
            vocab_size=vocab_size,
            interpret=bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct((rows, segments, 2, BUCKETS), U32),
        grid=(segments, rows),
        grid_names=("segment", "row"),
        scratch_types=[plgpu.SMEM((WARPS, 2, BUCKETS), I32)],
        compiler_params=blocks.compiler_params(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="bucket_weights",
        interpret=blocks.interpret_params(interpret),
    )(*arrays.values())
