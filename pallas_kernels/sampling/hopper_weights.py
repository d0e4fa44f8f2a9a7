"""Integer weights on Hopper: the second pass over the logits, for rows that are drawn.

    w[v] = floor(exp((x[v] - max) * inv_temperature) * 2^40)      two limbs of 20 bits

Sums are of integers, exact in any order. This pass and the walk inside one block take the same
exponential of the same numbers. Grid: (segment of blocks, row), the last ones first: what the pass
before read last is still in the L2 cache.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import Block, Vocabulary
from ..log_softmax.schedule import Schedule
from .wide import LIMB_BITS

_LIMB = float(2**LIMB_BITS)
_SHIFT = float(2**23)  # floats from here on have no fraction
_SHIFT_BITS = 0x4B000000  # of _SHIFT; the integer stands in the bits below
_MIDDLE = 1.5 * 2**23  # as _SHIFT, for integers of both signs
_MIDDLE_BITS = 0x4B400000


def limbs_of(block: Block, top, inverse, cut_value, cut_id, vocabulary: Vocabulary):
    """The two limbs of the weights of one block, uint32 [block] each."""
    return limb_values(likelihoods(block, top, inverse, cut_value, cut_id, vocabulary))


def likelihoods(block: Block, top, inverse, cut_value, cut_id, vocabulary: Vocabulary):
    """exp of the scaled gaps of one block, 0 for columns that are not kept; float32 [block]."""
    x = blocks.kept_logits(block, cut_value, cut_id, vocabulary)
    gap = lax.optimization_barrier((x - top) * inverse)
    return lax.optimization_barrier(blocks.exponential(gap))


def limb_sums(likelihood):
    """Sums of the weights of float32 [n], n up to 2048, as two limbs: high below 2^32, low 2^20."""
    nearest, near, above = _signed_parts(likelihood)
    count = likelihood.shape[0]
    high = _sum_modulo(nearest, count * _SHIFT_BITS)
    low = _sum_modulo(near - above, count * _MIDDLE_BITS)
    carried = high + (low >> jnp.int32(LIMB_BITS))  # the shift keeps the sign
    return carried.astype(jnp.uint32), (low & jnp.int32(2**LIMB_BITS - 1)).astype(jnp.uint32)


def signed_limbs(likelihood):
    """Two limbs of each weight, int32 alike; the low one has a sign."""
    nearest, near, above = _signed_parts(likelihood)
    return nearest - _SHIFT_BITS, near - above - _MIDDLE_BITS


def _signed_parts(likelihood):
    """Both signed limbs with what their shifts add, and what to take off the low one.

    The limbs of one weight here have signs, which saves a third of the instructions: the high one
    is rounded to nearest, and the low one is what that left, rounded down. Together they are the
    same integer, so the sum is that of `limb_values`.
    """
    likelihood = jnp.minimum(likelihood, 1.0)
    scaled = likelihood * _LIMB
    nearest = lax.optimization_barrier(scaled + _SHIFT)
    rest = (scaled - (nearest - _SHIFT)) * _LIMB  # exact, at most 2^19 on either side
    near = lax.optimization_barrier(rest + _MIDDLE)
    above = (near - _MIDDLE > rest).astype(jnp.int32)
    bits = (lax.bitcast_convert_type(part, jnp.int32) for part in (nearest, near))
    return *bits, above


def _sum_modulo(values, surplus: int):
    """The sum of int32 [n] less a surplus, modulo 2^32."""
    wrapped = (surplus + 2**31) % 2**32 - 2**31
    return jnp.sum(values, dtype=jnp.int32) - jnp.int32(wrapped)


def limb_values(likelihood):
    """The two limbs of floor(min(likelihood, 1) * 2^40)."""
    likelihood = jnp.minimum(likelihood, 1.0)
    # Powers of two, differences of close numbers: everything from here on is exact.
    scaled = likelihood * _LIMB
    whole = _floor(scaled)
    return _as_integer(whole), _as_integer(_floor((scaled - whole) * _LIMB))


def _floor(x):
    """floor of float32 in [0, 2^20], without the slow conversions."""
    nearest = lax.optimization_barrier(x + _SHIFT) - _SHIFT
    return jnp.where(nearest > x, nearest - 1.0, nearest)


def _as_integer(x):
    """uint32 of a whole float32 in [0, 2^20]."""
    bits = lax.bitcast_convert_type(lax.optimization_barrier(x + _SHIFT), jnp.int32)
    return (bits - _SHIFT_BITS).astype(jnp.uint32)


def add_up(limb):
    """The sum of uint32 [n], modulo 2^32."""
    return jnp.sum(limb, dtype=jnp.uint32)


def _body(*refs, rows: int, vocabulary: Vocabulary, schedule: Schedule):
    logits_gmem, inverse_gmem, cut_value_gmem, cut_id_gmem, num_rows_gmem, maxima_gmem = refs[:6]
    high_gmem, low_gmem = refs[6:]
    segments = -(-vocabulary.blocks // schedule.blocks_a_cta)
    segment = segments - 1 - lax.axis_index("segment")
    row = rows - 1 - lax.axis_index("row")
    inverse = inverse_gmem[row]

    @pl.when((row < num_rows_gmem[0]) & (inverse > 0.0))
    def _weigh():
        def visitor():
            cut = cut_value_gmem[row], cut_id_gmem[row]
            top = blocks.row_top(blocks.load_places(maxima_gmem, row, -jnp.inf, vocabulary))

            def visit(block: Block):
                high, low = limb_sums(likelihoods(block, top, inverse, *cut, vocabulary))
                high_gmem[row, block.index] = high
                low_gmem[row, block.index] = low

            return visit

        blocks.walk_blocks(logits_gmem, row, segment, schedule.blocks_a_cta, vocabulary, visitor)


@functools.partial(jax.jit, static_argnames=("vocabulary", "schedule", "interpret"))
def block_weights(
    logits: jax.Array,
    inv_temperature: jax.Array,
    cut_value: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    maxima: jax.Array,
    *,
    vocabulary: Vocabulary,
    schedule: Schedule,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """logits [R, V], maxima [R, PLACES] -> sums of the high and of the low limbs, uint32 alike.

    Args: as of `hopper_summary.block_summary`. Rows with inv_temperature 0 are greedy and left out.

    Invariance: row r depends on the rows r of all arrays only.
    """
    rows = logits.shape[0]
    segments = -(-vocabulary.blocks // schedule.blocks_a_cta)
    out = jax.ShapeDtypeStruct((rows, blocks.PLACES), jnp.uint32)
    high, low = plgpu.kernel(
        functools.partial(_body, rows=rows, vocabulary=vocabulary, schedule=schedule),
        out_type=(out, out),
        grid=(segments, rows),
        grid_names=("segment", "row"),
        # exp2's fast form differs below 2^-126 only, where the weight is 0 either way; and nothing
        # that one thread writes is read by another.
        compiler_params=blocks.compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="token_weights",
        interpret=blocks.interpret_params(interpret),
    )(logits, inv_temperature, cut_value, cut_id, num_rows, maxima)
    return high, low
