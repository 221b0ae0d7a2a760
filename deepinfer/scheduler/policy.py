"""The choices that are matters of taste, gathered in one place: budgets, bounds and victims."""

from __future__ import annotations

import msgspec
import numpy as np

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.sequence import Slots


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that the scheduler keeps, all but the last two from EngineConfig.

    Decode's bound: a step that decodes carries at most `max_prefill_tokens_beside_decode` prefill
    tokens, so a step's length, and with it the time between two tokens, is bounded.
    Prefill's bound: while anything prefills, decoding leaves `min_prefill_tokens` of the budget; if
    that leaves too little for all who decode, they take turns.
    """

    max_num_batched_tokens: int
    max_prefill_tokens_beside_decode: int
    min_prefill_tokens: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_skips: int
    ageing_s: float = 30.0  # waiting time that is worth one priority class
    look_ahead: int = 16  # waiting requests that are considered when the first does not fit

    def decode_allowance(self, prefill_waits: bool) -> int:
        """How many sequences may decode in a step."""
        reserve = self.min_prefill_tokens if prefill_waits else 0
        return self.max_num_batched_tokens - reserve

    def prefill_allowance(self, num_decode: int) -> int:
        """How many tokens a step may prefill beside `num_decode` decoding rows."""
        left = self.max_num_batched_tokens - num_decode
        return min(left, self.max_prefill_tokens_beside_decode) if num_decode else left


def choose_victim(slots: Slots, pool: BlockPool) -> int | None:
    """The running slot whose preemption costs least, or None if none holds a block.

    First the least important priority class; in it the sequence with the fewest tokens to compute
    again. Blocks that others share stay, so they cost nothing; among equals the latest arrival.
    Whoever would free nothing comes last.
    """
    best: tuple[bool, int, int, float] | None = None
    victim: int | None = None
    for slot in np.flatnonzero(slots.wants & (slots.num_blocks > 0)).tolist():
        sequence = slots.sequences[slot]
        assert sequence is not None
        shared = int(np.count_nonzero(pool.refs[slots.table[slot, : slots.num_blocks[slot]]] > 1))
        block_tokens = int(slots.capacity[slot] // slots.num_blocks[slot])
        lost = int(slots.computed[slot]) - shared * block_tokens
        frees_nothing = bool(shared == slots.num_blocks[slot])
        request = sequence.request
        rank = (frees_nothing, -request.priority, lost, -request.arrived_s)
        if best is None or rank < best:
            best, victim = rank, slot
    return victim
