"""Decides which tokens the next step computes. Host only, no jax.

There are no prefill and decode phases. A sequence has tokens (its prompt and what was drawn so
far) and a number of them whose keys are in the cache; the rest is to be caught up. A step gives
every running sequence some of that, within a token budget, first come first served. When pages
run out, the sequence that came last is preempted: its pages are freed and its tokens caught up
again later. None of this can change a bit of any sequence.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from .page_pool import PagePool
from .prefix_cache import PrefixCache


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the cache; all of it is schedule.

    Attributes:
      max_num_seqs: sequences in one step.
      max_num_batched_tokens: tokens in one step.
      num_pages, page_size: the cache.
      max_model_len: longest sequence in tokens.
      prefix_caching: whether sequences that begin alike share the pages of that beginning.
      decode_steps: tokens that one plan may draw for each sequence, when all do nothing else.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    max_model_len: int
    prefix_caching: bool = True
    decode_steps: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_pages",
            "page_size",
            "max_model_len",
            "decode_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One completion on its way.

    Attributes:
      seq_id: unique in the engine.
      token_ids: the prompt and every token drawn so far.
      num_computed: tokens whose keys and values are in the cache.
      pages: page ids in order of position.
      page_keys: the prefix cache's keys of the first full pages.
      reads_cache: False for one whose every token must be computed, since its logits are wanted.
    """

    seq_id: int
    token_ids: list[int]
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    reads_cache: bool = True

    @property
    def num_behind(self) -> int:
        """Tokens to catch up; 1 for a sequence that draws a token each step."""
        return len(self.token_ids) - self.num_computed


class PlannedSequence(NamedTuple):
    """Tokens start .. start + count - 1 of a sequence, to be computed in this step.

    A named tuple, since hundreds of them are made for every step.
    """

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
    """What one step computes, in the order of the flat batch.

    Attributes:
      items: each sequence's part.
      num_steps: how often the model runs; more than 1 when each item is the one last token of its
        sequence: then the token drawn is the next run's.
      num_preempted: sequences that were sent back to wait, to be caught up again.
      num_reused: tokens of newly admitted sequences that need no computing, thanks to the cache.
    """

    items: tuple[PlannedSequence, ...]
    num_steps: int = 1
    num_preempted: int = 0
    num_reused: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)


class Scheduler:
    """First come first served under a token budget, with preemption by recompute."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.cache = PrefixCache(self.pool, page_size=config.page_size)
        # By seq_id, first come first.
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        """Queues a sequence behind all others.

        Raises:
          ValueError: it is queued already, or too long.
        """
        if sequence.seq_id in self._waiting or sequence.seq_id in self._running:
            raise ValueError(f"sequence {sequence.seq_id} is already scheduled")
        self.check_fits(len(sequence.token_ids) + 1)
        self._waiting[sequence.seq_id] = sequence

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do; pages are assigned here."""
        items: list[PlannedSequence] = []
        preempted = self._plan_running(items)
        reused = 0
        # Pages are short after a preemption: nobody new before those who were sent back.
        if self._waiting and not preempted:
            reused = self._plan_waiting(items)
        # The first running sequence may take every page, and one sequence always fits.
        assert items or not self.num_unfinished
        if not items:
            return None
        num_steps = self.config.decode_steps
        if num_steps > 1 and not self._room_to_go_on(items, num_steps):
            num_steps = 1
        if num_steps > 1:
            items = [self._with_pages(item, num_steps) for item in items]
        return StepPlan(
            items=tuple(items), num_steps=num_steps, num_preempted=preempted, num_reused=reused
        )

    def plan_one_on(self, plan: StepPlan) -> StepPlan | None:
        """The step after one that is on its way, if that step's tokens decide nothing about it.

        Args:
          plan: runs now and was not committed yet; what was before it was.

        Returns:
          The same sequences, each one token further, with pages for that; None where a sequence
          may be admitted, is not drawing, or has gone, or where pages or context do not suffice.
        """
        config = self.config
        could_admit = self._waiting and len(self._running) < config.max_num_seqs
        if plan.num_steps > 1 or could_admit or len(plan.items) != len(self._running):
            return None
        short = []
        for sequence, start, count, _ in plan.items:
            drawing = count == 1 and start + 1 == len(sequence.token_ids)
            if not drawing or sequence.seq_id not in self._running:
                return None
            if start + 2 > config.max_model_len:
                return None
            if start + 2 > len(sequence.pages) * config.page_size:
                short.append(sequence)
        if len(short) > self.pool.num_free:
            return None
        for sequence in short:
            sequence.pages += self.pool.take(1)
        items = (PlannedSequence(s, start + 1, 1, tuple(s.pages)) for s, start, _, _ in plan.items)
        return StepPlan(items=tuple(items))

    def commit(self, plan: StepPlan, tokens: Mapping[int, list[int]]) -> None:
        """Records a step that ran: what it computed and the tokens each drawing sequence drew.

        Args:
          plan: what ran.
          tokens: by sequence; at most one for each of the plan's runs, fewer for a sequence that
            ended on the way.
        """
        size = self.config.page_size
        for item in plan.items:
            sequence = item.sequence
            if sequence.seq_id not in self._running:
                continue  # it ended while this step was on its way
            drawn = tokens.get(sequence.seq_id, ())
            sequence.token_ids += drawn
            # The last token drawn has been through no run.
            sequence.num_computed = item.start + item.count + max(0, len(drawn) - 1)
            if self.config.prefix_caching and sequence.num_computed // size > item.start // size:
                self.cache.extend_keys(sequence.page_keys, sequence.token_ids)
                for page in range(item.start // size, sequence.num_computed // size):
                    self.cache.add(sequence.page_keys[page], sequence.pages[page])

    def roll_back(self) -> None:
        """After a step that failed: nothing in the cache is trusted, everything is caught up again.

        Sequences keep their tokens and their order; no page is in use afterwards.
        """
        self.cache.clear(weights_version=self.cache.weights_version)
        while self._running:
            self._preempt(next(reversed(self._running.values())))

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Takes a sequence out, finished or aborted, and frees its pages.

        Args:
          sequence: running or waiting.
          forget: its keys are not to be trusted: no other sequence may find its pages.

        Raises:
          ValueError: it is not scheduled.
        """
        for queue in (self._running, self._waiting):
            if queue.pop(sequence.seq_id, None) is not None:
                break
        else:
            raise ValueError(f"sequence {sequence.seq_id} is not scheduled")
        if forget:
            for page in sequence.pages:
                self.cache.forget(page)
        self._free(sequence)

    def _room_to_go_on(self, items: list[PlannedSequence], num_steps: int) -> bool:
        """Whether all there is to do is to draw, and pages and context hold that many tokens."""
        could_admit = self._waiting and len(self._running) < self.config.max_num_seqs
        if could_admit or any(item.count > 1 or not item.draws for item in items):
            return False
        sequences = [item.sequence for item in items]
        longest = max(len(sequence.token_ids) for sequence in sequences)
        missing = sum(self._pages_missing(sequence, num_steps) for sequence in sequences)
        fits = longest + num_steps - 1 <= self.config.max_model_len
        return fits and len(items) == len(self._running) and missing <= self.pool.num_free

    def _with_pages(self, item: PlannedSequence, num_steps: int) -> PlannedSequence:
        sequence = item.sequence
        sequence.pages += self.pool.take(self._pages_missing(sequence, num_steps))
        return item._replace(pages=tuple(sequence.pages))

    def _plan_running(self, items: list[PlannedSequence]) -> int:
        budget = self.config.max_num_batched_tokens
        size = self.config.page_size
        preempted = 0
        for sequence in list(self._running.values()):
            if not budget:
                break
            if preempted and sequence.seq_id not in self._running:
                continue  # preempted for one before it
            # Written out: with hundreds of sequences this loop is the host's work of a step.
            computed = sequence.num_computed
            count = min(len(sequence.token_ids) - computed, budget)
            if computed + count > len(sequence.pages) * size:
                count, sent_back = self._make_room(sequence, count)
                preempted += sent_back
                if count == 0:
                    continue
            items.append(PlannedSequence(sequence, computed, count, tuple(sequence.pages)))
            budget -= count
        return preempted

    def _make_room(self, sequence: Sequence, count: int) -> tuple[int, int]:
        """Takes pages for a running sequence's next tokens, from those who came last if need be.

        Returns:
          How many of the tokens there is room for; how many sequences were sent back to wait, this
          one among them when there is room for none.
        """
        needed = self._pages_missing(sequence, count)
        preempted = 0
        while needed > self.pool.num_free:
            last = next(reversed(self._running.values()))
            if last is sequence:
                break
            self._preempt(last)
            preempted += 1
        if needed > self.pool.num_free:
            # It came last itself: it shrinks to the pages that are there, or waits.
            count = self._tokens_that_fit(sequence, count)
            if count == 0:
                self._preempt(sequence)
                return 0, preempted + 1
        sequence.pages += self.pool.take(self._pages_missing(sequence, count))
        return count, preempted

    def _plan_waiting(self, items: list[PlannedSequence]) -> int:
        """Admits sequences to the step; returns the tokens that they need not compute."""
        budget = self.config.max_num_batched_tokens - sum(item.count for item in items)
        # Pages that running sequences still lack for the tokens they have: not to be given away.
        promised = sum(self._pages_missing(s, s.num_behind + 1) for s in self._running.values())
        coming = self._pages_coming()
        reused = 0
        candidates = list(islice(self._waiting.values(), self.config.max_num_seqs))
        for sequence in candidates:
            if not budget or len(self._running) >= self.config.max_num_seqs:
                break
            hits = self._find(sequence)
            if self._next_key(sequence, len(hits)) in coming:
                continue  # another sequence is computing its next page: it will find it there
            start = len(hits) * self.config.page_size
            count = min(len(sequence.token_ids) - start, budget)
            missing = self._pages_for(len(sequence.token_ids) + 1) - len(hits)
            kept = sum(not self.pool.is_held(page) for page in hits)
            if missing + kept + promised > self.pool.num_free:
                break
            for page in hits:
                self.pool.hold(page)
            sequence.pages, sequence.num_computed = hits, start
            del self._waiting[sequence.seq_id]
            self._running[sequence.seq_id] = sequence
            sequence.pages += self.pool.take(self._pages_missing(sequence, count))
            items.append(
                PlannedSequence(
                    sequence=sequence, start=start, count=count, pages=tuple(sequence.pages)
                )
            )
            promised += self._pages_missing(sequence, sequence.num_behind + 1)
            coming |= self._pages_coming_of(sequence)
            budget -= count
            reused += start
        return reused

    def _find(self, sequence: Sequence) -> list[int]:
        """Pages that hold a beginning of the sequence, its last token never among it.

        The last token is always computed: the next one is drawn from its logits.
        """
        if not self.config.prefix_caching:
            return []
        self.cache.extend_keys(sequence.page_keys, sequence.token_ids)
        if not sequence.reads_cache:
            return []
        most = (len(sequence.token_ids) - 1) // self.config.page_size
        return self.cache.find(sequence.page_keys[:most])

    def _next_key(self, sequence: Sequence, num_found: int) -> bytes | None:
        most = (len(sequence.token_ids) - 1) // self.config.page_size
        if not sequence.reads_cache or not self.config.prefix_caching or num_found >= most:
            return None
        return sequence.page_keys[num_found]

    def _pages_coming(self) -> set[bytes]:
        """Keys of the pages that running sequences are about to compute."""
        coming: set[bytes] = set()
        for sequence in self._running.values():
            coming |= self._pages_coming_of(sequence)
        return coming

    def _pages_coming_of(self, sequence: Sequence) -> set[bytes]:
        if not self.config.prefix_caching or sequence.num_behind == 1:
            return set()
        self.cache.extend_keys(sequence.page_keys, sequence.token_ids)
        return set(sequence.page_keys[sequence.num_computed // self.config.page_size :])

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._free(sequence)
        sequence.num_computed = 0
        self._waiting[sequence.seq_id] = sequence
        self._waiting.move_to_end(sequence.seq_id, last=False)

    def _free(self, sequence: Sequence) -> None:
        # The last page first: a beginning is of use without what follows, and not the reverse.
        self.pool.give_back(reversed(sequence.pages))
        sequence.pages = []

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return max(0, self._pages_for(sequence.num_computed + count) - len(sequence.pages))

    def _tokens_that_fit(self, sequence: Sequence, count: int) -> int:
        pages = len(sequence.pages) + self.pool.num_free
        return min(count, pages * self.config.page_size - sequence.num_computed)
