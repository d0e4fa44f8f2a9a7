"""Streams in one event loop share their steps and nothing else."""

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence

import pytest

from bi_jax import RequestOutput
from bi_jax.engine import Engine
from bi_jax.errors import StepFailed
from tests.bi_jax import tiny

PROMPTS = tiny.prompts_of((5, 70, 133, 40), seed=31)
PARAMS = tiny.params_of(4, max_tokens=20)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return tiny.rescheduled(prefix_caching=False).generate(PROMPTS, PARAMS)


async def read(engine: Engine, index: int, *, pause: float = 0.0) -> list[RequestOutput]:
    seen = []
    async for output in engine.stream_async(PROMPTS[index], PARAMS[index]):
        seen.append(output)
        await asyncio.sleep(pause)
    return seen


def check_growth(seen: Sequence[RequestOutput], expected: RequestOutput) -> None:
    """Each output begins with the one before, and the last one is whole."""
    for before, after in itertools.pairwise(seen):
        a, b = before.outputs[0], after.outputs[0]
        assert a.finish_reason is None
        assert len(a.token_ids) < len(b.token_ids)
        assert a.token_ids == b.token_ids[: len(a.token_ids)]
    tiny.assert_same_completions([seen[-1]], [expected])


def test_streams_share_steps(expected: list[RequestOutput]):
    engine = tiny.rescheduled()

    async def serve() -> list[list[RequestOutput]]:
        reads = [read(engine, i, pause=0.02 * (i == 3)) for i in range(4)]
        return list(await asyncio.gather(*reads))

    for seen, wanted in zip(asyncio.run(serve()), expected, strict=True):
        check_growth(seen, wanted)
    alone = sum(p.max_tokens for p in PARAMS)
    assert engine.metrics().steps < alone  # and not one after the other
    assert engine.step() == [] and engine.metrics().pages_in_use == 0


def test_the_end_is_shown_although_another_ran_the_last_step(expected: list[RequestOutput]):
    """A slow consumer finds the request ended since its last look, and still gets all of it."""
    engine = tiny.rescheduled()
    slow = engine.stream(PROMPTS[0], PARAMS[0])
    seen = [next(slow)]
    engine.generate([PROMPTS[1]], PARAMS[1])  # its steps are the slow one's too
    seen += slow
    check_growth(seen, expected[0])
    assert len(seen) == 2 and not engine.has_unfinished_requests

    ended = engine.stream(PROMPTS[0], PARAMS[0])
    next(ended)
    (request_id,) = engine._active
    engine.abort(request_id)
    assert [output.outputs[0].finish_reason for output in ended] == ["abort"]


def test_a_cancelled_client_takes_only_its_own_request_along(expected: list[RequestOutput]):
    engine = tiny.rescheduled()

    async def serve() -> list[list[RequestOutput]]:
        tasks = [asyncio.create_task(read(engine, i)) for i in range(4)]
        while engine.metrics().tokens_drawn < 12:
            await asyncio.sleep(0.005)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        return [await tasks[i] for i in (0, 2, 3)]

    for seen, i in zip(asyncio.run(serve()), (0, 2, 3), strict=True):
        check_growth(seen, expected[i])
    assert not engine.has_unfinished_requests
    metrics = engine.metrics()
    assert (metrics.requests_finished, metrics.requests_aborted) == (3, 1)
    assert metrics.pages_in_use == 0


def test_a_client_that_is_cancelled_before_it_is_added_leaves_nothing_behind():
    """The thread that adds the request waits for a step of another one, and ends after its task."""
    engine = tiny.rescheduled()

    async def serve() -> None:
        with engine._lock:
            task = asyncio.create_task(read(engine, 0))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(serve())
    assert not engine.has_unfinished_requests and engine.metrics().sequences_waiting == 0


def test_leaving_holds_up_nobody_else_in_the_loop():
    engine = tiny.rescheduled()

    async def serve() -> float:
        stream = engine.stream_async(PROMPTS[0], PARAMS[0])
        await anext(stream)
        held, free = threading.Event(), threading.Event()

        def step() -> None:  # of another thread
            with engine._lock:
                held.set()
                free.wait(10)

        other = asyncio.create_task(asyncio.to_thread(step))
        await asyncio.to_thread(held.wait)
        started = time.perf_counter()
        leaving = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        free.set()  # reached although the step goes on
        await asyncio.gather(leaving, other)
        return time.perf_counter() - started

    assert asyncio.run(serve()) < 5
    assert not engine.has_unfinished_requests


def test_a_failed_step_ends_one_stream_and_no_other(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    true_collect, steps = engine.runner.collect, iter(range(10_000))

    def collect(launched):
        if next(steps) == 9:
            raise RuntimeError("out of memory")
        return true_collect(launched)

    engine.runner.collect = collect

    async def serve():
        return await asyncio.gather(*(read(engine, i) for i in range(4)), return_exceptions=True)

    results = asyncio.run(serve())
    failed = [r for r in results if isinstance(r, BaseException)]
    assert len(failed) == 1 and isinstance(failed[0], StepFailed)
    for seen, wanted in zip(results, expected, strict=True):
        if not isinstance(seen, BaseException):
            check_growth(seen, wanted)
    assert not engine.has_unfinished_requests and engine.metrics().pages_in_use == 0


def test_threads_do_not_get_between(expected: list[RequestOutput]):
    engine = tiny.rescheduled()
    results: dict[int, list[RequestOutput]] = {}

    def serve(index: int) -> None:
        results[index] = engine.generate([PROMPTS[index]], PARAMS[index])

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tiny.assert_same_completions([results[i][0] for i in range(4)], expected)
    assert engine.metrics().pages_in_use == 0 and engine.step() == []
