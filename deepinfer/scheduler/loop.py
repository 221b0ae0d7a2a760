"""The step loop. It names the verbs of the scheduler in their order, twice: overlapped and plain.

    overlapped      admit plan(n) agree(n) forward(n) ┐ collect(n-1) commit(n-1) ┐ sample(n)
    the device                     ···sample(n-1)     └──────── forward(n) ──────┴── sample(n) ···
    plain           admit plan(n) agree(n) forward(n) sample(n) collect(n) commit(n)

In the overlapped loop the host plans step n and commits step n-1 while the device is busy;
launching in two parts means that what needs the tokens of n-1 on the host (masks, stops) arrives
before sampling and never stalls the forward. Both loops give the same tokens.

The loop awaits only what it is given: a Device, an Agreement, a Clock's time, and its own bell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from deepinfer.clock import Clock
from deepinfer.errors import DeviceError
from deepinfer.observe import NoObserver, Observer, StepReport
from deepinfer.scheduler.admit import admit
from deepinfer.scheduler.commit import Committed, commit, fail
from deepinfer.scheduler.plan import plan
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.state import SchedulerState
from deepinfer.step import Device, StepPlan

Deliver = Callable[[list[Sequence]], None]
"""Is given the sequences that have new tokens or ended, after every commit."""


class Agreement(Protocol):
    """How ranks agree on a step before any of them launches it."""

    async def agree(self, step: StepPlan | None) -> StepPlan | None: ...


class Alone:
    """One rank: what it proposes is agreed."""

    async def agree(self, step: StepPlan | None) -> StepPlan | None:
        return step


class StepLoop:
    """Drives one SchedulerState on one Device until `stop()`."""

    def __init__(
        self,
        state: SchedulerState,
        device: Device,
        clock: Clock,
        deliver: Deliver,
        observer: Observer | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self.state = state
        self._device = device
        self._clock = clock
        self._deliver = deliver
        self._observer = observer or NoObserver()
        self._agreement = agreement or Alone()
        self._bell = asyncio.Event()
        self._stopping = False
        self._host_s = 0.0

    def wake(self) -> None:
        """Something was submitted or cancelled."""
        self._bell.set()

    def stop(self) -> None:
        """The loop returns once the steps in flight are in."""
        self._stopping = True
        self._bell.set()

    async def run_overlapped(self) -> None:
        previous: StepPlan | None = None
        while previous is not None or not self._stopping:
            step = await self._agreement.agree(self._admit_and_plan())
            if step is not None:
                self._device.forward(step)
            if previous is not None:
                await self._collect_and_commit(previous)
            if step is not None:
                self._device.sample(step)
            elif previous is None:
                await self._rest()
            previous = step

    async def run_plain(self) -> None:
        while not self._stopping:
            step = await self._agreement.agree(self._admit_and_plan())
            if step is None:
                await self._rest()
                continue
            self._device.forward(step)
            self._device.sample(step)
            await self._collect_and_commit(step)

    def _admit_and_plan(self) -> StepPlan | None:
        if self._stopping:
            return None
        now = self._clock.now()
        expired = self.state.expire(now)
        if expired:
            self._deliver(expired)
        admit(self.state, now)
        step = plan(self.state, now)
        self._host_s += self._clock.now() - now
        return step

    async def _collect_and_commit(self, step: StepPlan) -> None:
        try:
            result = await self._device.collect()
        except DeviceError as error:
            failed = fail(self.state, step, error, self._clock.now())
            self._deliver(failed.sequences)
            return
        now = self._clock.now()
        committed = commit(self.state, step, result, now)
        self._host_s += self._clock.now() - now
        self._report(step, committed, result.device_s)
        self._deliver(committed.sequences)

    def _report(self, step: StepPlan, committed: Committed, device_s: float) -> None:
        num_decode = int((step.count == 1).sum())
        self._observer.on_step(
            StepReport(
                number=step.number,
                num_rows=len(step.slots),
                num_prefill_tokens=step.num_tokens - num_decode,
                num_decode_tokens=num_decode,
                num_sampled_tokens=committed.num_tokens,
                device_s=device_s,
                host_s=self._host_s,
            )
        )
        self._observer.on_token_intervals(committed.token_intervals_s)
        self._host_s = 0.0

    async def _rest(self) -> None:
        """Nothing to launch and nothing in flight: prove the books, then wait for the bell."""
        self.state.check()
        if self.state.has_work and not self._bell.is_set():
            # Preemption emptied the running set: whoever waits fits now and is admitted next.
            assert not self.state.slots.wants.any(), "running sequences that nobody plans"
            await asyncio.sleep(0)
            return
        if not self._stopping:
            await self._bell.wait()
        self._bell.clear()
