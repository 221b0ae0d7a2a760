"""A step's results -> tokens, finishes, published and freed blocks. All or nothing.

Results of a sequence that ended meanwhile are dropped here, and its slot goes back when the last
step in flight with a row of it has come in.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduler.sequence import NUM_STOP_IDS, Sequence
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import StepLogprobs, StepPlan, StepResult
from deepinfer.types import FinishReason, TokenLogprob


class Committed(msgspec.Struct, frozen=True):
    """What a commit changed: the engine wakes the listeners of `sequences`."""

    sequences: list[Sequence]  # have new tokens, or ended
    num_tokens: int
    token_intervals_s: NDArray[np.float64]  # between each new token and its sequence's last one


def commit(state: SchedulerState, plan: StepPlan, result: StepResult, now: float) -> Committed:
    slots = state.slots
    rows = plan.slots.astype(np.int64)
    slots.in_flight[rows] -= 1
    slots.committed[rows] = plan.first + plan.count
    live = np.flatnonzero(plan.samples & slots.wants[rows])
    takers = rows[live]
    token_ids = result.token_ids[live, 0]
    known = slots.known[takers]
    slots.token_ids[takers, known] = token_ids
    slots.known[takers] = known + 1
    _publish_full_blocks(state, rows)

    sequences = _sequences(state, takers)
    for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
        sequence.new_token_ids.append(token_id)
    if result.logprobs is not None:
        _append_logprobs(state, plan, result.token_ids, result.logprobs)
    intervals = now - slots.last_token_s[takers]
    slots.last_token_s[takers] = now
    for sequence in _sequences(state, takers[known == slots.prompt[takers]]):
        sequence.first_token_s = now
    _finish_those_who_end(state, takers, token_ids, known, now)
    _let_go(state, rows)
    return Committed(sequences, len(sequences), intervals[~np.isnan(intervals)])


def fail(state: SchedulerState, plan: StepPlan, error: BaseException, now: float) -> Committed:
    """The step did not run: whoever had a row in it ends with the error, everybody else goes on."""
    slots = state.slots
    rows = plan.slots.astype(np.int64)
    slots.in_flight[rows] -= 1
    lost = _sequences(state, rows[slots.wants[rows]])
    for sequence in lost:
        sequence.error = error
        state.finish(sequence, FinishReason.ERROR, now)
    _let_go(state, rows)
    return Committed(lost, 0, np.zeros(0))


def _sequences(state: SchedulerState, slots: NDArray[np.int64]) -> list[Sequence]:
    every = state.slots.sequences
    return [every[slot] for slot in slots.tolist()]


def _publish_full_blocks(state: SchedulerState, rows: NDArray[np.int64]) -> None:
    slots = state.slots
    full = slots.committed[rows] - slots.published[rows] >= state.spec.block_tokens
    for slot in rows[full & (slots.num_blocks[rows] > 0)].tolist():
        state.publish(slot)


def _append_logprobs(
    state: SchedulerState, plan: StepPlan, token_ids: NDArray[np.int32], logprobs: StepLogprobs
) -> None:
    slots = state.slots
    for index, row in enumerate(logprobs.rows.tolist()):
        slot = int(plan.slots[row])
        sequence = slots.sequences[slot]
        if sequence is None or not (plan.samples[row] and slots.wants[slot]):
            continue
        most = sequence.request.params.logprobs or 0
        ids = logprobs.top_token_ids[index, 0, :most].tolist()
        values = logprobs.top[index, 0, :most].tolist()
        sequence.new_logprobs.append(
            TokenLogprob(
                int(token_ids[row, 0]),
                float(logprobs.chosen[index, 0]),
                tuple(zip(ids, values, strict=True)),
            )
        )


def _finish_those_who_end(
    state: SchedulerState,
    takers: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    known_before: NDArray[np.int64],
    now: float,
) -> None:
    """A stop token id counts first, then a stop string, then the length."""
    slots = state.slots
    may_stop = known_before >= slots.stops_from[takers]
    stops = (token_ids[:, None] == slots.stop_ids[takers]).any(axis=1) & may_stop
    full = known_before + 1 >= slots.limit[takers]
    for index in np.flatnonzero(stops | full | slots.checks[takers]).tolist():
        sequence = slots.sequences[takers[index]]
        assert sequence is not None
        token_id = int(token_ids[index])
        match: str | int | None = None
        if sequence.stop_check is not None:
            match = sequence.stop_check(token_id)
        many = sequence.request.stop_token_ids[NUM_STOP_IDS:]
        if stops[index] or (many and may_stop[index] and token_id in many):
            match = token_id
        if match is not None:
            sequence.stop_match = match
            state.finish(sequence, FinishReason.STOP, now)
        elif full[index]:
            state.finish(sequence, FinishReason.LENGTH, now)


def _let_go(state: SchedulerState, rows: NDArray[np.int64]) -> None:
    """Frees the slots of sequences that ended or were preempted while this step was in flight."""
    slots = state.slots
    gone = (slots.num_blocks[rows] == 0) & (slots.in_flight[rows] == 0)
    for slot in rows[gone].tolist():
        if slots.sequences[slot] is not None:
            state.release_slot_if_idle(slot)
