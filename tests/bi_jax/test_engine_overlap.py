"""The next step is handed to the device before this one's tokens are known; no bit may notice."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bi_jax import Request, RequestOutput, SamplingParams
from bi_jax.engine import Engine
from bi_jax.errors import StepFailed
from bi_jax.runner import Runner
from tests.bi_jax import tiny

PROMPTS = tiny.prompts_of((5, 70, 33, 40), seed=41)
PARAMS = tiny.params_of(4, max_tokens=40)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return tiny.rescheduled(overlap=False, prefix_caching=False).generate(PROMPTS, PARAMS)


def watched(engine: Engine) -> list[str]:
    """The order in which steps are handed over and looked at."""
    seen: list[str] = []

    def watch(name: str, true: Callable[..., Any]) -> None:
        def call(*args: Any) -> Any:
            seen.append(name)
            return true(*args)

        setattr(engine.runner, name, call)

    for name in ("start", "start_one_on", "collect"):
        watch(name, getattr(engine.runner, name))
    return seen


def test_steps_run_ahead_and_bits_stay(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    seen = watched(engine)
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected)
    assert seen.count("start_one_on") > 20
    # Each of them before the step in front of it was looked at.
    assert all(seen[i + 1] == "collect" for i, s in enumerate(seen) if s == "start_one_on")
    assert seen.count("start") + seen.count("start_one_on") == seen.count("collect")
    assert engine.metrics().pages_in_use == 0


def test_it_can_be_turned_off(expected: list[RequestOutput]):
    engine = tiny.rescheduled(overlap=False)
    seen = watched(engine)
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected)
    assert "start_one_on" not in seen


def test_wrong_tokens_would_be_seen(expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch):
    """The control: the step ahead on tokens that are one off."""
    true = Runner.launch

    def launch(self: Runner, step: Any, *, tokens: Any = None, **others: Any) -> Any:
        return true(self, step, tokens=None if tokens is None else tokens ^ 1, **others)

    monkeypatch.setattr(Runner, "launch", launch)
    got = tiny.rescheduled().generate(PROMPTS, PARAMS)
    with pytest.raises(AssertionError):
        tiny.assert_same_completions(got, expected)


def test_a_stop_token_ends_one_and_no_other(expected: list[RequestOutput]):
    """It is seen when the next step is on its way already: that step's row is for nobody."""
    stop = expected[1].outputs[0].token_ids[17]
    first = list(expected[1].outputs[0].token_ids).index(stop)
    params = list(PARAMS)
    params[1] = SamplingParams(
        temperature=PARAMS[1].temperature, seed=PARAMS[1].seed, max_tokens=40, ignore_eos=True,
        stop_token_ids=(stop,),
    )  # fmt: skip
    engine = tiny.rescheduled()
    got = engine.generate(PROMPTS, params)
    assert got[1].outputs[0].token_ids == expected[1].outputs[0].token_ids[: first + 1]
    others = (0, 2, 3)
    tiny.assert_same_completions([got[i] for i in others], [expected[i] for i in others])
    assert engine.metrics().pages_in_use == 0
    # What the ended one left in the prefix cache is as good as computed afresh.
    tiny.assert_same_completions(engine.generate(PROMPTS, PARAMS), expected)


def test_comings_and_goings_between_steps(expected: list[RequestOutput]):
    """Pages of an aborted request go to newcomers while a step that reads them is on its way."""
    engine = tiny.rescheduled(num_pages=14)
    lasting = [engine.make_request(PROMPTS[i], PARAMS[i], f"r{i}") for i in (0, 1)]
    late = {12: 2, 25: 3}

    def arrivals(step: int) -> list[Request]:
        if step == 0:
            return [*lasting, engine.make_request(PROMPTS[1][:50], PARAMS[2], "gone")]
        if step == 12:
            assert engine._ahead is not None
            engine.abort("gone")
        if step not in late:
            return []
        index = late[step]
        return [engine.make_request(PROMPTS[index], PARAMS[index], f"r{index}")]

    done = tiny.run_all(engine, arrivals, wanted=4)
    tiny.assert_same_completions([done[f"r{i}"] for i in range(4)], expected)
    assert engine.metrics().pages_in_use == 0 and engine._ahead is None


def test_what_the_step_ahead_raises_belongs_to_it(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    true, count = engine.runner.start_one_on, iter(range(10_000))

    def start_one_on(*args: Any) -> Any:
        if next(count) == 5:
            raise RuntimeError("no memory")
        return true(*args)

    engine.runner.start_one_on = start_one_on  # type: ignore[method-assign]
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(engine.make_request(prompt, params, f"r{i}"))
    done: dict[str, RequestOutput] = {}
    failed, drawn = [], [0]
    while engine.has_unfinished_requests:
        try:
            done.update((output.request_id, output) for output in engine.step())
        except StepFailed as failure:
            failed.append(failure)
        drawn.append(engine.metrics().tokens_drawn)
    assert len(failed) == 1 and failed[0].request_ids == ("r0", "r1", "r2", "r3")
    # The step in front of it kept its tokens.
    assert drawn[failed[0].step] > drawn[failed[0].step - 1]
    tiny.assert_same_completions([done[f"r{i}"] for i in range(4)], expected)


def test_nothing_is_left_on_its_way_once_idle():
    engine = tiny.rescheduled()
    engine.add_request(engine.make_request(PROMPTS[0], PARAMS[0], "r"))
    for _ in range(6):
        engine.step()
    assert engine._ahead is not None
    engine.abort("r")
    assert engine._ahead is None and not engine.has_unfinished_requests
    engine.update_weights(engine.runner.state)


def test_the_arrays_of_the_step_ahead_are_those_of_a_plan():
    """What is derived from the step before is what `token_arrays` would lay out."""
    engine = tiny.rescheduled(prefix_caching=False)
    for i, length in enumerate((31, 32, 63, 5)):
        params = SamplingParams(temperature=0.0, seed=i, max_tokens=9, ignore_eos=True)
        engine.add_request(engine.make_request(tiny.prompts_of([length])[0], params))
    compared = 0
    for _ in range(7):
        engine.step()
        ahead = engine._ahead
        if ahead is None or ahead.launched is None:
            continue
        rows = engine._logit_rows(ahead.plan)
        fresh = engine.runner.step_arguments(ahead.plan, rows)
        mine = ahead.launched.step
        count = len(rows)
        for name in ("positions", "request", "query_start", "num_tokens"):
            np.testing.assert_array_equal(
                getattr(mine.tokens, name), getattr(fresh.tokens, name), err_msg=name
            )
        # Pages beyond a request's own may be anything.
        for row, item in enumerate(ahead.plan.items):
            used = len(item.pages)
            np.testing.assert_array_equal(
                mine.tokens.page_table[row, :used], fresh.tokens.page_table[row, :used]
            )
        for name in ("row", "target"):
            np.testing.assert_array_equal(
                getattr(mine.rows, name)[:count], getattr(fresh.rows, name)[:count], err_msg=name
            )
        np.testing.assert_array_equal(
            mine.rows.sampling.position[:count], fresh.rows.sampling.position[:count]
        )
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_names_the_tokens_of_the_step_after_it(steps: int):
    """The last ones drawn, filled up to the bucket."""
    engine = tiny.rescheduled(decode_steps=steps)
    step = engine.runner.blank_step(64, logit_rows=8, steps=steps)
    choice, following = engine.runner.launch(step)
    assert following.shape == (64,) and choice.token.shape == (steps, 8)
    np.testing.assert_array_equal(following[:8], choice.token[-1])
