"""All that the scheduler knows, and what changes it outside a step: submit, cancel, expire.

    waiting ── admit ──▶ running ── commit ──▶ finished
       ▲                    │  └──── cancel ───────▲
       └──── preempted ◀────┘

Blocks are freed the moment a sequence stops needing them, even while a step that writes to them is
in flight: the device runs steps in the order of their launch, so whoever is given such a block next
writes it later. A slot, in contrast, is kept until the last step with a row of it has come back,
because results are addressed by slot.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import numpy as np

from deepinfer.scheduler.blocks import BlockPool, SlotPool
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import PrefixIndex, extend_keys
from deepinfer.scheduler.queue import WaitingRoom
from deepinfer.scheduler.sequence import Sequence, Slots, Status
from deepinfer.step import CacheSpec, SequenceStart
from deepinfer.types import FinishReason


class SchedulerState:
    """Owner of the slots, the blocks, the prefix index and the waiting room of one rank."""

    def __init__(
        self,
        cache_spec: CacheSpec,
        num_blocks: int,
        num_slots: int,
        max_model_len: int,
        policy: Policy,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.spec = cache_spec
        self.policy = policy
        self.slots = Slots(num_slots, max_model_len, cache_spec.block_tokens)
        self.prefix = PrefixIndex(enable_prefix_caching)
        self.pool = BlockPool(num_blocks, self.prefix.forget)
        self.slot_pool = SlotPool(num_slots)
        self.waiting = WaitingRoom(
            policy.max_waiting_requests, policy.max_waiting_tokens, policy.ageing_s
        )
        self.prefilling: list[int] = []  # slots with a gap above one, in the order of admission
        self.step_number = 0
        self.turn = 0  # whose turn it is when not all can decode in one step
        self.num_preemptions = 0
        self.num_finished: Counter[FinishReason] = Counter()
        # What the next plan tells the device beside its rows:
        self.starts: dict[int, SequenceStart] = {}
        self.table_changes: list[tuple[int, int, int]] = []  # slot, column, block
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._order = itertools.count()

    # --- submit, cancel, expire ---

    def submit(self, sequence: Sequence, tokens_per_s: float = 0.0) -> None:
        """Puts a checked request into the waiting room. Raises `QueueFullError`."""
        self.waiting.push(sequence, tokens_per_s)
        sequence.block("queue", sequence.request.arrived_s)
        deadline_s = sequence.request.deadline_s
        if deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline_s, next(self._order), sequence))

    def cancel(self, sequence: Sequence, reason: FinishReason, now: float) -> bool:
        """Ends a sequence wherever it is, its blocks are free at once. False if it had ended."""
        if sequence.finished:
            return False
        self.finish(sequence, reason, now)
        return True

    def expire(self, now: float) -> list[Sequence]:
        """Cancels the sequences whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if self.cancel(sequence, FinishReason.DEADLINE, now):
                expired.append(sequence)
        return expired

    @property
    def has_work(self) -> bool:
        """Something waits or runs. Sequences that only wait for their last step do not count."""
        return bool(self.waiting) or bool(self.slots.wants.any())

    # --- the ends of a sequence's stay, used by admit, plan and commit ---

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        was_waiting = sequence.status is Status.WAITING
        sequence.block(None, now)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.finished_s = now
        self.num_finished[reason] += 1
        prompt_tokens = len(sequence.request.prompt_token_ids)
        if was_waiting:
            self.waiting.remove(sequence)
            sequence.num_output_tokens = len(sequence.token_ids) - prompt_tokens
        else:
            slot = sequence.slot
            sequence.num_output_tokens = int(self.slots.known[slot]) - prompt_tokens
            self._note_token_time(sequence)
            self.free_blocks(slot)
            self.slots.wants[slot] = self.slots.decoding[slot] = False
            self.release_slot_if_idle(slot)
        sequence.token_ids = sequence.token_ids[:0]
        sequence.keys = []

    def abandon(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence without touching the books: for a loop that failed and will not go on."""
        sequence.status = Status.FINISHED
        sequence.finish_reason = FinishReason.ERROR
        sequence.finished_s = now

    def preempt(self, slot: int, now: float) -> None:
        """Takes a running sequence's blocks; it waits at the head of its line to be resumed.

        Tokens that a step in flight samples for it are still good: random numbers depend on the
        position alone. So it keeps its slot until that step is committed.
        """
        sequence = self.slots.sequences[slot]
        assert sequence is not None
        assert sequence.status is Status.RUNNING
        self.free_blocks(slot)
        sequence.status = Status.PREEMPTED
        sequence.preemptions += 1
        sequence.block("preempted", now)
        self.slots.decoding[slot] = False
        self.num_preemptions += 1
        self.release_slot_if_idle(slot)

    def free_blocks(self, slot: int) -> None:
        slots = self.slots
        sequence = slots.sequences[slot]
        assert sequence is not None
        self.prefix.withdraw(sequence.announced)
        sequence.announced = []
        self.pool.release(reversed(slots.blocks(slot)))
        slots.num_blocks[slot] = slots.capacity[slot] = 0
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        self.starts.pop(slot, None)
        self.table_changes = [change for change in self.table_changes if change[0] != slot]

    def release_slot_if_idle(self, slot: int) -> None:
        """Gives the slot back unless a step in flight has a row of it."""
        slots = self.slots
        if slots.in_flight[slot]:
            return
        sequence = slots.sequences[slot]
        assert sequence is not None
        if sequence.status is Status.PREEMPTED:
            self._note_token_time(sequence)
            sequence.token_ids = slots.token_ids[slot, : slots.known[slot]].copy()
            sequence.status = Status.WAITING
            self.waiting.push_front(sequence)
        sequence.slot = -1
        slots.vacate(slot)
        self.slot_pool.give_back(slot)

    def grow(self, slot: int, positions: int) -> None:
        """Allocates blocks until the slot holds `positions`. The caller made sure there are."""
        slots = self.slots
        while slots.capacity[slot] < positions:
            self.append_block(slot, self.pool.allocate())

    def append_block(self, slot: int, block: int) -> None:
        slots = self.slots
        column = int(slots.num_blocks[slot])
        slots.table[slot, column] = block
        slots.num_blocks[slot] = column + 1
        slots.capacity[slot] += self.spec.block_tokens
        self.table_changes.append((slot, column, block))

    def publish(self, slot: int) -> None:
        """Offers the blocks that are committed in full to the prefix index."""
        slots, block_tokens = self.slots, self.spec.block_tokens
        sequence = slots.sequences[slot]
        assert sequence is not None
        first = int(slots.published[slot]) // block_tokens
        last = int(slots.committed[slot]) // block_tokens
        slots.published[slot] = last * block_tokens
        if not self.prefix.enabled:
            return
        extend_keys(
            sequence.keys,
            sequence.root,
            slots.token_ids[slot, : last * block_tokens],
            block_tokens,
        )
        for column in range(first, last):
            block = int(slots.table[slot, column])
            if self.prefix.publish(block, sequence.keys[column]):
                self.pool.mark_published(block)
        # What was announced at admission starts at the first block that was not cached.
        self.prefix.withdraw(sequence.announced[: last - first])
        del sequence.announced[: last - first]

    def _note_token_time(self, sequence: Sequence) -> None:
        last_token_s = float(self.slots.last_token_s[sequence.slot])
        if not np.isnan(last_token_s):
            sequence.last_token_s = last_token_s

    # --- proof ---

    def check(self) -> None:
        """Proves that every block, slot and sequence is accounted for. Raises AssertionError."""
        slots = self.slots
        taken = {slot for slot, sequence in enumerate(slots.sequences) if sequence is not None}
        self.slot_pool.check(taken)
        self.pool.check(block for slot in taken for block in slots.blocks(slot))
        self.prefix.check()
        self.waiting.check()
        for slot in taken:
            sequence = slots.sequences[slot]
            assert sequence is not None
            assert sequence.slot == slot
            running = sequence.status is Status.RUNNING
            assert running or slots.in_flight[slot] > 0, "a slot is kept for nothing"
            assert running or slots.num_blocks[slot] == 0, "blocks outlive their sequence"
            assert slots.known[slot] <= slots.expected[slot] <= slots.limit[slot]
            assert slots.committed[slot] <= slots.computed[slot] <= slots.expected[slot]
            if running:
                assert slots.computed[slot] <= slots.capacity[slot]
                assert (slot in self.prefilling) != slots.decoding[slot]
        assert not slots.wants[list(set(range(len(slots.wants))) - taken)].any()
        if not taken:
            self.prefix.check_idle()
            assert self.pool.num_held == 0
            assert not self.prefilling
            assert not self.starts
