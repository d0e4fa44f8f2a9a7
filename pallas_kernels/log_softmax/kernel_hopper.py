"""Log-probabilities on Hopper: one pass over the logits, then one small kernel that merges.

    l = sum over b of s[b] * exp((m[b] - max) * inv_temperature)
    logprob[t] = (x[t] - max) * inv_temperature - log(l)
    log_sum_exp = max * inv_temperature + log(l)

Every operation is rounded on its own. A barrier alone does not keep a product out of a sum: it is
gone before the last compiler contracts the two to a multiply-add, in one kernel and not in another.
So products of known sign pass a minimum or maximum on their way. Order of additions: of
s[b] as `hopper_summary` states; of l, block b in thread b of one warpgroup (places without a block
hold zero), the 32 threads of a warp by butterflies over distances 1, 2, 4, 8, 16, then the four
warps by one balanced tree. Both follow V alone. Grid of the merge: one CTA a row.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from . import hopper_blocks as blocks
from .hopper_blocks import I32, PLACE_LAYOUT, PLACES, Vocabulary
from .hopper_summary import block_summary
from .schedule import Schedule, schedule_for
from .topology import LogSoftmaxTopology

MAX_TARGETS = PLACES  # one a thread


def _body(*refs, vocabulary: Vocabulary, vocab_size: int, targets: int):
    logits_gmem, target_gmem, inverse_gmem, cut_value_gmem, cut_id_gmem, num_rows_gmem = refs[:6]
    maxima_gmem, sums_gmem, logprob_gmem, lse_gmem = refs[6:]
    row = lax.axis_index("row")

    def gather_targets():
        """(logit, id, whether the id is in the vocabulary) of target n in thread n."""
        place = plgpu.broadcasted_iota(I32, (PLACES,), 0, layout=PLACE_LAYOUT)
        value = jnp.zeros_like(place).astype(jnp.float32)
        ids = jnp.zeros_like(place)
        for n in range(targets):
            token = target_gmem[row, n]
            logit = logits_gmem[row, jnp.clip(token, 0, vocab_size - 1)]
            value = jnp.where(place == n, logit, value)
            ids = jnp.where(place == n, token, ids)
        return value, ids, (ids >= 0) & (ids < vocab_size)

    @pl.when(row < num_rows_gmem[0])
    def _merge():
        inverse = inverse_gmem[row]
        cut = cut_value_gmem[row], cut_id_gmem[row]
        maxima = blocks.load_places(maxima_gmem, row, -jnp.inf, vocabulary)
        sums = blocks.load_places(sums_gmem, row, 0.0, vocabulary)
        top, log_sum = merge_blocks(maxima, sums, inverse)
        value, ids, inside = gather_targets()
        logprob = log_probability(value, ids, cut, top, log_sum, inverse)
        logprob_gmem[row] = jnp.where(inside, logprob, jnp.nan)
        lse_gmem[row] = log_sum_exp(top, log_sum, inverse)


def merge_blocks(maxima, sums, inverse):
    """A row's maximum and log(l), scalars; NaN if nothing but -inf, or a NaN or +inf, is there."""
    top = blocks.row_top(maxima)
    factors = blocks.exponential(lax.optimization_barrier((maxima - top) * inverse))
    length = jnp.sum(jnp.maximum(sums * factors, 0.0))
    return top, jnp.log(length)


def log_probability(value, ids, cut, top, log_sum, inverse):
    """Of tokens in the vocabulary, given their logits; -inf behind the cut (value, id)."""
    logprob = jnp.minimum((value - top) * inverse, 0.0) - log_sum
    behind = blocks.is_dropped(value, ids, *cut) & (log_sum == log_sum)
    return jnp.where(behind, -jnp.inf, logprob)


def log_sum_exp(top, log_sum, inverse):
    """Of the kept and scaled logits."""
    return lax.optimization_barrier(top * inverse) + log_sum


@functools.partial(jax.jit, static_argnames=("vocabulary", "vocab_size", "interpret"))
def merge_and_score(
    logits: jax.Array,
    target: jax.Array,
    inv_temperature: jax.Array,
    cut_value: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    maxima: jax.Array,
    sums: jax.Array,
    *,
    vocabulary: Vocabulary,
    vocab_size: int,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """target [R, N] and the block summary [R, PLACES] -> (logprob [R, N], log_sum_exp [R]).

    Args: as of `hopper_summary.block_summary`, and vocab_size, the real number of columns.

    Invariance: row r depends on the rows r of all arrays only.
    """
    rows, targets = target.shape
    logprob, lse = plgpu.kernel(
        functools.partial(_body, vocabulary=vocabulary, vocab_size=vocab_size, targets=targets),
        out_type=(
            jax.ShapeDtypeStruct((rows, PLACES), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=blocks.compiler_params(),
        kernel_name="target_logprobs",
        interpret=blocks.interpret_params(interpret),
    )(logits, target, inv_temperature, cut_value, cut_id, num_rows, maxima, sums)
    return logprob[:, :targets], lse


def target_logprobs_hopper(
    logits: jax.Array,
    target: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: LogSoftmaxTopology,
    schedule: Schedule | None = None,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [R, V], target int32 [R, N] -> see `api.target_logprobs`.

    Args:
      num_rows: int32 [], rows that hold data; the others cost nothing.
      topology: its block is used; `lanes` is the references', the order is stated above.
      schedule: who walks which blocks; None: by the table.
      interpret: run the kernels in Mosaic GPU's interpreter on a CPU.

    Raises:
      NotImplementedError: more columns, rows or targets than the kernels hold.

    Invariance: as `api.target_logprobs`; the schedule cannot change a bit.
    """
    rows, vocab_size = logits.shape
    if not 1 <= target.shape[1] <= MAX_TARGETS:
        raise NotImplementedError(
            f"target_logprobs on Hopper takes 1 to {MAX_TARGETS} targets a row, "
            f"got {target.shape[1]}"
        )
    logits, vocabulary = blocks.vocabulary_of("target_logprobs", logits, topology.block)
    operands = inv_temperature, blocks.cut_values(cut_key), cut_id, num_rows.reshape(1)
    summary = block_summary(
        logits,
        *operands,
        vocabulary=vocabulary,
        schedule=schedule or schedule_for(rows=rows, blocks=vocabulary.blocks),
        interpret=interpret,
    )
    return merge_and_score(
        logits,
        target,
        *operands,
        *summary,
        vocabulary=vocabulary,
        vocab_size=vocab_size,
        interpret=interpret,
    )


def target_logprobs_hopper_op(
    logits: jax.Array,
    target: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: LogSoftmaxTopology,
) -> tuple[jax.Array, jax.Array]:
    """`target_logprobs_hopper` as an implementation of the primitive, schedule by the table."""
    return target_logprobs_hopper(
        logits, target, inv_temperature, cut_key, cut_id, num_rows, topology=topology
    )
