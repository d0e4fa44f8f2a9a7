"""The engine on a card: our kernels ran, and no company or schedule changes a completion's bits.

`-k Qwen3-8B` and the like run one model's tests alone: the four fit on four cards side by side.
"""

import time

import jax
import numpy as np
import pytest

from bi_jax import Engine, EngineConfig, SamplingParams, score
from bi_jax.models import Transformer, build_transformer, find_demo_model, load_params, read_config
from bi_jax.models.families.llama import LLAMA_3_1_8B
from bi_jax.models.families.qwen3 import QWEN3_0_6B, QWEN3_8B
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits
from tests.gpu.engine_ways import (
    completion_digests,
    digest_of,
    distinct_tokens,
    load_of,
    random_model,
    schedules,
    together,
    trickled,
)

pytestmark = pytest.mark.gpu
BUCKETS = (8, 64, 512, 8192)


SHAPES = {"Qwen3-0.6B": QWEN3_0_6B, "Qwen3-8B": QWEN3_8B, "Llama-3.1-8B": LLAMA_3_1_8B}


@pytest.fixture(scope="module", params=(*SHAPES, "SmolLM2"))
def model(request) -> Transformer:
    """Random weights, but for SmolLM2, which has its own."""
    if request.param in SHAPES:
        return random_model(SHAPES[request.param].replace(max_position=4096))
    source = find_demo_model()
    config = read_config(source).replace(dtype="bfloat16", param_dtype="bfloat16")
    return build_transformer(config, load_params(source, config, dtype="bfloat16"))


def make_engine(model, ops=None, *, buckets=BUCKETS, **settings):
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=buckets[-1],
        token_buckets=buckets,
        max_model_len=1024,
        num_pages=560,
        **settings,
    )
    return Engine(model, config=config, ops=ops)


@pytest.fixture(scope="module")
def engine(model):
    engine = make_engine(model)
    engine.warm_up(note=print)
    return engine


@pytest.fixture(scope="module")
def load(model):
    return load_of(model.config.vocab_size)


@pytest.fixture(scope="module")
def expected(engine, load):
    outputs = together(engine, load)
    greedy, sampled = (distinct_tokens(outputs, greedy=greedy) for greedy in (True, False))
    print(f"\ndistinct tokens: greedy {greedy}, sampled {sampled}")
    assert greedy > 100 and sampled > 1000  # else a difference could hardly have shown
    return outputs


def test_every_schedule_gives_one_digest(engine, load, expected):
    first = completion_digests(expected)
    print(f"\nall together: {digest_of(first)}")
    failed, started = [], time.perf_counter()
    for name, outputs in schedules(engine, load):
        expect = first if len(outputs) == len(first) else first[::9]
        got = completion_digests(outputs)
        differ = sum(a != b for a, b in zip(expect, got, strict=True))
        seconds, started = time.perf_counter() - started, time.perf_counter()
        print(f"{name}: {digest_of(got)}, {differ} of {len(got)} differ, {seconds:.1f} s")
        if differ:
            failed.append(name)
    assert not failed


def test_several_steps_a_dispatch(engine, load, expected):
    twin = engine.rescheduled(decode_steps=4)
    assert completion_digests(together(twin, load)) == completion_digests(expected)


def test_scored_as_prompts(engine, load, expected):
    """The engine scores what it drew: the rows of logits come out of other steps."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=1, prompt_logprobs=0)
    longer = [
        ([*prompt, *out.outputs[0].token_ids], params)
        for (prompt, _), out in zip(load, expected, strict=True)
    ]
    scored = together(engine.rescheduled(max_num_batched_tokens=512), longer[::4])
    for (prompt, _), out, again in zip(load[::4], expected[::4], scored, strict=True):
        assert_same_bits(again.prompt_logprobs[len(prompt) :], out.outputs[0].logprobs)


def test_scored_by_the_trainer(model, expected):
    """`bi_jax.score` recomputes the log-probabilities in the trainer's program, in bfloat16."""
    for out, rows in zip(expected, score(model, expected, rows=4), strict=True):
        assert_same_bits(rows[0], out.outputs[0].logprobs)


def test_our_kernels_ran(engine, expected):
    del expected  # they have run
    for report in engine.runner.step_program.reports.values():
        assert sum(report.kernels.values()) >= 6 * engine.model_config.num_layers, report.kernels


def test_stock_ops_do_differ(model, load):
    """The control: the same requests through stock XLA change with their schedule."""
    engine = make_engine(model, ops=stock_ops(), buckets=(8, 64, 512))
    few = load[:24]
    at_once, one_by_one = together(engine, few), trickled(engine.rescheduled(), few)
    pairs = zip(completion_digests(at_once), completion_digests(one_by_one), strict=True)
    differ = sum(a != b for a, b in pairs)
    print(f"\nstock ops: {differ} of {len(few)} completions change with their schedule")
    assert differ


def test_it_is_a_card():
    assert jax.default_backend() == "gpu"
    assert np.dtype("bfloat16").itemsize == 2
