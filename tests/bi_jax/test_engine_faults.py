"""What goes wrong in a step takes nobody along: no request, no page, no bit."""

import dataclasses
import gc
import signal
import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest

from bi_jax import Request, RequestOutput, SamplingParams
from bi_jax.engine import Engine
from bi_jax.errors import EngineFull, StepFailed
from tests.bi_jax import tiny

PROMPTS = tiny.prompts_of((5, 70, 133, 40), seed=31)
PARAMS = tiny.params_of(4, max_tokens=20)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return tiny.rescheduled(prefix_caching=False).generate(PROMPTS, PARAMS)


def requests(engine: Engine) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
    return [engine.make_request(p, s, f"r{i}") for i, (p, s) in pairs]


def fail_at(engine: Engine, steps: set[int], error: BaseException, *, lose_cache: bool) -> None:
    """Makes some of the device's steps raise, as out of memory would."""
    true_step, count = engine.runner.step_program, iter(range(10_000))

    def step(program: Any, state: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if next(count) in steps:
            if lose_cache:  # donated buffers are gone
                for leaf in jax.tree.leaves(cache):
                    leaf.delete()
            raise error
        return true_step(program, state, cache, *args, **kwargs)

    engine.runner.step_program = step  # type: ignore[assignment]


@pytest.mark.parametrize("lose_cache", [True, False])
def test_a_step_that_raises_loses_no_request(expected: list[RequestOutput], lose_cache: bool):
    engine = tiny.rescheduled(max_num_batched_tokens=50)
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    fail_at(engine, {0, 7, 8, 20}, error, lose_cache=lose_cache)
    for request in requests(engine):
        engine.add_request(request)
    done: dict[str, RequestOutput] = {}
    failures = []
    while engine.has_unfinished_requests:
        try:
            done.update((output.request_id, output) for output in engine.step())
        except StepFailed as failure:
            failures.append(failure)
            assert engine.metrics().pages_in_use == engine.metrics().pages_kept == 0
    assert [failure.step for failure in failures] == [0, 7, 8, 20]
    assert failures[1].request_ids == ("r0", "r1", "r2", "r3")
    assert failures[1].__cause__ is error
    assert "step 7 failed with RuntimeError: RESOURCE_EXHAUSTED" in str(failures[1])
    assert engine.metrics().failed_steps == 4
    tiny.assert_same_completions([done[f"r{i}"] for i in range(4)], expected, "after failures")
    assert engine.metrics().pages_in_use == 0


def test_generate_that_fails_takes_its_requests_away_and_leaves_others(
    expected: list[RequestOutput],
):
    engine = tiny.rescheduled()
    other = requests(engine)[2]
    engine.add_request(other)
    fail_at(engine, {5}, MemoryError("no memory"), lose_cache=True)
    with pytest.raises(StepFailed, match="MemoryError: no memory"):
        engine.generate(PROMPTS[:2], PARAMS[:2])
    assert engine.metrics().requests_running == 1
    done = tiny.run_all(engine, lambda step: [], wanted=1)
    tiny.assert_same_completions([done["r2"]], expected[2:3])
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected)
    assert engine.metrics().pages_in_use == 0


def test_an_interrupt_comes_through_and_the_engine_goes_on(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    fail_at(engine, {4}, KeyboardInterrupt(), lose_cache=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.has_unfinished_requests and engine.metrics().pages_in_use == 0
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected)


@pytest.mark.parametrize("moment", ["plan", "plan_one_on", "commit", "remove"])
def test_an_interrupt_never_leaves_half_a_step(expected: list[RequestOutput], moment: str):
    """Ctrl-C just before the scheduler is told something, as it would come to `step` in a loop."""
    engine = tiny.rescheduled()
    true_method, calls = getattr(engine.scheduler, moment), iter(range(10_000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in (1, 6):
            signal.raise_signal(signal.SIGINT)
        return true_method(*args, **kwargs)

    setattr(engine.scheduler, moment, interrupted)
    mine, done, interrupts = requests(engine), {}, 0
    for request in mine:
        engine.add_request(request)
    while len(done) < 4:
        try:
            done.update((output.request_id, output) for output in engine.step())
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == (1 if moment == "remove" else 2)
    tiny.assert_same_completions([done[f"r{i}"] for i in range(4)], expected, moment)
    assert engine.metrics().pages_in_use == 0 and not engine._owners


def test_an_interrupt_while_requests_are_added_leaves_none_behind():
    engine = tiny.rescheduled()
    true_add, calls = engine.scheduler.add, iter(range(10))

    def add(sequence: Any) -> None:
        if next(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        true_add(sequence)

    engine.scheduler.add = add  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.has_unfinished_requests and not engine.scheduler.num_unfinished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nan_in_one_requests_logits_ends_that_request_only(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    true_collect, steps = engine.runner.collect, iter(range(10_000))

    def collect(launched: Any) -> Any:
        results, plan, rows = true_collect(launched), launched.plan, launched.rows
        if next(steps) == 12:
            owners = [engine._owners[plan.items[r.item].sequence.seq_id] for r in rows]
            bad = np.array([owner.request.request_id == "r1" for owner in owners])
            results = [dataclasses.replace(results[0], bad_row=bad)]
        return results

    engine.runner.collect = collect
    mine = requests(engine)
    done = tiny.run_all(engine, lambda step: mine if step == 0 else [], wanted=4)
    assert engine.metrics().requests_aborted == 1
    bad = done["r1"].outputs[0]
    assert bad.finish_reason == "abort" and 0 < len(bad.token_ids) < 20
    assert "logits of request 'r1' at position" in str(bad.stop_reason)
    assert bad.token_ids == expected[1].outputs[0].token_ids[: len(bad.token_ids)]
    others = (0, 2, 3)
    tiny.assert_same_completions([done[f"r{i}"] for i in others], [expected[i] for i in others])
    assert engine.metrics().pages_in_use == 0
    # Its pages are trusted no more: the same prompt is computed in full.
    computed = engine.metrics().tokens_computed
    again = engine.generate([PROMPTS[1]], PARAMS[1])
    assert engine.metrics().tokens_computed - computed == len(PROMPTS[1]) + PARAMS[1].max_tokens - 1
    tiny.assert_same_completions(again, expected[1:2])


def test_a_fault_in_one_requests_text_ends_that_request_only(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    for request in requests(engine):
        active = engine.add_request(request)
        if request.request_id == "r3":
            text = active.completions[0].text

            def broken(token: int) -> str:
                raise UnicodeError("cannot be shown")

            text.push = broken  # type: ignore[method-assign]
    done = tiny.run_all(engine, lambda step: [], wanted=4)
    bad = done["r3"].outputs[0]
    assert (bad.finish_reason, bad.stop_reason) == ("abort", "UnicodeError: cannot be shown")
    tiny.assert_same_completions([done[f"r{i}"] for i in range(3)], expected[:3])
    assert engine.metrics().pages_in_use == 0


def test_a_stream_that_is_left_takes_its_request_along(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    seen = [next(stream) for _ in range(4)]
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4]
    stream.close()
    assert not engine.has_unfinished_requests and engine.metrics().pages_in_use == 0
    whole = list(engine.stream(PROMPTS[0], PARAMS[0]))[-1]
    tiny.assert_same_completions([whole], expected[:1])
    assert engine.metrics().requests_aborted == 1


def test_outputs_of_others_are_not_lost_by_generate_and_stream(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    mine = requests(engine)
    engine.add_request(mine[0])
    engine.generate(PROMPTS[2:3], PARAMS[2:3])
    engine.add_request(mine[1])
    list(engine.stream(PROMPTS[3], PARAMS[3]))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["r0", "r1"]
    tiny.assert_same_completions(outputs, expected[:2])
    assert engine.step() == []


def test_abort_returns_what_there_is():
    engine = tiny.rescheduled()
    engine.add_request(engine.make_request(PROMPTS[0], PARAMS[0], "r"))
    for _ in range(3):
        engine.step()
    output = engine.abort("r")
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].stop_reason is None
    with pytest.raises(ValueError, match="no request 'r' is running"):
        engine.abort("r")


def test_refusals_say_what_was_expected():
    engine = tiny.rescheduled(num_pages=6)
    engine.config = dataclasses.replace(engine.config, max_num_requests=2)
    short = SamplingParams(max_tokens=2)
    for prompt, params, message in [
        ([], short, "is empty"),
        ([tiny.VOCAB], short, "outside the vocabulary of 320"),
        ([1] * 512, short, "room for at most 511"),
        ([1] * 190, SamplingParams(max_tokens=3), "needs 7 pages of 32 tokens; the cache has 6"),
        ([1], SamplingParams(logprobs=321), "logprobs=321 must not exceed the vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate([[1], prompt], [short, params])
        if prompt:
            request = Request(request_id="r", prompt_token_ids=prompt, sampling_params=params)
            with pytest.raises(ValueError, match=message):
                engine.add_request(request)
        assert not engine.has_unfinished_requests
    request = engine.make_request([1], short, "twice")
    engine.add_request(request)
    with pytest.raises(ValueError, match="'twice' is already running"):
        engine.add_request(request)
    with pytest.raises(EngineFull, match=r"room for 2 more requests, but 1 of at most .*=2 are on"):
        engine.generate([[1], [2]], short)
    engine.generate([[2]], short)
    assert [output.request_id for output in engine.step()] == ["twice"]
    # A user's name that is the next of those which the engine makes up.
    last = int(engine.make_request([1], short).request_id.removeprefix("request-"))
    engine.add_request(engine.make_request([1], short, f"request-{last + 1}"))
    assert engine.generate([[2]], short)[0].request_id == f"request-{last + 2}"


@pytest.mark.slow
def test_ten_thousand_short_requests_leave_nothing_behind():
    engine = tiny.rescheduled(token_buckets=(64,))
    rng = np.random.default_rng(0)

    def serve(count: int) -> None:
        prompts = [rng.integers(0, tiny.ORDINARY, rng.integers(1, 40)).tolist() for _ in range(500)]
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for _ in range(count // 500):
            assert len(engine.generate(prompts, params)) == 500

    serve(2_000)
    gc.collect()
    tracemalloc.start()
    objects, (memory, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
    serve(8_000)
    gc.collect()
    grown, (now, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert engine.metrics().requests_finished == 10_000
    assert engine.metrics().pages_in_use == 0 and not engine._owners
    assert engine.scheduler.pool.num_free == engine.scheduler.config.num_pages
    assert grown - objects < 1_000
    assert now - memory < 2**20
