"""Token choice on Hopper: greedy in one pass over the logits, drawn in two.

1. Block maxima (`log_softmax.hopper_summary`); with sums of exponentials too where the
   log-probability of the chosen token is asked for in the same step.
2. For drawn rows, block sums of integer weights (`hopper_weights`), relative to the row's maximum.
3. The token (`hopper_walk`): the lowest id at the maximum, or the walk over integer sums; and its
   log-probability, if asked for.

Maxima and integer sums are exact, so that the token of a row does not depend on any order. The
log-probability's order is that of `log_softmax.kernel_hopper`, whose functions it calls; it has the
bits of `target_logprobs`, since every operation between the sums is rounded on its own.
"""

import jax
import jax.numpy as jnp

from ..log_softmax import hopper_blocks as blocks
from ..log_softmax.hopper_blocks import Vocabulary
from ..log_softmax.hopper_summary import block_summary
from ..log_softmax.schedule import Schedule, schedule_for
from .hopper_walk import pick_token
from .hopper_weights import block_weights
from .topology import SamplingTopology


def choose_token_hopper(
    logits: jax.Array,
    key_words: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: SamplingTopology,
    schedule: Schedule | None = None,
    sampled: bool = True,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array]:
    """logits float32 [R, V] -> (token int32 [R], bad_row bool [R]); see `api.choose_token`.

    Args:
      num_rows: int32 [], rows that hold data; the others cost nothing.
      topology: the definition of the draw.
      schedule: who walks which blocks; None: by the table.
      sampled: static; False leaves the draw out of the program, for steps of greedy rows only.
      interpret: run the kernels in Mosaic GPU's interpreter on a CPU.

    Raises:
      NotImplementedError: more columns or rows than the kernels hold.

    Invariance: as `api.choose_token`; the schedule cannot change a bit.
    """
    rows, vocab = logits.shape
    logits, vocabulary = blocks.vocabulary_of("choose_token", logits, topology.block)
    schedule = schedule or schedule_for(rows=rows, blocks=vocabulary.blocks)
    everything = jnp.full((rows,), -jnp.inf), jnp.full((rows,), vocab, jnp.int32)
    (maxima,) = block_summary(
        logits,
        inv_temperature,
        *everything,
        num_rows.reshape(1),
        vocabulary=vocabulary,
        schedule=schedule,
        with_sums=False,
        interpret=interpret,
    )
    arrays = _choice_arrays(logits, inv_temperature, cut_key, cut_id, num_rows, maxima)
    if sampled:
        arrays |= _weight_arrays(arrays, key_words, vocabulary, schedule, interpret)
    token, bad = pick_token(arrays, vocabulary=vocabulary, vocab_size=vocab, interpret=interpret)
    return token, bad != 0


def _choice_arrays(
    logits: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    maxima: jax.Array,
) -> dict[str, jax.Array]:
    return {
        "logits": logits,
        "inverse": inv_temperature,
        "cut_value": blocks.cut_values(cut_key),
        "cut_id": cut_id,
        "num_rows": num_rows.reshape(1),
        "maxima": maxima,
    }


def _weight_arrays(
    arrays: dict[str, jax.Array],
    key_words: jax.Array,
    vocabulary: Vocabulary,
    schedule: Schedule,
    interpret: blocks.Interpret,
) -> dict[str, jax.Array]:
    high, low = block_weights(
        *arrays.values(), vocabulary=vocabulary, schedule=schedule, interpret=interpret
    )
    return {"key_words": key_words, "high": high, "low": low}


def choose_and_score_hopper(
    logits: jax.Array,
    key_words: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    logprob_inv_temperature: jax.Array,
    logprob_cut_key: jax.Array,
    logprob_cut_id: jax.Array,
    num_rows: jax.Array,
    given: jax.Array | None = None,
    *,
    topology: SamplingTopology,
    schedule: Schedule | None = None,
    sampled: bool = True,
    interpret: blocks.Interpret = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`choose_token` and then `target_logprobs` of the token, with one summary pass for both.

    Args:
      logits, key_words, inv_temperature, cut_key, cut_id: as of `choose_token`.
      logprob_inv_temperature, logprob_cut_key, logprob_cut_id: as of `target_logprobs`; the cut
        keeps the row's maximum, as every cut of `find_cut` does.
      given: int32 [R], the token of a row that is not chosen but given, below 0 where it is chosen.
      num_rows, topology, schedule, sampled, interpret: as of `choose_token_hopper`.

    Returns:
      token int32 [R], bad_row bool [R], logprob float32 [R], log_sum_exp float32 [R]: the bits of
      the two ops called one after the other, where both have blocks of `topology.block`.

    Raises and Invariance: as the two ops.
    """
    rows, vocab = logits.shape
    logits, vocabulary = blocks.vocabulary_of("choose_and_score", logits, topology.block)
    schedule = schedule or schedule_for(rows=rows, blocks=vocabulary.blocks)
    scored = logprob_inv_temperature, blocks.cut_values(logprob_cut_key), logprob_cut_id
    maxima, sums = block_summary(
        logits,
        *scored,
        num_rows.reshape(1),
        vocabulary=vocabulary,
        schedule=schedule,
        interpret=interpret,
    )
    arrays = _choice_arrays(logits, inv_temperature, cut_key, cut_id, num_rows, maxima)
    if sampled:
        arrays |= _weight_arrays(arrays, key_words, vocabulary, schedule, interpret)
    names = "score_inverse", "score_cut_value", "score_cut_id"
    arrays |= {"sums": sums, **dict(zip(names, scored, strict=True))}
    if given is not None:
        arrays["given"] = given
    token, bad, logprob, lse = pick_token(
        arrays, vocabulary=vocabulary, vocab_size=vocab, interpret=interpret
    )
    return token, bad != 0, logprob, lse


def choose_token_hopper_op(
    logits: jax.Array,
    key_words: jax.Array,
    inv_temperature: jax.Array,
    cut_key: jax.Array,
    cut_id: jax.Array,
    num_rows: jax.Array,
    *,
    topology: SamplingTopology,
) -> tuple[jax.Array, jax.Array]:
    """`choose_token_hopper` as an implementation of the primitive, schedule by the table."""
    return choose_token_hopper(
        logits, key_words, inv_temperature, cut_key, cut_id, num_rows, topology=topology
    )


def choose_and_score_hopper_op(
    logits: jax.Array, *arrays: jax.Array, topology: SamplingTopology
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`choose_and_score_hopper` as an implementation of the primitive, schedule by the table."""
    return choose_and_score_hopper(logits, *arrays, topology=topology)[:3]
