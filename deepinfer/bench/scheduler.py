"""Host cost of a step: plan and commit for many long sequences, on a device that costs nothing.

The scheduler is the one that serves; only the device is missing. Every sequence has its whole
context in the block pool, computed by chunks through the same plans. Then each step decodes one
token per sequence in the order of the overlapped loop: plan(n), commit(n - 1).

What it costs to wake the consumers, one task and one event per sequence, is measured beside it by
running the real `StepLoop`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from deepinfer.clock import RealClock
from deepinfer.scheduler.admit import admit
from deepinfer.scheduler.commit import commit
from deepinfer.scheduler.loop import StepLoop
from deepinfer.scheduler.plan import plan
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import root_key
from deepinfer.scheduler.sequence import Sequence as ScheduledSequence
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import CacheSpec, StepPlan, StepResult
from deepinfer.types import Request, SamplingParams

WARM_UP_STEPS = 50


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Mean microseconds per step, over `steps` steps."""

    sequences: int
    context_tokens: int
    block_tokens: int
    steps: int
    plan_us: float
    commit_us: float
    host_us: float  # plan + commit, into the outbox
    host_p50_us: float
    host_p99_us: float
    per_sequence_us: float
    wake_us: float  # loop, events and consumers on top of that


class FreeDevice:
    """Implements `step.Device`; the ids it gives are the numbers of the steps."""

    def __init__(self, spec: CacheSpec, num_blocks: int, num_slots: int) -> None:
        self.cache_spec = spec
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, plan: StepPlan, mask: Any | None = None) -> None:
        self._plans.append(plan)

    async def collect(self) -> StepResult:
        await asyncio.sleep(0)
        return result_of(self._plans.pop(0))

    async def close(self) -> None: ...


def result_of(step: StepPlan) -> StepResult:
    num_rows = len(step.slots)
    return StepResult(
        number=step.number,
        token_ids=np.full((num_rows, 1), step.number % 1000, np.int32),
        num_tokens=step.samples.astype(np.int32),
    )


def build(num_sequences: int, context: int, steps: int, block_tokens: int) -> SchedulerState:
    """A scheduler whose sequences have all prefilled their context and are about to decode."""
    outputs = 2 * (steps + WARM_UP_STEPS) + 8
    blocks_each = -(-(context + outputs) // block_tokens)
    num_blocks = num_sequences * blocks_each + 1
    spec = CacheSpec(block_tokens=block_tokens, block_bytes=1)
    policy = Policy(
        max_num_batched_tokens=8 * context + num_sequences,
        max_prefill_tokens_beside_decode=8 * context,
        min_prefill_tokens=1,
        max_waiting_requests=num_sequences,
        max_waiting_tokens=num_sequences * context,
        max_skips=1,
    )
    state = SchedulerState(spec, num_blocks, num_sequences + 1, context + outputs, policy)
    root = root_key("bench", block_tokens)
    random = np.random.default_rng(0)
    for number in range(num_sequences):
        prompt = random.integers(0, 100_000, context, dtype=np.int32)
        request = Request(
            id=str(number),
            prompt_token_ids=prompt,
            params=SamplingParams(),
            seed=number,
            max_total_tokens=context + outputs,
            stop_token_ids=(100_001, 100_002),
        )
        state.submit(ScheduledSequence(request, root))
    while state.waiting or state.prefilling:
        admit(state, 0.0)
        step = plan(state, 0.0)
        assert step is not None
        commit(state, step, result_of(step), 0.0)
    return state


def measure(num_sequences: int, context: int, steps: int, block_tokens: int) -> Point:
    state = build(num_sequences, context, steps, block_tokens)
    planned, committed = _decode(state, steps)
    total = planned + committed
    host_us = float(total.mean())
    loop_us = asyncio.run(_run_loop(state, steps))
    return Point(
        sequences=num_sequences,
        context_tokens=context,
        block_tokens=block_tokens,
        steps=steps,
        plan_us=float(planned.mean()),
        commit_us=float(committed.mean()),
        host_us=host_us,
        host_p50_us=float(np.median(total)),
        host_p99_us=float(np.percentile(total, 99)),
        per_sequence_us=host_us / num_sequences,
        wake_us=loop_us - host_us,
    )


def _decode(state: SchedulerState, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each step's plan (with admission) and commit."""
    clock = time.perf_counter_ns
    planned, committed = np.zeros(steps), np.zeros(steps)
    previous: StepPlan | None = None
    for index in range(-WARM_UP_STEPS, steps):
        begin = clock()
        admit(state, 0.0)
        step = plan(state, 0.0)
        middle = clock()
        if step is None or len(step.slots) != len(state.slots.sequences) - 1:
            raise AssertionError("not every sequence decodes in every step")
        result = result_of(previous) if previous is not None else None
        again = clock()
        if previous is not None and result is not None:
            commit(state, previous, result, 0.0)
        end = clock()
        if index >= 0:
            planned[index], committed[index] = middle - begin, end - again
        previous = step
        if index % 64 == 0:
            for sequence in state.slots.sequences:
                if sequence is not None:
                    sequence.new_token_ids.clear()  # the consumers' part
    assert previous is not None
    commit(state, previous, result_of(previous), 0.0)
    return planned / 1000, committed / 1000


async def _run_loop(state: SchedulerState, steps: int) -> float:
    """Mean microseconds per step of the real loop with one waiting task per sequence."""
    device = FreeDevice(state.spec, state.pool.num_blocks, state.slot_pool.num_slots)
    sequences = [sequence for sequence in state.slots.sequences if sequence is not None]

    def deliver(ready: list[ScheduledSequence]) -> None:
        for sequence in ready:
            if sequence.listener is not None:
                sequence.listener()

    async def consume(sequence: ScheduledSequence) -> None:
        news = asyncio.Event()
        sequence.listener = news.set
        taken = 0
        while taken < steps:
            news.clear()
            await news.wait()
            taken += len(sequence.new_token_ids)
            sequence.new_token_ids = []

    loop = StepLoop(state, device, RealClock(), deliver)
    async with asyncio.TaskGroup() as group:
        consumers = [group.create_task(consume(sequence)) for sequence in sequences]
        await asyncio.sleep(0)
        first = state.step_number
        begin = time.perf_counter()
        running = group.create_task(loop.run_overlapped())
        await asyncio.gather(*consumers)
        spent_s = time.perf_counter() - begin
        num_steps = state.step_number - first
        loop.stop()
        await running
    return 1e6 * spent_s / num_steps


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="deepinfer bench scheduler", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 131_072])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--block-tokens", type=int, default=64)
    parsed = parser.parse_args(arguments)
    heads = ("sequences", "context", "plan us", "commit us", "host us", "p50", "p99", "us/seq")
    print("Host cost of a decode step (mean over steps; host = plan + commit into the outbox)\n")
    print("".join(f"{head:>11}" for head in heads) + f"{'+ wake us':>11}")
    points = []
    for context in parsed.contexts:
        for num_sequences in parsed.sequences:
            point = measure(num_sequences, context, parsed.steps, parsed.block_tokens)
            points.append(point)
            print(
                f"{point.sequences:>11}{point.context_tokens:>11,}{point.plan_us:>11.1f}"
                f"{point.commit_us:>11.1f}{point.host_us:>11.1f}{point.host_p50_us:>11.1f}"
                f"{point.host_p99_us:>11.1f}{point.per_sequence_us:>11.2f}{point.wake_us:>11.1f}",
                flush=True,
            )
    document = {
        "benchmark": "scheduler",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "points": [msgspec.to_builtins(point) for point in points],
    }
    print(json.dumps(document))
    return 0
