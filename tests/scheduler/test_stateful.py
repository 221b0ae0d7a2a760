"""Random life of a scheduler: arrivals, cancels, failures, tight memory, for thousands of steps.

The scripted device verifies every plan against its own memory, the books are proven after every
rule, and in the end each sequence that was left alone has exactly the tokens that it would have got
alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.errors import QueueFullError
from deepinfer.types import FinishReason

STEMS = [[1] * 9, [1] * 4 + [2] * 9, [3, 1, 4, 1, 5, 9, 2, 6]]


class SchedulerLife(RuleBasedStateMachine):
    rig_class: type

    def __init__(self) -> None:
        super().__init__()
        self.events = asyncio.new_event_loop()
        self.sequences = []
        self.cancelled = set()

    @initialize(
        num_blocks=st.integers(16, 26),
        num_slots=st.integers(2, 7),
        overlap=st.booleans(),
        prefix_caching=st.booleans(),
        replay_tokens=st.sampled_from([0, 0, 3]),
        budget=st.integers(8, 40),
        beside=st.integers(1, 16),
    )
    def build(self, num_blocks, num_slots, overlap, prefix_caching, replay_tokens, budget, beside):
        self.rig = self.rig_class(
            num_blocks=num_blocks,
            num_slots=num_slots,
            overlap=overlap,
            prefix_caching=prefix_caching,
            replay_tokens=replay_tokens,
            max_num_batched_tokens=budget,
            max_prefill_tokens_beside_decode=beside,
            max_waiting_requests=30,
            max_skips=3,
            max_model_len=60,
            step_time=lambda plan: 0.01 * plan.num_tokens,
        )
        self.rig.device.hold()
        self.wait(self._start())

    async def _start(self) -> None:
        self.rig.start()

    def wait(self, awaitable):
        return self.events.run_until_complete(awaitable)

    @rule(
        prompts=st.lists(
            st.tuples(
                st.sampled_from(STEMS),
                st.integers(1, 9),
                st.lists(st.integers(0, 9), max_size=20),
                st.integers(1, 40),
            ),
            min_size=1,
            max_size=6,
        ),
        priority=st.integers(-1, 2),
        stops=st.sets(st.integers(0, 49), max_size=2),
        lives_s=st.one_of(st.none(), st.none(), st.floats(0.01, 60.0)),
    )
    def arrive(self, prompts, priority, stops, lives_s):
        for stem, keep, tail, max_tokens in prompts:
            self._arrive(stem[:keep] + tail, max_tokens, priority, stops, lives_s)

    def _arrive(self, prompt, max_tokens, priority, stops, lives_s):
        deadline_s = None if lives_s is None else self.rig.clock.now() + lives_s
        try:
            sequence = self.rig.submit(
                prompt,
                max_tokens,
                priority=priority,
                stop_token_ids=tuple(stops),
                deadline_s=deadline_s,
            )
        except QueueFullError:
            assert self.rig.state.waiting.num_requests >= 30  # the preempted come on top
        else:
            self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 10**6))
    def leave(self, which):
        sequence = self.sequences[which % len(self.sequences)]
        if self.rig.cancel(sequence):
            self.cancelled.add(sequence.id)

    @rule(ahead=st.integers(1, 4))
    def break_a_step(self, ahead):
        self.rig.device.fail(self.rig.state.step_number + ahead)

    @rule(num_steps=st.integers(1, 12), seconds=st.floats(0.0, 1.0))
    def run_steps(self, num_steps, seconds):
        self.rig.device.release(num_steps)
        self.wait(self.rig.turn(6))
        for _ in range(num_steps):
            self.rig.clock.advance(0.05 + seconds)
            self.wait(self.rig.turn(6))
        self.rig.device.hold()

    @invariant()
    def books_balance(self):
        if hasattr(self, "rig"):
            self.rig.state.check()
            assert not self.rig.device.violations

    def teardown(self):
        try:
            if hasattr(self, "rig"):
                self._finish()
        finally:
            self.events.close()

    def _finish(self):
        self.rig.device.release()
        self.wait(self.rig.finish_all(*self.sequences))
        self.wait(self.rig.settle())
        self.wait(self.rig.close())
        assert self.rig.state.pool.num_held == 0
        assert self.rig.state.slot_pool.available == self.rig.state.slot_pool.num_slots - 1
        for sequence in self.sequences:
            whole = self.rig.alone(sequence)
            got = sequence.new_token_ids
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == whole
            else:
                assert got == whole[: len(got)]
                expected = {FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.CANCELLED}
                assert sequence.finish_reason in expected
            assert (sequence.finish_reason is FinishReason.CANCELLED) == (
                sequence.id in self.cancelled
            )
            assert sequence.num_output_tokens == len(got)
        self.seen.update(sequence.finish_reason for sequence in self.sequences)
        self.seen["steps"] += self.rig.state.step_number
        self.seen["preemptions"] += self.rig.state.num_preemptions
        self.seen["hits"] += self.rig.state.prefix.hits_tokens


def test_no_life_breaks_the_books(rig_class):
    seen = _live(50, 40, rig_class, tuple(Phase))
    # A run without these would have proven little.
    assert seen["steps"] > 2_000
    assert seen["preemptions"] > 50
    assert seen["hits"] > 500
    assert all(seen[reason] > 5 for reason in FinishReason), seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_long_life_breaks_the_books(rig_class):
    # Without shrinking: a failure of this size takes minutes to make small.
    assert _live(150, 60, rig_class, (Phase.generate,))["steps"] > 10_000


def _live(examples, steps, rig_class, phases):
    seen = Counter()
    life = type("Life", (SchedulerLife,), {"rig_class": rig_class, "seen": seen})
    life.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=phases,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    life.TestCase().runTest()
    return seen
