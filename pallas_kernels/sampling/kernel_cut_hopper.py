"""Cuts and largest logits on Hopper: about one pass over the logits, two for top-p alone.

1. Maxima of groups of logits (`hopper_groups`).
2. For rows that only top-p cuts, the weight by bucket of the logit (`hopper_buckets`).
3. The cut, or the largest in order (`hopper_cut`), from the few blocks that can hold it.

Weights are those of the draw (`hopper_weights`); comparisons and integer sums are exact, so that
no order and no schedule can reach the result.
"""

import jax

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.schedule import Schedule, schedule_for
from .hopper_buckets import MOST_BLOCKS, bucket_weights
from .hopper_cut import MOST_ORDERED, cut_rows
from .hopper_groups import FILTERS, group_maxima
from .topology import SamplingTopology, topology_for


def find_cut_hopper(
    logits: jax.Array,
    inv_temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    log_min_p: jax.Array,
    num_rows: jax.Array,
    *,
    topology: SamplingTopology,
    schedule: Schedule | None = None,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [R, V] -> (cut_key int32 [R], cut_id int32 [R]); see `api.find_cut`.

    Args:
      num_rows: int32 [], rows that hold data; they and rows that nothing cuts cost nothing.
      topology: the definition of the cut.
      schedule: who walks which blocks; None: by the table.
      interpret: run the kernels in Mosaic GPU's interpreter on a CPU.

    A bad row (see `choose_token`) keeps everything.

    Raises:
      NotImplementedError: more columns or rows than the kernels hold.

    Invariance: as `api.find_cut`; the schedule cannot change a bit.
    """
    rows, vocab = logits.shape
    logits, vocabulary = blocks.vocabulary_of("find_cut", logits, topology.block)
    schedule = schedule or schedule_for(rows=rows, blocks=vocabulary.blocks)
    filters = (inv_temperature, top_k, top_p, log_min_p)
    arrays = dict(zip(FILTERS, filters, strict=True))
    arrays = {"logits": logits, "num_rows": num_rows.reshape(1), **arrays}
    options = dict(vocabulary=vocabulary, vocab_size=vocab, interpret=interpret)
    maxima, groups = group_maxima(arrays, schedule=schedule, **options)
    arrays["maxima"] = maxima
    # The last kernel adds up what the segments found: not many more than 16 of them.
    weighing = Schedule(
        blocks_a_cta=min(max(schedule.blocks_a_cta, -(-vocabulary.blocks // 16)), MOST_BLOCKS)
    )
    buckets = bucket_weights(arrays, schedule=weighing, **options)
    cut_key, cut_id = cut_rows(arrays | {"groups": groups, "buckets": buckets}, **options)
    return cut_key, cut_id


def top_tokens_hopper(
    logits: jax.Array,
    num_rows: jax.Array,
    *,
    count: int,
    schedule: Schedule | None = None,
    topology: SamplingTopology | None = None,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array]:
    """logits float32 [R, V] -> the ids of the `count` largest, int32 [R, count].

    Args: as of `find_cut_hopper`; topology says how wide a block is, which changes no bit here.

    Raises:
      NotImplementedError: count above MOST_ORDERED, or as `find_cut_hopper`.

    Invariance: as `api.top_tokens`; the schedule cannot change a bit.
    """
    if count > MOST_ORDERED:
        raise NotImplementedError(
            f"top_tokens on Hopper orders up to {MOST_ORDERED} tokens, got {count}"
        )
    rows, vocab = logits.shape
    topology = topology or topology_for(vocab_size=vocab)
    logits, vocabulary = blocks.vocabulary_of("top_tokens", logits, topology.block)
    schedule = schedule or schedule_for(rows=rows, blocks=vocabulary.blocks)
    arrays = {"logits": logits, "num_rows": num_rows.reshape(1)}
    options = dict(vocabulary=vocabulary, vocab_size=vocab, interpret=interpret)
    maxima, groups = group_maxima(arrays, schedule=schedule, **options)
    return (cut_rows(arrays | {"maxima": maxima, "groups": groups}, k=count, **options)[0],)


def find_cut_hopper_op(
    logits: jax.Array, *arrays: jax.Array, topology: SamplingTopology
) -> tuple[jax.Array, jax.Array]:
    """`find_cut_hopper` as an implementation of the primitive, schedule by the table."""
    return find_cut_hopper(logits, *arrays, topology=topology)


def top_tokens_hopper_op(logits: jax.Array, num_rows: jax.Array, *, count: int) -> tuple[jax.Array]:
    """`top_tokens_hopper` as an implementation of the primitive, schedule by the table."""
    return top_tokens_hopper(logits, num_rows, count=count)
