"""Plain data of requests: what is accepted, what is refused, and in which words."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest

import bi_jax.request as request_module
from bi_jax.request import (
    CompletionOutput,
    Request,
    RequestOutput,
    SamplingParams,
    TopLogprobs,
    check_prompt_token_ids,
)

REFUSED = [
    ({"n": 0}, "n=0 must be 1 or more"),
    ({"n": 1.5}, "n=1.5 must be a whole number, 1 or more"),
    ({"n": True}, "n=True must be a whole number"),
    ({"temperature": -0.5}, "temperature=-0.5 must be a finite number, 0 or more"),
    ({"temperature": float("nan")}, "temperature=nan must be a finite number"),
    ({"temperature": float("inf")}, "temperature=inf must be a finite number"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"top_p": 0}, "top_p=0 must be above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1"),
    ({"top_k": -2}, "top_k=-2 must be 0 (or -1: keep all) or more"),
    ({"min_p": -0.1}, "min_p=-0.1 must be from 0 and at most 1"),
    ({"min_p": 1.1}, "min_p=1.1 must be from 0 and at most 1"),
    ({"seed": -1}, "seed=-1 must be from 0 to 9223372036854775807"),
    ({"seed": 2**63}, "seed=9223372036854775808 must be from 0"),
    ({"seed": "7"}, "seed='7' must be a whole number"),
    ({"max_tokens": 0}, "max_tokens=0 must be 1 or more"),
    ({"max_tokens": None}, "max_tokens=None must be a whole number"),
    ({"min_tokens": -1}, "min_tokens=-1 must be 0 or more"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 must not exceed max_tokens=8"),
    ({"stop": [""]}, "stop=[''] must not hold an empty string"),
    ({"stop": ["a", 3]}, "must hold strings only, got 3"),
    ({"stop": 3}, "stop=3 must be a string or a sequence of strings"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]=-1 must be a token id"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]='a' must be a token id"),
    ({"stop_token_ids": 3}, "stop_token_ids=3 must be a sequence of token ids"),
    ({"stop_token_ids": {3: 4}}, "stop_token_ids={3: 4} must be a sequence of token ids"),
    ({"stop": {"a": 1}}, "stop={'a': 1} must be a string or a sequence of strings"),
    ({"logprobs": -1}, "logprobs=-1 must be 0 or more"),
    ({"prompt_logprobs": 0.5}, "prompt_logprobs=0.5 must be a whole number"),
    ({"logprobs_mode": "cooked"}, "logprobs_mode='cooked' must be one of 'raw', 'scaled'"),
    ({"ignore_eos": 1}, "ignore_eos=1 must be True or False"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_bad_params_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_at_the_edge_are_accepted_and_normalised():
    params = SamplingParams(
        n=np.int64(3),
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        seed=2**63 - 1,
        max_tokens=1,
        min_tokens=1,
        stop="END",
        stop_token_ids=np.array([4, 5]),
        logprobs=0,
    )
    assert params.n == 3 and type(params.n) is int
    assert params.greedy and params.temperature == 0.0
    assert params.top_k == 0
    assert params.stop == ("END",)
    assert params.stop_token_ids == (4, 5)
    assert hash(params) == hash(replace(params))
    assert SamplingParams().max_tokens == 1024


def test_params_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]


def test_with_seed_keeps_a_given_seed_and_draws_a_missing_one():
    assert SamplingParams(seed=7).with_seed(9).seed == 7
    assert SamplingParams().with_seed(9).seed == 9
    drawn = {SamplingParams().with_seed().seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn)


def test_request_refuses_empty_prompts_and_foreign_ids():
    with pytest.raises(ValueError, match="prompt of request 'a' is empty"):
        Request(request_id="a", prompt_token_ids=[])
    with pytest.raises(ValueError, match="request_id='' must be"):
        Request(request_id="", prompt_token_ids=[1])
    with pytest.raises(ValueError, match=r"prompt_token_ids\[1\]=-3 must be a token id"):
        Request(request_id="a", prompt_token_ids=[1, -3])
    with pytest.raises(ValueError, match="must be in order, got a set"):
        Request(request_id="a", prompt_token_ids={1, 9})  # type: ignore[arg-type]
    request = Request(request_id="a", prompt_token_ids=[1, 9])
    assert request.prompt_token_ids == (1, 9)
    request.check_against_model(vocab_size=10, max_model_len=3)
    with pytest.raises(ValueError, match=r"token id 9 at place 1 .* vocabulary of 9 tokens"):
        request.check_against_model(vocab_size=9, max_model_len=3)
    with pytest.raises(ValueError, match="has 2 tokens; a context of 2 tokens leaves room for at"):
        request.check_against_model(vocab_size=10, max_model_len=2)
    stops = Request(
        request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(stop_token_ids=[10])
    )
    with pytest.raises(ValueError, match="stop_token_ids holds 10"):
        stops.check_against_model(vocab_size=10, max_model_len=3)
    with pytest.raises(ValueError, match="the prompt is empty"):
        check_prompt_token_ids([], vocab_size=10, max_model_len=3)


def test_completion_holds_private_read_only_arrays():
    logprobs = np.array([-0.5, -1.0], np.float32)
    done = CompletionOutput(index=0, token_ids=[3, 4], text="x", logprobs=logprobs)
    logprobs[0] = 7.0
    assert done.logprobs[0] == np.float32(-0.5)
    with pytest.raises(ValueError, match="read-only"):
        done.logprobs[0] = 1.0
    assert not done.finished
    with pytest.raises(ValueError, match=r"logprobs must have shape \(2,\)"):
        replace(done, logprobs=[0.0])
    with pytest.raises(ValueError, match="finish_reason='tired'"):
        replace(done, finish_reason="tired")
    top = TopLogprobs(token_ids=[[1, 2]], logprobs=[[-1.0, -2.0]])
    with pytest.raises(ValueError, match="top_logprobs must have 2 rows, got 1"):
        replace(done, top_logprobs=top)
    with pytest.raises(ValueError, match="one shape"):
        TopLogprobs(token_ids=[[1, 2]], logprobs=[[-1.0]])


def test_bits_see_ids_and_every_bit_of_the_logprobs():
    def make(ids, logprobs):
        return CompletionOutput(index=0, token_ids=ids, text="", logprobs=logprobs).bits()

    assert make([1, 2], [0.0, -1.0]) == make([1, 2], [0.0, -1.0])
    assert make([1, 2], [0.0, -1.0]) != make([1, 2], [-0.0, -1.0])
    assert make([1, 2], [0.0, -1.0]) != make([1, 3], [0.0, -1.0])


def test_request_output_is_finished_when_every_completion_is():
    one = CompletionOutput(index=0, token_ids=[3], text="x", logprobs=[0.0], finish_reason="stop")
    going = CompletionOutput(index=1, token_ids=[3], text="x", logprobs=[0.0])
    make = {"request_id": "a", "prompt": None, "prompt_token_ids": [1, 2]}
    assert RequestOutput(**make, outputs=[one]).finished
    assert not RequestOutput(**make, outputs=[one, going]).finished
    with pytest.raises(ValueError, match=r"prompt_logprobs must have shape \(2,\)"):
        RequestOutput(**make, outputs=[one], prompt_logprobs=[0.0])


def test_the_module_needs_no_jax():
    """The package's own __init__ is left out: it may well import jax."""
    folder = str(Path(request_module.__file__).parent)
    code = (
        "import sys, types; sys.modules['jax'] = None; "
        "package = sys.modules['bi_jax'] = types.ModuleType('bi_jax'); "
        f"package.__path__ = [{folder!r}]; import bi_jax.request"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
