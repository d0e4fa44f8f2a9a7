"""Settings that cannot work are refused when they are given, not at the first step."""

import dataclasses

import numpy as np
import pytest

from bi_jax import EngineConfig, SamplingParams
from bi_jax.engine import Engine
from tests.bi_jax import tiny


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 4.0}, "max_num_seqs=4.0 must be a positive whole number"),
        ({"page_size": True}, "page_size=True must be a positive whole number"),
        ({"token_buckets": 64}, "token_buckets=64 must be a sequence of row counts"),
        ({"token_buckets": (8, 8.0)}, "token_buckets=8.0 must be a positive"),
        ({"memory_fraction": "most"}, "memory_fraction='most' must be in (0, 1]"),
        ({"memory_fraction": float("nan")}, "memory_fraction=nan must be in (0, 1]"),
    ],
    ids=str,
)
def test_bad_values_are_named(changes: dict, message: str):
    with pytest.raises(ValueError) as caught:
        EngineConfig(**changes)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    given = EngineConfig(max_num_seqs=np.int64(4), token_buckets=[np.int32(8), 128])  # type: ignore[arg-type]
    assert given == EngineConfig(max_num_seqs=4, token_buckets=(8, 128))
    assert type(given.max_num_seqs) is int


def test_pages_that_attention_cannot_read_are_refused_at_once():
    for page_size in (48, 3, 192):
        with pytest.raises(ValueError, match=f"page_size={page_size} must divide .* 128 tokens"):
            Engine(tiny.model(), config=dataclasses.replace(tiny.ENGINE, page_size=page_size))


def test_a_name_is_no_model():
    with pytest.raises(ValueError, match=r"got a str; Engine\.from_pretrained takes"):
        Engine("path/to/model")  # type: ignore[arg-type]


def test_another_schedule_stays_within_what_was_made():
    engine = tiny.shared_engine()
    for changes, message in [
        ({"max_num_seqs": 65}, "max_num_seqs=65 must not exceed 64"),
        ({"max_num_batched_tokens": 65}, "max_num_batched_tokens=65 must not exceed 64"),
        ({"token_buckets": (8,)}, "max_num_batched_tokens=64 must not exceed 8"),
        ({"max_model_len": 513}, "max_model_len=513 must not exceed 512"),
        ({"num_pages": 161}, "num_pages=161 must not exceed 160"),
        ({"page_size": 64}, "page_size=64 must be this engine's, 32"),
        ({"token_buckets": (8, 32)}, r"token_buckets=\(8, 32\) must be among \(8, 64\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.rescheduled(**changes)


def test_a_shorter_context_ends_completions():
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    (prompt,) = tiny.prompts_of((5,), seed=31)
    long = tiny.rescheduled().generate([prompt], params)[0].outputs[0]
    short = tiny.rescheduled(max_model_len=16).generate([prompt], params)[0].outputs[0]
    assert (len(short.token_ids), short.finish_reason) == (11, "length")
    assert long.token_ids[:11] == short.token_ids


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 1}, "sampling_params={'n': 1} must be a SamplingParams"),
        ([None], "sampling_params=None must be a SamplingParams"),
        (3, "sampling_params=3 must be a SamplingParams"),
        ((p for p in ()), "must be a SamplingParams"),
        ([SamplingParams()] * 2, "one SamplingParams for each of 1 prompts, got 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_parameters_that_are_none_are_named(params: object, message: str):
    with pytest.raises(ValueError, match=message):
        tiny.rescheduled().generate([[1]], params)  # type: ignore[arg-type]


def test_token_ids_of_numpy_are_one_prompt():
    params = SamplingParams(max_tokens=2, seed=1)
    ours, theirs = [3, 4], [np.int64(3), np.int32(4)]
    got = tiny.rescheduled().generate(theirs, params)  # type: ignore[arg-type]
    tiny.assert_same_completions(got, tiny.rescheduled().generate(ours, params))


def test_weights_that_are_no_state_are_refused():
    with pytest.raises(ValueError, match=r"takes a state, nnx.state\(model\), got a Transformer"):
        tiny.rescheduled().update_weights(tiny.model())  # type: ignore[arg-type]
