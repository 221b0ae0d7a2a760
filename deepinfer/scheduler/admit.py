"""Admission: who leaves the waiting room for a slot, and with which part of its prompt cached.

A sequence is admitted when all of its known tokens fit beside what those already admitted still
need. So prompts never dead-lock half-way: whoever decodes may take blocks that were promised, but
once it ends or is preempted the promise holds again. The first that does not fit is passed by later
ones, but at most `max_skips` times: then everybody waits until it fits.
"""

from __future__ import annotations

import numpy as np

from deepinfer.scheduler.prefix import extend_keys
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import SequenceStart


def admit(state: SchedulerState, now: float) -> None:
    """Fills the slots while this step still has prefill budget for newcomers."""
    if not state.waiting:
        return
    budget = state.policy.prefill_allowance(int(np.count_nonzero(state.slots.decoding)))
    budget -= _gap(state)
    passed: list[Sequence] = []
    for sequence in state.waiting.candidates(now, state.policy.look_ahead):
        if budget <= 0 or not state.slot_pool.available:
            sequence.block("budget" if state.slot_pool.available else "slot", now)
            return
        cause = _try(state, sequence, now)
        if cause is None:
            budget -= int(state.slots.expected[sequence.slot] - state.slots.computed[sequence.slot])
            for earlier in passed:
                earlier.skips += 1
            continue
        sequence.block(cause, now)
        if cause == "blocks":
            if sequence.skips >= state.policy.max_skips:
                return
            passed.append(sequence)


def _gap(state: SchedulerState) -> int:
    """Tokens that admitted sequences have still to prefill."""
    slots = state.prefilling
    return int((state.slots.expected[slots] - state.slots.computed[slots]).sum()) if slots else 0


def _try(state: SchedulerState, sequence: Sequence, now: float) -> str | None:
    """Admits the sequence, or says what it waits for: "blocks" or "shared_prefix"."""
    block_tokens = state.spec.block_tokens
    known = len(sequence.token_ids)
    if state.prefix.enabled:
        extend_keys(sequence.keys, sequence.root, sequence.token_ids, block_tokens)
    most = (known - 1) // block_tokens  # one token at least is computed, to sample from
    reach = sequence.reach = state.prefix.reach(sequence.keys, most, sequence.reach)
    if reach < most and state.prefix.is_coming(sequence.keys, reach):
        return "shared_prefix"
    if not _fits(state, known, reach, 0):  # not even if all of the prefix is held already
        return "blocks"
    hits = _align(state, state.prefix.match(sequence.keys, most))
    idle = sum(1 for block in hits if state.pool.refs[block] == 0)  # available now, held then
    if not _fits(state, known, len(hits), idle):
        return "blocks"
    _take_slot(state, sequence, hits, most, now)
    return None


def _align(state: SchedulerState, hits: list[int]) -> list[int]:
    """Shortens a hit to the alignment that the model needs."""
    block_tokens, alignment = state.spec.block_tokens, state.spec.hit_alignment_tokens
    num_hits = len(hits)
    while num_hits * block_tokens % alignment:
        num_hits -= 1
    return hits[:num_hits]


def _fits(state: SchedulerState, known: int, num_hits: int, num_idle_hits: int) -> bool:
    slots, pool, block_tokens = state.slots, state.pool, state.spec.block_tokens
    needed = -(-(known + 1) // block_tokens) - num_hits + num_idle_hits
    admitted = state.prefilling
    promised = (slots.expected[admitted] - slots.capacity[admitted]).clip(0)
    promised_blocks = int((-(-promised // block_tokens)).sum()) if admitted else 0
    # Those who decode will each want a block soon; without that margin they would be preempted.
    margin = int(np.count_nonzero(slots.decoding))
    return needed + promised_blocks + margin <= pool.available


def _take_slot(
    state: SchedulerState, sequence: Sequence, hits: list[int], most: int, now: float
) -> None:
    slots, block_tokens = state.slots, state.spec.block_tokens
    state.waiting.remove(sequence)
    slot = state.slot_pool.take()
    cached = len(hits) * block_tokens
    computed = max(0, cached - state.spec.replay_tokens)
    sequence.slot = slot
    sequence.status = Status.RUNNING
    sequence.block(None, now)
    if sequence.admitted_s is None:
        sequence.admitted_s = now
        sequence.cached_tokens = cached
        sequence.prefix_miss = state.prefix.explain_miss(sequence.keys, len(hits), most)
        state.prefix.queries_tokens += len(sequence.token_ids)
        state.prefix.hits_tokens += cached
    slots.occupy(slot, sequence, cached, computed)
    state.pool.retain(hits)
    for block in hits:
        state.append_block(slot, block)
    if state.prefix.enabled:
        sequence.announced = sequence.keys[len(hits) :]
        state.prefix.announce(sequence.announced)
    _join(state, slot)
    state.starts[slot] = SequenceStart(
        slot=slot,
        token_ids=sequence.token_ids,
        prompt_tokens=len(sequence.request.prompt_token_ids),
        params=sequence.request.params,
        seed=sequence.request.seed,
        stop_token_ids=sequence.request.stop_token_ids,
    )


def _join(state: SchedulerState, slot: int) -> None:
    """Into `prefilling`, or straight to those who decode if only one token is left to compute."""
    if state.slots.expected[slot] - state.slots.computed[slot] > 1:
        state.prefilling.append(slot)
    else:
        state.slots.decoding[slot] = True
