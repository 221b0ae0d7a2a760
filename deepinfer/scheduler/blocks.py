"""The paged block pool and the slot pool: the only places where blocks and slots change hands.

A block is in exactly one of three states:

    free    refs == 0, holds nothing worth keeping      ── allocate ──▶ held
    held    refs >= 1, in the tables of `refs` sequences
    idle    refs == 0, but published in the prefix index: kept until room is needed (LRU)

The pool does not know sequences or token ids. Block 0 is the dummy that padding rows write to; it
is never handed out.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """`on_evict(block)` is called when an idle block loses its content to a new owner."""
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self._free: deque[int] = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published = np.zeros(num_blocks, np.bool_)
        self._on_evict = on_evict

    @property
    def usable(self) -> int:
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.usable - self.available

    def allocate(self) -> int:
        """A block with one reference. Evicts the least recently used idle block if none is free."""
        if self._free:
            block = self._free.popleft()
        else:
            assert self._idle, "allocate() without an available block"
            block, _ = self._idle.popitem(last=False)
            self._published[block] = False
            self._on_evict(block)
        self.refs[block] = 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference on each; idle blocks become held again."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._idle[block]
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less. Give the tail of a sequence first: it is evicted before its head."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} released more often than held"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self._published[block]:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def mark_published(self, block: int) -> None:
        """The prefix index now knows this held block: keep its content when it is let go."""
        assert self.refs[block] > 0
        self._published[block] = True

    def check(self, held: Iterable[int]) -> None:
        """Proves the books: `held` are all block ids in all tables, with repetitions."""
        counted = np.bincount(np.fromiter(held, np.int64), minlength=self.num_blocks)
        assert counted[0] == 0, "the dummy block is in a table"
        wrong = np.flatnonzero(counted != self.refs)
        assert not wrong.size, f"reference counts differ from the tables for blocks {wrong[:8]}"
        free = np.fromiter(self._free, np.int64, len(self._free))
        idle = np.fromiter(self._idle, np.int64, len(self._idle))
        available = np.concatenate([free, idle])
        assert len(np.unique(available)) == len(available), "a block is available twice"
        assert not self.refs[available].any(), "a held block can be allocated"
        assert not self._published[free].any(), "a free block is published"
        assert self._published[idle].all(), "an idle block is not published"
        num_held = int(np.count_nonzero(self.refs))
        assert num_held + len(available) == self.usable, "a block is lost"


class SlotPool:
    """Slots 1 .. num_slots - 1 (0 is the dummy). The lowest free slot is taken first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots))  # a heap

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def check(self, taken: set[int]) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & taken, f"slots {sorted(free & taken)[:8]} are both free and taken"
        assert free | taken == set(range(1, self.num_slots)), "a slot is lost"
