"""Decides which tokens the next step computes. Host only, no jax.

There are no prefill and decode phases. A sequence has tokens (its prompt and what was drawn so
far) and a number of them whose keys are in the cache; the rest is to be caught up. A step gives
every running sequence some of that, within a token budget, first come first served. When pages
run out, the sequence that came last is preempted: its pages are freed and its tokens caught up
again later. None of this can change a bit of any sequence.
"""

from collections import deque
from dataclasses import dataclass, field

from .page_pool import PagePool


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the cache; all of it is schedule.

    Attributes:
      max_num_seqs: sequences in one step.
      max_num_batched_tokens: tokens in one step.
      num_pages, page_size: the cache.
      max_model_len: longest sequence in tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_pages",
            "page_size",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One completion on its way.

    Attributes:
      seq_id: unique in the engine.
      token_ids: the prompt and every token drawn so far.
      num_computed: tokens whose keys and values are in the cache.
      pages: page ids in order of position.
    """

    seq_id: int
    token_ids: list[int]
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_behind(self) -> int:
        """Tokens to catch up; 1 for a sequence that draws a token each step."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, kw_only=True)
class PlannedSequence:
    """Tokens start .. start + count - 1 of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    pages: tuple[int, ...]

    @property
    def draws(self) -> bool:
        """Whether the last of these tokens is the last one known, so that a next one is drawn."""
        return self.start + self.count == len(self.sequence.token_ids)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step computes, in the order of the flat batch."""

    items: tuple[PlannedSequence, ...]
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)


class Scheduler:
    """First come first served under a token budget, with preemption by recompute."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def check_fits(self, num_tokens: int) -> None:
        """Raises ValueError when a sequence of this length can never be computed."""
        if num_tokens > self.config.max_model_len:
            raise ValueError(
                f"a sequence of {num_tokens} tokens exceeds max_model_len="
                f"{self.config.max_model_len}"
            )
        if self._pages_for(num_tokens) > self.config.num_pages:
            raise ValueError(
                f"a sequence of {num_tokens} tokens needs {self._pages_for(num_tokens)} pages of "
                f"{self.config.page_size} tokens; the cache has {self.config.num_pages}"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind all others."""
        self.check_fits(len(sequence.token_ids) + 1)
        self._waiting.append(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do; pages are assigned here."""
        budget = self.config.max_num_batched_tokens
        items: list[PlannedSequence] = []
        preempted = 0
        for sequence in list(self._running):
            if sequence not in self._running:
                continue  # preempted for one before it
            count = min(sequence.num_behind, budget)
            if count == 0:
                continue
            needed = self._pages_missing(sequence, count)
            while needed > self.pool.num_free and self._running[-1] is not sequence:
                self._preempt(self._running[-1])
                preempted += 1
            if needed > self.pool.num_free:
                # It came last itself: it waits, or shrinks to the pages that are there.
                count = self._tokens_that_fit(sequence, count)
                if count == 0:
                    self._preempt(sequence)
                    preempted += 1
                    continue
            items.append(self._take(sequence, count))
            budget -= count
        while self._waiting and budget and len(self._running) < self.config.max_num_seqs:
            if preempted:
                break  # pages are short: nobody new before those who were sent back
            sequence = self._waiting[0]
            count = min(sequence.num_behind, budget)
            if self._pages_missing(sequence, count) > self.pool.num_free:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            items.append(self._take(sequence, count))
            budget -= count
        if not items:
            return None
        return StepPlan(items=tuple(items), num_preempted=preempted)

    def commit(self, plan: StepPlan, tokens: dict[int, int]) -> None:
        """Records a step that ran: what it computed and the token each drawing sequence drew."""
        for item in plan.items:
            sequence = item.sequence
            sequence.num_computed = item.start + item.count
            if sequence.seq_id in tokens:
                sequence.token_ids.append(tokens[sequence.seq_id])

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, finished or aborted, and frees its pages."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            raise ValueError(f"sequence {sequence.seq_id} is not scheduled")
        self._free(sequence)

    def _take(self, sequence: Sequence, count: int) -> PlannedSequence:
        sequence.pages += self.pool.take(self._pages_missing(sequence, count))
        return PlannedSequence(
            sequence=sequence,
            start=sequence.num_computed,
            count=count,
            pages=tuple(sequence.pages),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.pages)
        sequence.pages = []

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return self._pages_for(sequence.num_computed + count) - len(sequence.pages)

    def _tokens_that_fit(self, sequence: Sequence, count: int) -> int:
        pages = len(sequence.pages) + self.pool.num_free
        return min(count, pages * self.config.page_size - sequence.num_computed)
