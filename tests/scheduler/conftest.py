"""A scheduler on a scripted device and a virtual clock: `rig(...)` builds one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest

from deepinfer.clock import VirtualClock
from deepinfer.runtime.scripted import ScriptedDevice, generate_alone, hashed_next_token
from deepinfer.scheduler.loop import StepLoop
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import root_key
from deepinfer.scheduler.sequence import Sequence as ScheduledSequence
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import CacheSpec, StepPlan
from deepinfer.types import FinishReason, Request, SamplingParams

VOCAB_SIZE = 50
BLOCK_TOKENS = 4


class Rig:
    """One rank: state, loop, device, clock. `outputs` collects what the consumers would see."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        num_slots: int = 9,
        max_model_len: int = 64,
        overlap: bool = True,
        prefix_caching: bool = True,
        step_time: Callable[[StepPlan], float] = lambda plan: 0.0,
        replay_tokens: int = 0,
        hit_alignment_tokens: int = 1,
        **policy: int | float,
    ) -> None:
        settings: dict[str, int | float] = {
            "max_num_batched_tokens": 64,
            "max_prefill_tokens_beside_decode": 16,
            "min_prefill_tokens": 4,
            "max_waiting_requests": 1000,
            "max_waiting_tokens": 100_000,
            "max_skips": 8,
        }
        spec = CacheSpec(
            block_tokens=BLOCK_TOKENS,
            block_bytes=1,
            replay_tokens=replay_tokens,
            hit_alignment_tokens=hit_alignment_tokens,
        )
        self.clock = VirtualClock()
        self.plans: list[StepPlan] = []
        self.next_token = hashed_next_token(VOCAB_SIZE)
        self.device = ScriptedDevice(
            spec, num_blocks, num_slots, self.next_token, self.clock, self._step_time(step_time)
        )
        self.state = SchedulerState(
            spec,
            num_blocks,
            num_slots,
            max_model_len,
            Policy(**(settings | policy)),  # type: ignore[arg-type]
            prefix_caching,
        )
        self.token_times: dict[str, list[float]] = {}
        self.loop = StepLoop(self.state, self.device, self.clock, self._deliver)
        self._run = self.loop.run_overlapped if overlap else self.loop.run_plain
        self._ids = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self.max_model_len = max_model_len

    def _step_time(self, duration: Callable[[StepPlan], float]) -> Callable[[StepPlan], float]:
        def noted(plan: StepPlan) -> float:
            self.plans.append(plan)
            return duration(plan)

        return noted

    def _deliver(self, sequences: list[ScheduledSequence]) -> None:
        """Notes when each token came."""
        for sequence in sequences:
            times = self.token_times.setdefault(sequence.id, [])
            times += [self.clock.now()] * (len(sequence.new_token_ids) - len(times))

    def longest_gap(self, sequence: ScheduledSequence) -> float:
        return float(np.diff(self.token_times[sequence.id]).max())

    def sequence(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        stop_check: Callable[[int], str | None] | None = None,
    ) -> ScheduledSequence:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
        request = Request(
            id=f"r{next(self._ids)}",
            prompt_token_ids=np.array(prompt, np.int32),
            params=params,
            seed=0,
            max_total_tokens=min(len(prompt) + max_tokens, self.max_model_len),
            stop_token_ids=stop_token_ids,
            priority=priority,
            arrived_s=self.clock.now(),
            deadline_s=deadline_s,
        )
        return ScheduledSequence(request, root_key("model", BLOCK_TOKENS), stop_check)

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 8, **more: object
    ) -> ScheduledSequence:
        sequence = self.sequence(prompt, max_tokens, **more)  # type: ignore[arg-type]
        self.state.submit(sequence)
        self.loop.wake()
        return sequence

    def cancel(self, sequence: ScheduledSequence) -> bool:
        done = self.state.cancel(sequence, FinishReason.CANCELLED, self.clock.now())
        self.loop.wake()
        return done

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def turn(self, times: int = 1) -> None:
        """Lets everything that can run do so, `times` turns of the event loop."""
        for _ in range(times):
            await asyncio.sleep(0)
            if self._task is not None and self._task.done():
                self._task.result()

    async def until(self, condition: Callable[[], bool], most_turns: int = 200_000) -> None:
        """Runs, moving virtual time to the next event whenever nobody else moves."""
        for _ in range(most_turns):
            if condition():
                return
            await self.turn(4)
            if self.clock.next_wake_s is not None:
                self.clock.advance_to(self.clock.next_wake_s)
        raise AssertionError("it never came true")

    async def finish_all(self, *sequences: ScheduledSequence) -> None:
        await self.until(lambda: all(sequence.finished for sequence in sequences))

    async def settle(self) -> None:
        """Waits until nothing is in flight, then proves the books."""
        await self.until(lambda: not self.device.num_outstanding)
        await self.turn(4)
        self.state.check()
        assert not self.device.violations

    def alone(self, sequence: ScheduledSequence) -> list[int]:
        """What the device says for this sequence when it has the device for itself."""
        request = sequence.request
        prompt = request.prompt_token_ids.tolist()
        num_tokens = request.max_total_tokens - len(prompt)
        return generate_alone(self.next_token, prompt, num_tokens, request.stop_token_ids)

    async def close(self) -> None:
        if self._task is not None:
            self.device.release()
            self.loop.stop()
            await self.until(self._task.done)
            self._task.result()


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    """A factory of started rigs; after the test each is stopped and its books are proven."""
    rigs: list[Rig] = []

    def build(**settings: object) -> Rig:
        made = Rig(**settings)  # type: ignore[arg-type]
        made.start()
        rigs.append(made)
        return made

    yield build
    for made in rigs:
        await made.close()
        made.state.check()
        assert not made.device.violations


@pytest.fixture
def rig_class() -> type[Rig]:
    """For tests that bring their own event loop."""
    return Rig
