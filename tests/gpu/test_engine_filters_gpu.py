"""Requests with top-k, top-p, min-p and top logprobs on a card: the same bits in any company."""

import jax
import numpy as np
import pytest

from bi_jax import Engine, EngineConfig, SamplingParams
from bi_jax.models.families.qwen3 import QWEN3_0_6B
from bi_jax.stock_ops import stock_ops
from tests.gpu.engine_ways import (
    completion_digests,
    digest_of,
    load_of,
    random_model,
    together,
    trickled,
)

pytestmark = pytest.mark.gpu
BUCKETS = (64, 512)
# The usual settings first; rows with nothing to cut are among them. All report as many top tokens
# and most are filtered, so that few programs are compiled.
SETTINGS = (
    dict(temperature=0.6, top_p=0.95, top_k=20),
    dict(temperature=1.0, top_p=0.95),
    dict(temperature=0.8, top_k=50),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=0.0),
    dict(temperature=1.0, top_p=0.9, top_k=1000, min_p=0.001),
    dict(temperature=1.2),
    dict(temperature=0.7, top_p=0.8, top_k=3, logprobs_mode="processed"),
)


def make_engine(model, ops=None, **settings):
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=BUCKETS[-1],
        token_buckets=BUCKETS,
        max_model_len=512,
        num_pages=400,
        **settings,
    )
    return Engine(model, config=config, ops=ops)


@pytest.fixture(scope="module")
def model():
    """Four layers: the cuts see the whole vocabulary, and the rest compiles sooner."""
    return random_model(QWEN3_0_6B.replace(num_layers=4, max_position=1024))


@pytest.fixture(scope="module")
def load(model):
    plain = load_of(model.config.vocab_size, requests=40)
    return [
        (
            prompt,
            SamplingParams(
                seed=index,
                max_tokens=64,
                ignore_eos=True,
                logprobs=5,
                **SETTINGS[index % len(SETTINGS)],
            ),
        )
        for index, (prompt, _) in enumerate(plain)
    ]


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


@pytest.fixture(scope="module")
def expected(engine, load):
    outputs = together(engine, load)
    tokens = {t for out in outputs for t in out.outputs[0].token_ids}
    print(f"\ndistinct tokens: {len(tokens)}")
    assert len(tokens) > 200  # else a difference could hardly have shown
    return outputs


def _tops(outputs):
    tops = (out.outputs[0].top_logprobs for out in outputs)
    return [top and (top.token_ids.tobytes(), top.logprobs.tobytes()) for top in tops]


def test_company_changes_no_bit(engine, load, expected):
    first, tops = completion_digests(expected), _tops(expected)
    print(f"\nall together: {digest_of(first)}")
    ways = {
        "reversed": lambda: together(engine.rescheduled(), load[::-1])[::-1],
        "chunks of 77": lambda: together(engine.rescheduled(max_num_batched_tokens=77), load),
        "trickled": lambda: trickled(engine.rescheduled(), load),
        "four at a time": lambda: together(engine.rescheduled(max_num_seqs=4), load),
    }
    failed = []
    for name, run in ways.items():
        outputs = run()
        differ = sum(a != b for a, b in zip(first, completion_digests(outputs), strict=True))
        print(f"{name}: {differ} of {len(first)} differ")
        if differ or _tops(outputs) != tops:
            failed.append(name)
    assert not failed


def test_the_cuts_were_kernels(engine, expected):
    del expected  # they have run
    names = [dict(r.ours) for r in engine.runner.step_program.reports.values()]
    assert any(found.get("bi_find_cut") for found in names)
    assert any(found.get("bi_top_tokens") for found in names)


def test_what_is_drawn_was_not_cut(load, expected):
    """Processed log-probabilities are -inf behind the cut; a draw is in front of it."""
    for (_, params), out in zip(load, expected, strict=True):
        if params.logprobs_mode == "processed":
            completion = out.outputs[0]
            assert np.isfinite(completion.logprobs).all()
            kept = np.isfinite(completion.top_logprobs.logprobs).sum(axis=1)
            assert (kept > 0).all() and (kept <= 3).all()


def test_stock_ops_do_differ(model, load):
    """The control."""
    engine = make_engine(model, ops=stock_ops())
    few = load[:16]
    at_once, one_by_one = together(engine, few), trickled(engine.rescheduled(), few)
    pairs = zip(completion_digests(at_once), completion_digests(one_by_one), strict=True)
    assert sum(a != b for a, b in pairs)


def test_it_is_a_card():
    assert jax.default_backend() == "gpu"
