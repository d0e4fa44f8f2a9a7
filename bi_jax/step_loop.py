"""The engine's loop: requests are queued, planned, run and collected.

What is on its way at any moment is here; `Engine` adds the model and the ways to ask.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bi_jax.models.config import TransformerConfig

from .active import ActiveCompletion, ActiveRequest
from .batch import LogitRow, first_rows
from .config import EngineConfig
from .errors import EngineFull, StepFailed
from .identity import PendingIdentity
from .interrupts import uninterrupted, whole
from .metrics import Counters, EngineMetrics
from .request import Request, RequestOutput, SamplingParams
from .runner import Launched, Runner
from .scheduler import Scheduler, StepPlan
from .tokenizer import Tokenizer


def locked[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Keeps an engine's method out of a step that another thread runs."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with args[0]._lock:  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    return run


@dataclass(frozen=True, kw_only=True)
class _Ahead:
    """The next step, already handed to the device; `error` if that raised."""

    plan: StepPlan
    launched: Launched | None = None
    error: Exception | None = None

    def result(self) -> Launched:
        if self.launched is None:
            assert self.error is not None
            raise self.error
        return self.launched


class StepLoop:
    """Requests on their way through one scheduler and one runner.

    Attributes:
      config, model_config, max_model_len, tokenizer, runner: set by `Engine`.
      scheduler: of this loop; see `_start_afresh`.
      weights_version: how often weights were replaced.
    """

    config: EngineConfig
    model_config: TransformerConfig
    max_model_len: int
    tokenizer: Tokenizer | None
    runner: Runner
    weights_version: int
    _pending_identity: PendingIdentity
    _seq_ids: Iterator[int]

    def _start_afresh(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._active: dict[str, ActiveRequest] = {}
        self._owners: dict[int, ActiveRequest] = {}
        self._unclaimed: list[RequestOutput] = []
        self._ahead: _Ahead | None = None
        self._lock = threading.RLock()  # held during a step, and by all that changes what it reads
        self._counters = Counters()

    def add_request(self, request: Request) -> ActiveRequest:
        """Queues a request's completions; a request without a seed is given one here.

        Raises:
          ValueError: a request of this id is running, or it cannot be served.
          EngineFull: there are max_num_requests already.
        """
        return self._add(request, claimed=False)

    @locked
    @whole
    def _add(self, request: Request, *, claimed: bool) -> ActiveRequest:
        """Queues a request; `claimed` when the caller itself hands the output on."""
        if request.request_id in self._active:
            raise ValueError(f"the request {request.request_id!r} is already running")
        self._check_request(request)
        self._check_room(1)
        active = ActiveRequest(
            request,
            seq_ids=self._seq_ids,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids(),
            max_model_len=self.max_model_len,
            claimed=claimed,
        )
        self._active[request.request_id] = active
        for completion in active.completions:
            self._owners[completion.sequence.seq_id] = active
            self.scheduler.add(completion.sequence)
        return active

    @locked
    @whole
    def abort(self, request_id: str) -> RequestOutput:
        """Ends a running request and returns what there is of it.

        Raises:
          ValueError: no such request is running.
        """
        if request_id not in self._active:
            raise ValueError(f"no request {request_id!r} is running")
        active = self._active[request_id]
        for completion in active.completions:
            if not completion.finished:
                completion.abort()
                self._release(completion)
        return self._finish(active)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._active)

    @locked
    def metrics(self) -> EngineMetrics:
        """What was done so far and what is going on; see `EngineMetrics`."""
        return self._counters.snapshot(
            self.scheduler, requests=len(self._active), programs=self.runner.programs
        )

    @locked
    def step(self) -> list[RequestOutput]:
        """One step: plan, run, commit. Returns the requests that finished in it.

        Only those that came by `add_request`; those that finished in the steps of a `generate` or
        a stream meanwhile come along.

        Raises:
          StepFailed: the step raised. No request is lost; the next call goes on with them.
        """
        self._step()
        finished, self._unclaimed = self._unclaimed, []
        return finished

    def _advance(self, active: ActiveRequest) -> RequestOutput | None:
        """A step, unless the request has grown or ended without it; what there is, if it grew."""
        with self._lock:
            if active.final is None and active.num_drawn == active.num_shown:
                self._step()
            if active.final is None and active.num_drawn == active.num_shown:
                return None
            active.num_shown = active.num_drawn
            return active.final or self._output_of(active)

    def _step(self) -> None:
        plan, taken_in = None, False
        try:
            with uninterrupted():
                ahead, self._ahead = self._ahead, None
                plan = ahead.plan if ahead else self.scheduler.plan()
            if plan is None:
                return
            started = time.perf_counter()
            self._counters.planned(plan)
            if ahead:
                launched = ahead.result()
            else:
                launched = self.runner.start(plan, self._logit_rows(plan))
            self._ahead = self._start_ahead(launched)
            results = self.runner.collect(launched)
            with uninterrupted():
                taken_in = True
                self._take_in(launched, results, started)
        except BaseException as error:
            if taken_in:
                raise
            number = self._counters.steps + self._counters.failed_steps
            self._roll_back()
            if plan is None or not isinstance(error, Exception):
                raise  # the user interrupts; what was going on can still go on
            raise StepFailed(number, self._requests_of(plan), error) from error

    def _take_in(self, launched: Launched, results: Sequence[Any], started: float) -> None:
        """What a step gave: its tokens, and the requests that are done by them."""
        plan = launched.plan
        drawn: dict[int, list[int]] = {}
        for later, result in enumerate(results, launched.later):
            self._take_result(plan, launched.rows, result, drawn, later)
        self.scheduler.commit(plan, drawn)
        seconds = time.perf_counter() - started
        self._counters.ran(plan, drawn=sum(map(len, drawn.values())), seconds=seconds)
        self._collect(plan)

    def _start_ahead(self, launched: Launched) -> _Ahead | None:
        """Hands the next step over while this one runs, where its tokens are all that is missing.

        What that raises belongs to the next step; this one's tokens are still good.
        """
        if not self.config.overlap:
            return None
        for item in launched.plan.items:
            owner = self._owners.get(item.sequence.seq_id)
            if owner is None or owner.ends_with_next(item.sequence.seq_id):
                return None
        plan = self.scheduler.plan_one_on(launched.plan)
        if plan is None:
            return None
        try:
            return _Ahead(plan=plan, launched=self.runner.start_one_on(launched, plan))
        except Exception as error:
            return _Ahead(plan=plan, error=error)

    def _logit_rows(self, plan: StepPlan) -> list[LogitRow]:
        rows: list[LogitRow] = []
        for index, item, first in first_rows(plan):
            owner = self._owners[item.sequence.seq_id]
            rows += owner.logit_rows(index, item, first)
        return rows

    def _take_result(
        self,
        plan: StepPlan,
        rows: Sequence[LogitRow],
        result: Any,
        drawn: dict[int, list[int]],
        later: int,
    ) -> None:
        """Hands every row to its request; adds the tokens drawn, by sequence.

        In a dispatch of several steps the rows stand for the first one; `later` counts from there.
        """
        for index, row in enumerate(rows):
            seq_id = plan.items[row.item].sequence.seq_id
            owner = self._owners.get(seq_id)
            if owner is None:
                continue  # it ended while this step was on its way
            try:
                token = owner.take(seq_id, row, result, index, later)
            except Exception as error:  # a fault of this request's own, in its text for example
                owner.fail(seq_id, error)
                continue
            if token is not None:
                drawn.setdefault(seq_id, []).append(token)
                if owner.first_token_at is None:
                    owner.first_token_at = time.perf_counter()
                    waited = owner.first_token_at - owner.added_at
                    self._counters.first_token_seconds.append(waited)

    @whole
    def _roll_back(self) -> None:
        """After a step that raised: its pages and the cache's buffers may hold anything."""
        self._counters.failed_steps += 1
        self._ahead = None
        self.scheduler.roll_back()
        self.runner.reset_cache()

    def _requests_of(self, plan: StepPlan) -> tuple[str, ...]:
        owners = (self._owners.get(item.sequence.seq_id) for item in plan.items)
        return tuple(dict.fromkeys(owner.request.request_id for owner in owners if owner))

    def _collect(self, plan: StepPlan) -> None:
        for item in plan.items:
            active = self._owners.get(item.sequence.seq_id)
            if active is None:
                continue
            completion = active.completion_of(item.sequence.seq_id)
            if completion.finished:
                self._release(completion)
                if active.num_left == 0:
                    final = self._finish(active)
                    if not active.claimed:
                        self._unclaimed.append(final)

    @whole
    @locked
    def _drop(self, actives: Sequence[ActiveRequest]) -> None:
        for active in actives:
            if active.final is None:
                self.abort(active.request.request_id)

    def _release(self, completion: ActiveCompletion) -> None:
        sequence = completion.sequence
        self.scheduler.remove(sequence, forget=completion.failure is not None)
        self._owners.pop(sequence.seq_id).num_left -= 1

    def _check_room(self, count: int) -> None:
        most = self.config.max_num_requests
        if most is not None and len(self._active) + count > most:
            raise EngineFull(
                f"expected room for {count} more requests, but {len(self._active)} of at most "
                f"max_num_requests={most} are on their way"
            )

    def _check_request(self, request: Request) -> None:
        params = request.sampling_params
        request.check_against_model(
            vocab_size=self.model_config.vocab_size, max_model_len=self.max_model_len
        )
        self._check_logprobs(params)
        longest = min(len(request.prompt_token_ids) + params.max_tokens, self.max_model_len)
        self.scheduler.check_fits(longest)

    def _finish(self, active: ActiveRequest) -> RequestOutput:
        del self._active[active.request.request_id]
        if not self._active and self._ahead is not None:  # a step that nobody needs any more
            failed, self._ahead = self._ahead.error is not None, None
            if failed:
                self._roll_back()
        aborted = any(c.text.finish_reason == "abort" for c in active.completions)
        self._counters.finished(seconds=time.perf_counter() - active.added_at, aborted=aborted)
        active.final = self._output_of(active)
        return active.final

    def _output_of(self, active: ActiveRequest) -> RequestOutput:
        return active.output(self._pending_identity.short, self.weights_version)

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.model_config.vocab_size:
                raise ValueError(
                    f"{name}={count} must not exceed the vocabulary of "
                    f"{self.model_config.vocab_size} tokens"
                )

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = set(self.model_config.eos_token_ids)
        if self.tokenizer is not None:
            ids.update(self.tokenizer.eos_token_ids)
        return tuple(sorted(ids))
