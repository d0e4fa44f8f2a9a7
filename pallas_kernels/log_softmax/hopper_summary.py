"""One pass over the logits on Hopper: each vocabulary block's maximum and sum of exponentials.

    m[b] = max of the kept x in block b          s[b] = sum of exp((x - m[b]) * inv_temperature)

Order of additions of s[b], from the block size alone: thread t of the warpgroup holds columns
t + 128 i of the block; it adds those whose i are equal modulo 8 in ascending order, then the (up
to) eight sums in ascending order; then the 32 threads of a warp are added by butterflies over
distances 1, 2, 4, 8, 16, and the four warps by one balanced tree. Columns that are not kept and
columns in front of the last block add exact zeros. m[b] is exact.

A block is made by one CTA from its own columns, so that neither the row count nor the schedule
can reach its bits. Grid: (segment of `blocks_a_cta` blocks, row).
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import hopper_blocks as blocks
from .hopper_blocks import Block, Vocabulary
from .schedule import Schedule


def _body(*refs, vocabulary: Vocabulary, schedule: Schedule, with_sums: bool):
    logits_gmem, inverse_gmem, cut_value_gmem, cut_id_gmem, num_rows_gmem = refs[:5]
    maxima_gmem, *sums_gmem = refs[5:]
    segment, row = lax.axis_index("segment"), lax.axis_index("row")

    @pl.when(row < num_rows_gmem[0])
    def _summarise():
        inverse = inverse_gmem[row]
        cut = cut_value_gmem[row], cut_id_gmem[row]

        def visit(block: Block):
            x = blocks.kept_logits(block, *cut, vocabulary)
            top = jnp.max(x)
            maxima_gmem[row, block.index] = top
            if with_sums:
                sums_gmem[0][row, block.index] = sum_of_exponentials(x, top, inverse)

        blocks.walk_blocks(
            logits_gmem, row, segment, schedule.blocks_a_cta, vocabulary, lambda: visit
        )


def sum_of_exponentials(x, top, inverse):
    """The sum of exp((x - top) * inverse) of one block."""
    # A block of nothing but -inf has no maximum to subtract; its terms are exp(-inf) = 0.
    origin = jnp.where(top == -jnp.inf, 0.0, top)
    terms = blocks.exponential(lax.optimization_barrier((x - origin) * inverse))
    # Barriers keep products out of the sums, where they could become multiply-adds.
    return jnp.sum(lax.optimization_barrier(terms))


@functools.partial(jax.jit, static_argnames=("vocabulary", "schedule", "with_sums", "interpret"))
def block_summary(
    logits: jax.Array,
    inv_temperature: jax.Array,
    cut_value: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    vocabulary: Vocabulary,
    schedule: Schedule,
    with_sums: bool = True,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, ...]:
    """logits [R, V] -> maxima float32 [R, PLACES], and the sums likewise unless `with_sums` is off.

    Args:
      logits: float32, V = vocabulary.size.
      inv_temperature, cut_value: float32 [R]; cut_id: int32 [R].
      num_rows: int32 [1], rows that hold data.
      vocabulary: how the row is cut into blocks.
      schedule: who walks which blocks.
      with_sums: whether the sums are made too.
      interpret: run the kernel in Mosaic GPU's interpreter on a CPU.

    Places without a block, and rows from num_rows on, hold anything.

    Invariance: row r depends on logits[r], its temperature, its cut and the vocabulary only.
    """
    rows = logits.shape[0]
    segments = -(-vocabulary.blocks // schedule.blocks_a_cta)
    out = jax.ShapeDtypeStruct((rows, blocks.PLACES), jnp.float32)
    return plgpu.kernel(
        functools.partial(_body, vocabulary=vocabulary, schedule=schedule, with_sums=with_sums),
        out_type=(out,) * (2 if with_sums else 1),
        grid=(segments, rows),
        grid_names=("segment", "row"),
        compiler_params=blocks.compiler_params(),
        kernel_name="vocabulary_summary",
        interpret=blocks.interpret_params(interpret),
    )(logits, inv_temperature, cut_value, cut_id, num_rows)
