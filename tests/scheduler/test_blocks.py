"""Whatever is allocated, shared, published and released, no block is lost or given twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.scheduler.blocks import BlockPool, SlotPool


class Pool(RuleBasedStateMachine):
    """Against a model: a multiset of holders, and the content that idle blocks keep."""

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.pool = BlockPool(8, self.evicted.append)
        self.held: list[int] = []
        self.published: set[int] = set()
        self.idle: list[int] = []  # least recently used first

    @precondition(lambda self: self.pool.available)
    @rule()
    def allocate(self):
        has_free = self.pool.available > self.pool.num_idle
        block = self.pool.allocate()
        assert block not in self.held
        if has_free:
            assert block not in self.published
        else:
            assert block == self.idle.pop(0)
            assert self.evicted[-1] == block
            self.published.remove(block)
        self.held.append(block)

    @precondition(lambda self: self.held or self.idle)
    @rule(which=st.integers(0, 100))
    def share(self, which):
        candidates = sorted(set(self.held) | set(self.idle))
        block = candidates[which % len(candidates)]
        self.pool.retain([block])
        self.held.append(block)
        if block in self.idle:
            self.idle.remove(block)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def publish(self, which):
        block = self.held[which % len(self.held)]
        self.pool.mark_published(block)
        self.published.add(block)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which):
        block = self.held.pop(which % len(self.held))
        self.pool.release([block])
        if block not in self.held and block in self.published:
            self.idle.append(block)

    @invariant()
    def books(self):
        self.pool.check(self.held)
        assert self.pool.num_held == len(set(self.held))
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.available == self.pool.usable - len(set(self.held))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_releasing_twice_is_a_bug_that_shows():
    pool = BlockPool(3, lambda block: None)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_the_check_sees_a_reference_that_no_table_has():
    pool = BlockPool(3, lambda block: None)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check([])


def test_the_lowest_free_slot_is_taken():
    pool = SlotPool(5)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4]
    for slot in (3, 2, 4):
        pool.give_back(slot)
    assert pool.take() == 2
    pool.check({1, 2})
    with pytest.raises(AssertionError, match="a slot is lost"):
        pool.check({1})
