"""What an engine did so far, in numbers. Host only, no jax."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .scheduler import Scheduler, StepPlan

WINDOW = 1024  # latencies and step times are those of the last so many


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """A snapshot.

    Attributes:
      steps, failed_steps: steps that ran, and that raised.
      requests_running: requests that are not done, `sequences_waiting` of their completions queued.
      requests_finished, requests_aborted: requests that are done; an aborted one ended by abort or
        by a fault of its own.
      tokens_computed: tokens that went through the model, recomputed ones included.
      tokens_reused: tokens that did not, because the prefix cache held their pages.
      tokens_drawn: new tokens.
      preemptions: completions sent back to wait because pages ran out.
      busy_seconds: time spent in steps; tokens_a_second is tokens_drawn over it.
      step_ms, first_token_ms, request_ms: median and 95th percentile of the recent ones, in
        milliseconds; None before the first.
      cache_hit_rate: tokens_reused over what would have been computed without the cache.
      pages, pages_in_use, pages_kept: of the cache; kept pages belong to nobody and are remembered.
      programs_compiled, compile_seconds: steps that were compiled, and how long their first run
        took.
    """

    steps: int
    failed_steps: int
    requests_running: int
    sequences_waiting: int
    requests_finished: int
    requests_aborted: int
    tokens_computed: int
    tokens_reused: int
    tokens_drawn: int
    preemptions: int
    busy_seconds: float
    tokens_a_second: float
    step_ms: tuple[float, float] | None
    first_token_ms: tuple[float, float] | None
    request_ms: tuple[float, float] | None
    cache_hit_rate: float
    pages: int
    pages_in_use: int
    pages_kept: int
    programs_compiled: int
    compile_seconds: float


class Counters:
    """The running numbers behind `EngineMetrics`; their size does not grow."""

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        self.requests_finished = 0
        self.requests_aborted = 0
        self.tokens_computed = 0
        self.tokens_reused = 0
        self.tokens_drawn = 0
        self.preemptions = 0
        self.busy_seconds = 0.0
        self.step_seconds: deque[float] = deque(maxlen=WINDOW)
        self.first_token_seconds: deque[float] = deque(maxlen=WINDOW)
        self.request_seconds: deque[float] = deque(maxlen=WINDOW)

    def planned(self, plan: StepPlan) -> None:
        """A step was planned; whatever becomes of it, this much happened."""
        self.preemptions += plan.num_preempted

    def ran(self, plan: StepPlan, *, drawn: int, seconds: float) -> None:
        """A planned step ran."""
        self.steps += 1
        self.tokens_computed += plan.num_tokens * plan.num_steps
        self.tokens_reused += plan.num_reused
        self.tokens_drawn += drawn
        self.busy_seconds += seconds
        self.step_seconds.append(seconds)

    def finished(self, *, seconds: float, aborted: bool) -> None:
        """A request is done, this long after it was added."""
        if aborted:
            self.requests_aborted += 1
        else:
            self.requests_finished += 1
            self.request_seconds.append(seconds)

    def snapshot(
        self, scheduler: Scheduler, *, requests: int, programs: Mapping[Any, float]
    ) -> EngineMetrics:
        """The numbers as they are now.

        Args:
          scheduler: for the queue and the pages.
          requests: that are not done.
          programs: compiled steps and how long the first run of each took.
        """
        pool = scheduler.pool
        return EngineMetrics(
            steps=self.steps,
            failed_steps=self.failed_steps,
            requests_running=requests,
            sequences_waiting=scheduler.num_waiting,
            requests_finished=self.requests_finished,
            requests_aborted=self.requests_aborted,
            tokens_computed=self.tokens_computed,
            tokens_reused=self.tokens_reused,
            tokens_drawn=self.tokens_drawn,
            preemptions=self.preemptions,
            busy_seconds=self.busy_seconds,
            tokens_a_second=_share(self.tokens_drawn, self.busy_seconds),
            step_ms=_milliseconds(self.step_seconds),
            first_token_ms=_milliseconds(self.first_token_seconds),
            request_ms=_milliseconds(self.request_seconds),
            cache_hit_rate=_share(self.tokens_reused, self.tokens_reused + self.tokens_computed),
            pages=pool.num_pages,
            pages_in_use=pool.num_held,
            pages_kept=pool.num_kept,
            programs_compiled=len(programs),
            compile_seconds=sum(programs.values()),
        )


def _milliseconds(seconds: Sequence[float]) -> tuple[float, float] | None:
    """(median, 95th percentile) in milliseconds, or None."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return 1e3 * ordered[last // 2], 1e3 * ordered[round(0.95 * last)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
