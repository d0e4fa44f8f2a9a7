"""The whole jitted step, through the engine: neither company nor schedule changes a bit."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_jax import Request, RequestOutput, SamplingParams
from bi_jax.stock_ops import stock_ops
from bi_jax.testing import assert_same_bits
from tests.bi_jax import digest_process, tiny

ROOT = Path(__file__).resolve().parents[2]

# Around pages of 32 and KV blocks of 128 tokens; the longest context has 4 blocks and 14 pages.
LENGTHS = (5, 130, 290, 37, 64, 33, 127, 129)
PROMPTS = tiny.prompts_of(LENGTHS)
PARAMS = tiny.params_of(len(PROMPTS))
POISON = [
    [tiny.NAN_TOKEN],
    [*PROMPTS[1][:70], tiny.NAN_TOKEN, 5],
    [tiny.INF_TOKEN, *PROMPTS[2][:150]],
]


@functools.cache
def expected() -> list[RequestOutput]:
    """Every request quite alone, nothing in the prefix cache."""
    engine = tiny.rescheduled(prefix_caching=False)
    return [engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def test_completions_are_long_and_hold_many_distinct_tokens():
    outputs = expected()
    assert min(len(o.outputs[0].token_ids) for o in outputs) >= 128
    assert tiny.distinct_tokens(outputs) >= 32
    assert max(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs) > 3 * 128


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("all at once", {}),
        ("one bucket", {"token_buckets": (64,)}),
        ("chunks of 7 tokens", {"max_num_batched_tokens": 7}),
        ("chunks of 61 tokens", {"max_num_batched_tokens": 61}),
        ("two at a time", {"max_num_seqs": 2}),
        ("no prefix cache", {"prefix_caching": False}),
        ("pages are short", {"num_pages": 17}),
        ("five tokens a dispatch", {"decode_steps": 5}),
    ],
)
def test_schedules(name: str, schedule: dict):
    engine = tiny.rescheduled(**schedule)
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected(), name)
    if name == "pages are short":
        assert engine.metrics().preemptions > 0
    if name == "five tokens a dispatch":
        # Ours end after 128 to 143 tokens: most come five at a time, and some end on the way.
        assert 25 < engine.metrics().steps < 50
    if name == "all at once":
        assert engine.runner.buckets_used == {8, 64}


def test_reversed_order_and_a_warm_cache():
    engine = tiny.rescheduled()
    backwards = engine.generate(PROMPTS[::-1], PARAMS[::-1])[::-1]
    tiny.assert_same_completions(backwards, expected(), "reversed")
    cold = engine.metrics()
    assert cold.tokens_reused == 0
    assert cold.tokens_computed == sum(LENGTHS) + sum(p.max_tokens - 1 for p in PARAMS)
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected(), "warm")
    # All full pages of each prompt, up to its last token, whose logits are needed.
    reused = sum((length - 1) // tiny.PAGE * tiny.PAGE for length in LENGTHS)
    warm = engine.metrics()
    assert warm.tokens_reused == reused > 700
    assert warm.tokens_computed == 2 * cold.tokens_computed - reused


def test_neighbours_that_hold_nan_and_infinity():
    engine = tiny.rescheduled()
    prompts = [POISON[0], *PROMPTS[:4], POISON[1], *PROMPTS[4:], POISON[2]]
    theirs = SamplingParams(temperature=1.0, seed=4, max_tokens=40, n=3)
    params = [theirs, *PARAMS[:4], theirs, *PARAMS[4:], theirs]
    outputs = engine.generate(prompts, params)
    tiny.assert_same_completions(outputs[1:5] + outputs[6:10], expected(), "poisoned company")
    for bad in (outputs[0], outputs[5], outputs[10]):
        for completion in bad.outputs:
            assert completion.finish_reason == "abort" and not completion.token_ids
            assert "hold NaN" in str(completion.stop_reason)
    assert engine.metrics().pages_in_use == 0


def test_trickled_admission_and_neighbours_aborted_midway():
    engine = tiny.rescheduled(max_num_batched_tokens=29)
    mine = {3 * i: engine.make_request(PROMPTS[i], PARAMS[i], f"mine-{i}") for i in range(8)}
    long = SamplingParams(temperature=1.0, seed=9, max_tokens=200, ignore_eos=True)
    others = {2 * i: engine.make_request(PROMPTS[-i][:90], long, f"other-{i}") for i in range(5)}

    def arrivals(step: int) -> list[Request]:
        if step in (20, 33, 41):
            engine.abort(f"other-{(20, 33, 41).index(step)}")
        return [r for r in (mine.get(step), others.get(step)) if r is not None]

    done = tiny.run_all(engine, arrivals, wanted=10)
    tiny.assert_same_completions([done[f"mine-{i}"] for i in range(8)], expected(), "trickled")


@settings(max_examples=8)
@given(data=st.data())
def test_any_batch_in_any_schedule(data: st.DataObject):
    draw = data.draw
    engine = tiny.rescheduled(
        token_buckets=draw(st.sampled_from([(8, 64), (64,)])),
        max_num_batched_tokens=draw(st.integers(5, 64)),
        max_num_seqs=draw(st.integers(1, 64)),
        num_pages=draw(st.integers(14, 60)),
        prefix_caching=draw(st.booleans()),
    )
    order = draw(st.permutations(range(len(PROMPTS))))[: draw(st.integers(2, len(PROMPTS)))]
    tokens = draw(st.integers(8, 40))
    requests, arrive = [], {}
    for index in order:
        params = dataclasses.replace(PARAMS[index], max_tokens=tokens)
        requests.append(engine.make_request(PROMPTS[index], params, f"mine-{index}"))
        arrive.setdefault(draw(st.integers(0, 12)), []).append(requests[-1])
    for index in range(draw(st.integers(0, 4))):
        prompt = draw(st.sampled_from([*POISON, *PROMPTS]))
        params = SamplingParams(seed=index, n=draw(st.integers(1, 3)), max_tokens=15)
        requests.append(engine.make_request(prompt, params, f"other-{index}"))
        arrive.setdefault(draw(st.integers(0, 12)), []).append(requests[-1])
    done = tiny.run_all(engine, lambda step: arrive.get(step, []), wanted=len(requests))
    got = [done[f"mine-{index}"] for index in order]
    tiny.assert_same_completions(got, [expected()[index] for index in order], "drawn")
    assert engine.metrics().pages_in_use == 0


def test_stock_ops_do_change_bits():
    """The control: with plain jnp ops the same comparison must see a difference."""
    control = tiny.new_engine(stock_ops())
    together = control.generate(PROMPTS, PARAMS)
    one_bucket = tiny.rescheduled(control, token_buckets=(64,)).generate(PROMPTS, PARAMS)
    assert tiny.distinct_tokens(together) >= 32
    assert tiny.digest(together) != tiny.digest(one_bucket)
    with pytest.raises(AssertionError, match="differ"):
        tiny.assert_same_completions(one_bucket, together)


def test_prompt_logprobs_do_not_depend_on_chunks_or_the_cache():
    params = [SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0) for _ in PROMPTS]
    first = tiny.rescheduled(prefix_caching=False).generate(PROMPTS, params)
    warm = tiny.rescheduled()
    runs = [warm.generate(PROMPTS, params), warm.generate(PROMPTS, params)]
    for budget in (7, 61):
        small = tiny.rescheduled(max_num_batched_tokens=budget, num_pages=17)
        runs.append(small.generate(PROMPTS, params))
    for run in runs:
        for a, b in zip(run, first, strict=True):
            assert_same_bits(a.prompt_logprobs, b.prompt_logprobs)
            assert a.prompt_logprobs is not None and np.isnan(a.prompt_logprobs[0])
            assert np.isfinite(a.prompt_logprobs[1:]).all()
        tiny.assert_same_completions(run, first)


def test_scoring_a_completion_gives_its_logprobs():
    for index in (1, 2):
        output = expected()[index]
        completion = output.outputs[0]
        whole = [*output.prompt_token_ids, *completion.token_ids]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        for budget in (64, 23):
            engine = tiny.rescheduled(max_num_batched_tokens=budget)
            scored = engine.generate([whole], params)[0].prompt_logprobs
            assert scored is not None
            assert_same_bits(scored[len(output.prompt_token_ids) :], completion.logprobs)


def test_samples_of_one_seed_differ_and_repeat_as_a_set():
    engine = tiny.rescheduled()
    params = SamplingParams(n=32, seed=77, max_tokens=12, ignore_eos=True)
    outputs = engine.generate([PROMPTS[1]], params)[0].outputs
    bits = [completion.bits() for completion in outputs]
    assert len(set(bits)) == 32 and [c.index for c in outputs] == list(range(32))
    again = tiny.rescheduled(max_num_seqs=5, max_num_batched_tokens=17)
    repeated = again.generate([PROMPTS[0], PROMPTS[1]], [PARAMS[0], params])[1].outputs
    assert [completion.bits() for completion in repeated] == bits
    for n in (1, 3):
        fewer = engine.generate([PROMPTS[1]], dataclasses.replace(params, n=n))[0].outputs
        assert [completion.bits() for completion in fewer] == bits[:n]


def test_seeds():
    engine = tiny.rescheduled()
    seeded = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    unseeded = dataclasses.replace(seeded, seed=None)
    prompt = PROMPTS[0]
    a, b, c, d = engine.generate([prompt] * 4, [seeded, unseeded, seeded, unseeded])
    assert a.outputs[0].bits() == c.outputs[0].bits()  # one seed, one answer
    assert len({o.outputs[0].bits() for o in (a, b, d)}) == 3
    replay = dataclasses.replace(seeded, seed=b.outputs[0].seed)
    assert engine.generate([prompt], replay)[0].outputs[0].bits() == b.outputs[0].bits()


def test_modes_of_log_probabilities():
    """One program for all: every token's log-probability, and cuts."""
    engine = tiny.rescheduled(token_buckets=(64,))
    base = SamplingParams(
        temperature=0.7, top_k=20, seed=3, max_tokens=6, ignore_eos=True, logprobs=tiny.VOCAB
    )
    modes = [dataclasses.replace(base, logprobs_mode=m) for m in ("raw", "scaled", "processed")]
    raw, scaled, processed = engine.generate([PROMPTS[0]] * 3, modes)
    tokens = raw.outputs[0].token_ids
    assert tokens == scaled.outputs[0].token_ids == processed.outputs[0].token_ids
    for place, token in enumerate(tokens):
        row = {}
        for name, output in (("raw", raw), ("scaled", scaled), ("processed", processed)):
            top = output.outputs[0].top_logprobs
            assert top is not None
            row[name] = np.full(tiny.VOCAB, np.nan)
            row[name][top.token_ids[place]] = top.logprobs[place]
            assert np.float32(row[name][token]) == output.outputs[0].logprobs[place]
        want = row["raw"] / 0.7
        want -= np.log(np.exp(want).sum())
        np.testing.assert_allclose(row["scaled"], want, atol=2e-5)
        kept = np.argsort(-want, kind="stable")[:20]
        np.testing.assert_allclose(
            row["processed"][kept], want[kept] - np.log(np.exp(want[kept]).sum()), atol=2e-5
        )
        assert np.isneginf(np.delete(row["processed"], kept)).all()
    # The same tokens' bits in another program, without cuts and without top tokens.
    plain = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = tiny.rescheduled().generate([[*PROMPTS[0], *tokens]], plain)[0].prompt_logprobs
    assert scored is not None
    assert_same_bits(scored[len(PROMPTS[0]) :], raw.outputs[0].logprobs)
    # A prompt's own top tokens, reported beside requests that ask for more of them.
    few = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    output = engine.generate([PROMPTS[3], PROMPTS[0]], [few, modes[0]])[0]
    top = output.prompt_top_logprobs
    assert top is not None and output.prompt_logprobs is not None
    assert top.token_ids.shape == (37, 3) and (top.token_ids[0] == -1).all()
    assert (np.diff(top.logprobs[1:], axis=1) <= 0).all()
    rest = output.prompt_logprobs[1:]
    assert (rest <= top.logprobs[1:, 0]).all()
    hits = top.token_ids[1:] == np.array(PROMPTS[3][1:])[:, None]
    assert_same_bits(top.logprobs[1:][hits], rest[hits.any(axis=1)])


def fresh_process(cache: Path) -> str:
    """The digest that a new Python process computes."""
    environment = dict(os.environ, JAX_COMPILATION_CACHE_DIR=str(cache), PYTHONPATH=str(ROOT))
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bi_jax.digest_process"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_a_fresh_process_gives_the_same_digest(tmp_path: Path):
    here = digest_process.digest_of(tiny.rescheduled(max_num_batched_tokens=40))
    assert fresh_process(tmp_path) == here


@pytest.mark.slow
def test_three_fresh_processes_give_one_digest_and_so_does_a_warm_cache(tmp_path: Path):
    here = digest_process.digest_of(tiny.rescheduled())
    caches = [tmp_path / name for name in "abca"]  # the last one finds what the first compiled
    assert {fresh_process(cache) for cache in caches} == {here}
    assert any((tmp_path / "a").iterdir())
