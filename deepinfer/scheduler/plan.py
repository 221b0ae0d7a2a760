"""(state, now) -> StepPlan: which positions of which sequences the next step computes.

The plan is made before the results of the step in flight are known, as if every sequence went on:
`expected` counts the tokens that step will have sampled. A sequence that turns out to have ended
costs one row that is thrown away.

Everything a step needs is array arithmetic over slots, except what is rare: a block boundary, a
prefill chunk, a preemption.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduler.policy import choose_victim
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import StepPlan

Int64Array = NDArray[np.int64]


def plan(state: SchedulerState, now: float) -> StepPlan | None:
    """The next step, or None if nobody can compute anything now."""
    decode = _decoding_slots(state, now)
    prefill, counts = _prefill_chunks(state, len(decode))
    if not prefill:
        if not len(decode):
            return None
        return _record(state, decode, np.ones(len(decode), np.int64))
    slots = np.concatenate([decode, np.array(prefill, np.int64)])
    return _record(state, slots, np.array([1] * len(decode) + counts, np.int64))


def _decoding_slots(state: SchedulerState, now: float) -> Int64Array:
    """Slots that compute one position, each with a block for it. May preempt to get one."""
    slots, pool = state.slots, state.pool
    decode = np.flatnonzero(slots.decoding & (slots.expected < slots.limit))
    allowance = state.policy.decode_allowance(bool(state.prefilling))
    if len(decode) > allowance:
        decode = _take_turns(state, decode, allowance)
    short = decode[slots.computed[decode] >= slots.capacity[decode]]
    while len(short) > pool.available:
        victim = choose_victim(slots, pool)
        assert victim is not None, "sequences wait for blocks that nobody holds"
        state.preempt(victim, now)
        decode = decode[decode != victim]
        short = short[short != victim]
    for slot in short.tolist():
        state.append_block(slot, pool.allocate())
    return decode


def _take_turns(state: SchedulerState, decode: Int64Array, allowance: int) -> Int64Array:
    """The next `allowance` slots in cyclic order after those of the last step."""
    chosen = np.roll(decode, -int(np.searchsorted(decode, state.turn)))[:allowance]
    state.turn = int(chosen[-1]) + 1
    return np.sort(chosen)


def _prefill_chunks(state: SchedulerState, num_decode: int) -> tuple[list[int], list[int]]:
    """First come, first served from what the step's budget and the pool have left."""
    slots, pool, block_tokens = state.slots, state.pool, state.spec.block_tokens
    left = state.policy.prefill_allowance(num_decode)
    chosen: list[int] = []
    counts: list[int] = []
    for slot in state.prefilling:
        if left <= 0:
            break
        computed, capacity = int(slots.computed[slot]), int(slots.capacity[slot])
        room = capacity + pool.available * block_tokens - computed
        count = min(int(slots.expected[slot]) - computed, left, room)
        if count <= 0:
            continue
        state.grow(slot, computed + count)
        chosen.append(slot)
        counts.append(count)
        left -= count
    return chosen, counts


def _record(state: SchedulerState, rows: Int64Array, counts: Int64Array) -> StepPlan:
    """Books the rows as in flight and writes them down."""
    slots = state.slots
    first = slots.computed[rows]
    end = first + counts
    samples = end == slots.expected[rows]
    slots.computed[rows] = end
    slots.expected[rows] += samples
    slots.in_flight[rows] += 1
    if state.prefilling:
        done = rows[samples]
        slots.decoding[done] = True
        state.prefilling = [slot for slot in state.prefilling if not slots.decoding[slot]]
    starts = tuple(state.starts.values())
    state.starts.clear()
    changes = np.array(state.table_changes, np.int32).reshape(-1, 3)
    state.table_changes.clear()
    state.step_number += 1
    return StepPlan(
        number=state.step_number,
        slots=rows.astype(np.int32),
        first=first.astype(np.int32),
        count=counts.astype(np.int32),
        samples=samples,
        write_from=slots.write_from[rows].astype(np.int32),
        tail_start=np.zeros(len(rows), np.int32),
        num_tokens=int(counts.sum()),
        starts=starts,
        table_slots=changes[:, 0],
        table_columns=changes[:, 1],
        table_blocks=changes[:, 2],
    )
