"""No page is lost, held twice by mistake, or handed out while somebody holds it."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bi_jax.page_pool import PagePool

NUM_PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: who holds which page, which are remembered, and in what order."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = PagePool(NUM_PAGES, self.evicted.append)
        self.holders: Counter[int] = Counter()
        self.remembered: set[int] = set()
        self.kept: list[int] = []

    @rule(count=st.integers(0, NUM_PAGES))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free pages"):
                self.pool.take(count)
            return
        before = NUM_PAGES - len(self.holders) - len(self.kept)
        self.evicted.clear()
        pages = self.pool.take(count)
        assert len(set(pages)) == count and not set(pages) & set(self.holders)
        # Free pages first, then kept ones, longest ago first.
        assert self.evicted == self.kept[: max(0, count - before)]
        for page in self.evicted:
            self.kept.remove(page)
            self.remembered.remove(page)
        self.holders.update(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.give_back([page])
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            if page in self.remembered:
                self.kept.append(page)

    @rule(page=st.integers(0, NUM_PAGES))
    def hold(self, page: int) -> None:
        if page in self.kept or page in self.holders:
            self.pool.hold(page)
            self.holders[page] += 1
            if page in self.kept:
                self.kept.remove(page)
        else:
            with pytest.raises(ValueError, match="neither held nor kept"):
                self.pool.hold(page)

    @rule(page=st.integers(0, NUM_PAGES))
    def give_back_what_nobody_holds(self, page: int) -> None:
        if page not in self.holders:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.give_back([page])

    @rule(page=st.integers(0, NUM_PAGES))
    def remember(self, page: int) -> None:
        if page in self.holders:
            self.pool.remember(page)
            self.remembered.add(page)
        else:
            with pytest.raises(ValueError, match="cannot be remembered"):
                self.pool.remember(page)

    @rule(page=st.integers(0, NUM_PAGES))
    def forget(self, page: int) -> None:
        self.pool.forget(page)
        self.remembered.discard(page)
        if page in self.kept:
            self.kept.remove(page)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_held == len(self.holders)
        assert self.pool.num_kept == len(self.kept)
        assert self.pool.num_free == NUM_PAGES - len(self.holders)


PoolMachine.TestCase.settings = settings(max_examples=40)
TestPool = PoolMachine.TestCase


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0)
