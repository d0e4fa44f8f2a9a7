"""Requests on their way: what was drawn, scored and shown so far. Host only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from .batch import CHOOSE, LogitRow
from .request import CompletionOutput, Request, RequestOutput, TopLogprobs
from .sampling_rows import RowSampling, row_sampling
from .scheduler import PlannedSequence
from .scheduler import Sequence as ScheduledSequence
from .stop import CompletionText
from .tokenizer import Tokenizer


class RowResults(Protocol):
    """The part of a step's result that is read here; arrays with one entry a `LogitRow`."""

    token: np.ndarray
    logprob: np.ndarray
    bad_row: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class ActiveCompletion:
    """One of a request's n completions."""

    def __init__(
        self,
        index: int,
        sequence: ScheduledSequence,
        text: CompletionText,
        sampling: RowSampling,
    ) -> None:
        self.index = index
        self.sampling = sampling
        self.sequence = sequence
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[np.float32] = []
        self.top: list[tuple[np.ndarray, np.ndarray]] = []  # empty where none is asked for
        self.failure: str | None = None

    @property
    def finished(self) -> bool:
        return self.text.finish_reason is not None

    def abort(self, failure: str | None = None) -> None:
        """Ends it from outside; `failure` says why if it was not the user."""
        self.failure = failure
        self.text.finish("abort")

    def push(
        self, token: int, logprob: np.float32, top: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        self.text.push(token)


class ActiveRequest:
    """A request and its completions.

    Args:
      request: what the user asked for.
      seq_ids: the engine's counter of sequences.
      tokenizer: for the text; None: ids only.
      eos_token_ids: the model's.
      max_model_len: a sequence of this length ends.
      claimed: whether somebody waits for this very request (`generate`, a stream); what nobody
        claims is handed out by `Engine.step`.
    """

    def __init__(
        self,
        request: Request,
        *,
        seq_ids: Iterator[int],
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        claimed: bool = False,
    ) -> None:
        self.request = request
        self.claimed = claimed
        self.final: RequestOutput | None = None  # once it is done
        self.num_shown = 0  # tokens that a stream has yielded
        self.params = request.sampling_params.with_seed()
        self.added_at = time.perf_counter()
        self.first_token_at: float | None = None
        self._max_model_len = max_model_len
        prompt = list(request.prompt_token_ids)
        self.completions = [
            ActiveCompletion(
                index,
                ScheduledSequence(seq_id=next(seq_ids), token_ids=list(prompt)),
                CompletionText(tokenizer, self.params, eos_token_ids=eos_token_ids),
                row_sampling(self.params, sample_index=index),
            )
            for index in range(self.params.n)
        ]
        # Prompt tokens are scored from their logits, which the cache does not hold, so they are
        # computed again. The bits are the same.
        if self.params.prompt_logprobs is not None:
            self.completions[0].sequence.reads_cache = False
        self.num_left = len(self.completions)  # those that the engine still schedules
        self._by_seq = {c.sequence.seq_id: c for c in self.completions}
        self._prompt_logprobs = np.full(len(prompt), np.nan, np.float32)
        self._prompt_top: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(prompt)
        self._prompt_scored = np.zeros(len(prompt), bool)

    @property
    def num_drawn(self) -> int:
        """Tokens of all completions so far."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def completion_of(self, seq_id: int) -> ActiveCompletion:
        """The completion that a sequence belongs to."""
        return self._by_seq[seq_id]

    def logit_rows(self, index: int, item: PlannedSequence, first: int) -> list[LogitRow]:
        """The rows of logits that this item of a plan needs; `first` is its first flat row."""
        completion = self._by_seq[item.sequence.seq_id]
        rows = []
        if self.params.prompt_logprobs is not None and completion.index == 0:
            prompt = self.request.prompt_token_ids
            for place in range(item.start + 1, min(item.start + item.count + 1, len(prompt))):
                if not self._prompt_scored[place]:
                    row = first + place - 1 - item.start
                    rows.append(
                        LogitRow(
                            row=row,
                            item=index,
                            position=place,
                            target=prompt[place],
                            sampling=completion.sampling,
                            top=self.params.prompt_logprobs,
                        )
                    )
        if item.draws:
            row, place = first + item.count - 1, item.start + item.count
            rows.append(
                LogitRow(
                    row=row,
                    item=index,
                    position=place,
                    target=CHOOSE,
                    sampling=completion.sampling,
                    top=self.params.logprobs or 0,
                )
            )
        return rows

    def ends_with_next(self, seq_id: int) -> bool:
        """Whether the next token is the last one that its completion has room for."""
        drawn = len(self._by_seq[seq_id].token_ids) + 1
        full = len(self.request.prompt_token_ids) + drawn
        return drawn >= self.params.max_tokens or full >= self._max_model_len

    def take(
        self, seq_id: int, row: LogitRow, result: RowResults, index: int, later: int = 0
    ) -> int | None:
        """Records one row of a step's result; returns the token that was drawn, if one was.

        `later` is how many positions behind the row this result stands.
        """
        completion = self._by_seq[seq_id]
        if completion.finished:
            return None
        if result.bad_row[index]:
            position = row.position + later
            completion.abort(
                f"the logits of request {self.request.request_id!r} at position {position} "
                "hold NaN or no finite maximum"
            )
            return None
        top = (result.top_ids[index], result.top_logprobs[index]) if row.top else None
        if row.target != CHOOSE:
            self._prompt_logprobs[row.position] = result.logprob[index]
            self._prompt_top[row.position] = top
            self._prompt_scored[row.position] = True
            return None
        token = int(result.token[index])
        completion.push(token, result.logprob[index], top)
        full = len(self.request.prompt_token_ids) + len(completion.token_ids)
        if not completion.finished and full >= self._max_model_len:
            completion.text.finish("length")
        return token

    def fail(self, seq_id: int, error: Exception) -> None:
        """Ends a completion whose own text or bookkeeping raised."""
        completion = self._by_seq[seq_id]
        completion.failure = f"{type(error).__name__}: {error}"
        completion.text.finish_reason = "abort"

    def output(self, identity: Callable[[], str], weights_version: int) -> RequestOutput:
        """What there is so far, as the user sees it; `identity` is asked when the user is."""
        outputs = [self._completion_output(c, identity, weights_version) for c in self.completions]
        scored = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=self._prompt_logprobs if scored else None,
            prompt_top_logprobs=self._prompt_top_logprobs() if scored else None,
            sampling_params=self.params,
            identity=identity,
            weights_version=weights_version,
        )

    def _completion_output(
        self, completion: ActiveCompletion, identity: Callable[[], str], weights_version: int
    ) -> CompletionOutput:
        count = self.params.logprobs
        top = None
        if count is not None:
            rows = [(ids[:count], values[:count]) for ids, values in completion.top]
            top = _stack(rows or _no_top(len(completion.token_ids)), count)
        return CompletionOutput(
            index=completion.index,
            token_ids=completion.token_ids,
            text=completion.text.text,
            logprobs=np.asarray(completion.logprobs, np.float32),
            top_logprobs=top,
            finish_reason=completion.text.finish_reason,
            stop_reason=completion.failure or completion.text.stop_reason,
            seed=self.params.seed,
            identity=identity,
            weights_version=weights_version,
        )

    def _prompt_top_logprobs(self) -> TopLogprobs | None:
        count = self.params.prompt_logprobs
        if not count:
            return None
        blank = (np.full(count, -1, np.int32), np.full(count, np.nan, np.float32))
        rows = [blank if t is None else (t[0][:count], t[1][:count]) for t in self._prompt_top]
        return _stack(rows, count)


def _no_top(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What `logprobs=0` reports: a row without columns for each token."""
    return [(np.zeros(0, np.int32), np.zeros(0, np.float32))] * count


def _stack(rows: Sequence[tuple[np.ndarray, np.ndarray]], count: int) -> TopLogprobs:
    ids = np.array([ids for ids, _ in rows], np.int32).reshape(len(rows), count)
    values = np.array([values for _, values in rows], np.float32).reshape(len(rows), count)
    return TopLogprobs(token_ids=ids, logprobs=values)
