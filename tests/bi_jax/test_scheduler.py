"""Plans under every limit: no page leaks, every sequence ends, nobody starves."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bi_jax.scheduler import Scheduler, SchedulerConfig, Sequence, StepPlan

LIMITS = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 12),
    num_pages=st.integers(6, 14),  # a sequence of 24 tokens fits, just or with room to spare
    page_size=st.just(4),
    max_model_len=st.just(24),
    prefix_caching=st.booleans(),
    decode_steps=st.integers(1, 3),
)


def config(**changes: object) -> SchedulerConfig:
    fields = dict(
        max_num_seqs=4, max_num_batched_tokens=8, num_pages=16, page_size=4, max_model_len=64
    )
    return SchedulerConfig(**{**fields, **changes})  # type: ignore[arg-type]


def drawn_by(sequence: Sequence) -> int:
    """The token that a sequence always draws."""
    return 3 + sequence.seq_id % 2


class Device:
    """What a cache of pages would hold: the token of every slot, and when it was written."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, plan: StepPlan) -> None:
        """Writes every computed token's slot, then reads what each item attends to.

        A slot holds the whole beginning of the sequence up to its token, as keys do.
        """
        written = set()
        for item in plan.items:
            tokens = item.sequence.token_ids + [drawn_by(item.sequence)] * (plan.num_steps - 1)
            for place in range(item.start, item.start + item.count + plan.num_steps - 1):
                slot = self._slot(item.pages, place)
                assert slot not in written, "two tokens of a step share a slot"
                written.add(slot)
                self.slots[slot] = tuple(tokens[: place + 1])
        for item in plan.items:
            tokens = item.sequence.token_ids + [drawn_by(item.sequence)] * (plan.num_steps - 1)
            for place in range(item.start + item.count + plan.num_steps - 1):
                expected = tuple(tokens[: place + 1])
                assert self.slots[self._slot(item.pages, place)] == expected

    def _slot(self, pages: Iterable[int], place: int) -> tuple[int, int]:
        return tuple(pages)[place // self.page_size], place % self.page_size


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, fails and aborts in any order; a simulated device checks what pages hold."""

    @initialize(limits=LIMITS)
    def start(self, limits: SchedulerConfig) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.device = Device(limits.page_size)
        self.ends: dict[int, tuple[Sequence, int]] = {}
        self.added = 0
        self.version = 0

    @rule(
        prompt=st.integers(1, 16),
        more=st.integers(1, 8),
        family=st.integers(0, 2),
        reads_cache=st.booleans(),
    )
    def add(self, prompt: int, more: int, family: int, reads_cache: bool) -> None:
        """Prompts of one family begin alike."""
        tokens = [family] * prompt
        sequence = Sequence(seq_id=self.added, token_ids=tokens, reads_cache=reads_cache)
        self.scheduler.add(sequence)
        self.ends[self.added] = (sequence, prompt + more)
        self.added += 1

    @rule()
    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.ends
            return
        self.check(plan)
        self.device.run(plan)
        drawn: dict[int, list[int]] = {}
        for sequence in (item.sequence for item in plan.items if item.draws):
            _, end = self.ends[sequence.seq_id]
            count = min(plan.num_steps, end - len(sequence.token_ids))  # it may end on the way
            drawn[sequence.seq_id] = [drawn_by(sequence)] * count
        self.scheduler.commit(plan, drawn)
        for seq_id in drawn:
            sequence, end = self.ends[seq_id]
            if len(sequence.token_ids) == end:
                self.remove(seq_id)

    @rule()
    def fail(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.device.slots.clear()  # a failed step leaves nothing to trust
            self.scheduler.roll_back()
            assert self.scheduler.pool.num_free == self.limits.num_pages

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), forget=st.booleans())
    def abort(self, data: st.DataObject, forget: bool) -> None:
        self.remove(data.draw(st.sampled_from(sorted(self.ends))), forget)

    @rule()
    def new_weights(self) -> None:
        if not self.ends:
            self.version += 1
            self.device.slots.clear()
            self.scheduler.cache.clear(weights_version=self.version)

    @rule()
    def finish(self) -> None:
        """Nobody starves: with no new work everything ends within a bound."""
        work = sum(end for _, end in self.ends.values())
        for _ in range(10 + work * (1 + len(self.ends))):
            self.step()
        assert not self.ends

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler.pool
        in_use = {page for sequence, _ in self.ends.values() for page in sequence.pages}
        assert pool.num_held == len(in_use)
        assert pool.num_free == self.limits.num_pages - len(in_use)
        assert self.scheduler.num_unfinished == len(self.ends)

    def remove(self, seq_id: int, forget: bool = False) -> None:
        sequence, _ = self.ends.pop(seq_id)
        self.scheduler.remove(sequence, forget=forget)
        with pytest.raises(ValueError, match="not scheduled"):
            self.scheduler.remove(sequence)

    def check(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.limits.max_num_batched_tokens
        assert plan.num_steps in (1, self.limits.decode_steps)
        assert len(plan.items) <= self.limits.max_num_seqs
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        assert len({item.sequence.seq_id for item in plan.items}) == len(plan.items)
        for item in plan.items:
            assert item.count >= 1 and item.start == item.sequence.num_computed
            assert item.start + item.count <= len(item.sequence.token_ids)
            assert len(item.pages) * self.limits.page_size >= item.start + item.count
            assert len(set(item.pages)) == len(item.pages)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestScheduler = SchedulerMachine.TestCase


def run(scheduler: Scheduler, ends: dict[int, int], sequences: list[Sequence]) -> list[StepPlan]:
    """Steps until every sequence has as many tokens as `ends` says."""
    plans = []
    left = {s.seq_id: s for s in sequences}
    while left:
        plan = scheduler.plan()
        assert plan is not None
        plans.append(plan)
        scheduler.commit(plan, {i.sequence.seq_id: [9] for i in plan.items if i.draws})
        for seq_id, sequence in list(left.items()):
            if len(sequence.token_ids) >= ends[seq_id]:
                scheduler.remove(left.pop(seq_id))
    return plans


def add(scheduler: Scheduler, *lengths: int, token: int | None = None) -> list[Sequence]:
    sequences = [
        Sequence(seq_id=i, token_ids=[i if token is None else token] * length)
        for i, length in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


@given(limits=LIMITS, lengths=st.lists(st.integers(1, 16), min_size=1, max_size=8))
def test_the_first_to_come_is_the_first_to_end(limits: SchedulerConfig, lengths: list[int]):
    limits = dataclasses.replace(limits, decode_steps=1)
    scheduler = Scheduler(limits)
    sequences = add(scheduler, *lengths)
    first = sequences[0]
    steps = 0
    while len(first.token_ids) < lengths[0] + 4:
        plan = scheduler.plan()
        assert plan is not None
        # It is in every step, and gets what it needs before anybody else does.
        assert plan.items[0].sequence is first
        behind = lengths[0] if steps == 0 else first.num_behind
        assert plan.items[0].count == min(behind, limits.max_num_batched_tokens)
        scheduler.commit(plan, {i.sequence.seq_id: [9] for i in plan.items if i.draws})
        for sequence in sequences[1:]:
            if len(sequence.token_ids) >= lengths[sequence.seq_id] + 4 and sequence.pages:
                scheduler.remove(sequence)
        steps += 1
    assert steps == -(-lengths[0] // limits.max_num_batched_tokens) + 3


def test_chunks_share_the_budget_with_sequences_that_draw():
    scheduler = Scheduler(config())
    sequences = add(scheduler, 3, 19)
    plans = run(scheduler, {0: 7, 1: 21}, sequences)
    counts = [[(i.sequence.seq_id, i.start, i.count) for i in p.items] for p in plans]
    assert counts[:4] == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 1), (1, 5, 7)],
        [(0, 4, 1), (1, 12, 7)],
        [(0, 5, 1), (1, 19, 1)],
    ]


def test_the_last_to_come_is_preempted_and_caught_up_again():
    scheduler = Scheduler(config(num_pages=4, max_model_len=16, prefix_caching=False))
    sequences = add(scheduler, 7, 7)
    plans = run(scheduler, {0: 15, 1: 12}, sequences)
    assert sum(plan.num_preempted for plan in plans) >= 1
    assert scheduler.pool.num_free == 4
    computed = sum(plan.num_tokens for plan in plans)
    assert computed > (15 - 1) + (12 - 1)  # some of it twice


def test_a_preempted_sequence_finds_its_own_pages_again():
    def computed(caching: bool) -> int:
        scheduler = Scheduler(config(num_pages=7, max_model_len=24, prefix_caching=caching))
        sequences = add(scheduler, 11, 10)
        plans = run(scheduler, {0: 17, 1: 14}, sequences)
        assert sum(plan.num_preempted for plan in plans) >= 1
        return sum(plan.num_tokens for plan in plans)

    assert computed(True) < computed(False)


def test_samples_of_one_prompt_compute_it_once():
    scheduler = Scheduler(config(max_num_seqs=8, num_pages=32))
    sequences = add(scheduler, 18, 18, 18, 18, token=5)
    plans = run(scheduler, dict.fromkeys(range(4), 20), sequences)
    # 16 of 18 tokens are full pages: the others compute two tokens of the prompt and draw two.
    assert sum(plan.num_tokens for plan in plans) == 18 + 3 * 2 + 4
    assert sum(plan.num_reused for plan in plans) == 3 * 16
    # While they wait for the first one, nobody computes the same page beside it.
    assert [len(plan.items) for plan in plans[:3]] == [1, 1, 4]


def test_others_pass_those_who_wait_for_a_page():
    scheduler = Scheduler(config(max_num_batched_tokens=6))
    first, twin, other = (Sequence(seq_id=i, token_ids=[t] * 9) for i, t in enumerate((1, 1, 2)))
    for sequence in (first, twin, other):
        scheduler.add(sequence)
    plan = scheduler.plan()
    assert plan is not None and [i.sequence for i in plan.items] == [first]
    scheduler.commit(plan, {})
    plan = scheduler.plan()
    assert plan is not None and [i.sequence for i in plan.items] == [first, other]


def test_several_tokens_a_plan_when_all_do_nothing_else():
    scheduler = Scheduler(config(decode_steps=3, num_pages=8, max_model_len=15))
    first, second = add(scheduler, 3, 9)
    steps = []
    while len(first.token_ids) < 15:
        plan = scheduler.plan()
        assert plan is not None
        steps.append((plan.num_steps, plan.num_tokens))
        draws = [item.sequence.seq_id for item in plan.items if item.draws]
        scheduler.commit(plan, {seq_id: [9] * plan.num_steps for seq_id in draws})
        if len(second.token_ids) >= 15 and second.pages:
            scheduler.remove(second)
    # Two to read the prompts; three at a time; one at a time towards the end of the context.
    assert steps == [(1, 8), (1, 5), (3, 2), (3, 2), (3, 1), (1, 1)]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_pages"])
def test_limits_must_be_positive(name: str):
    with pytest.raises(ValueError, match=f"{name}=0 must be positive"):
        config(**{name: 0})


def test_refusals():
    scheduler = Scheduler(config(num_pages=8))
    with pytest.raises(ValueError, match="65 tokens exceeds max_model_len=64"):
        scheduler.add(Sequence(seq_id=1, token_ids=[1] * 64))
    with pytest.raises(ValueError, match="needs 9 pages of 4 tokens; the cache has 8"):
        scheduler.add(Sequence(seq_id=1, token_ids=[1] * 32))
    assert scheduler.plan() is None and scheduler.num_unfinished == 0
    sequence = Sequence(seq_id=1, token_ids=[1])
    scheduler.add(sequence)
    with pytest.raises(ValueError, match="sequence 1 is already scheduled"):
        scheduler.add(sequence)
