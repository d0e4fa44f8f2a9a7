"""score() gives a completion's own log-probabilities back, or refuses."""

import dataclasses

import pytest

from bi_jax.scoring import score
from bi_jax.testing import assert_same_bits
from tests.bi_jax import small_trainer as small


def test_a_completion_is_scored_as_it_was_drawn():
    outputs = small.completions()[2:6]
    scores = score(small.model(), outputs, rows=4)
    for output, of_output in zip(outputs, scores, strict=True):
        for completion, logprobs in zip(output.outputs, of_output, strict=True):
            assert_same_bits(logprobs, completion.logprobs)


def test_other_weights_are_refused():
    """bfloat16 compute is another identity, and so is no identity."""
    outputs = small.completions()[2:3]
    with pytest.raises(ValueError, match="equal bits are promised within one identity only"):
        score(small.model("bfloat16"), outputs)
    (completion,) = outputs[0].outputs
    nameless = dataclasses.replace(completion, identity="")
    with pytest.raises(ValueError, match="has the identity none"):
        score(small.model(), [dataclasses.replace(outputs[0], outputs=(nameless,))])
    with pytest.raises(ValueError, match="score takes a Transformer, got a str"):
        score("a/model", outputs)  # type: ignore[arg-type]
