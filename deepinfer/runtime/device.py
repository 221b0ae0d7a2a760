"""CpuDevice: the runner on one worker thread, behind the Device protocol of `step.py`.

Owns the thread and the line of steps in it. The event loop only enqueues and awaits futures; it
never waits for arithmetic. Knows nothing of models, tensors or requests.

    event loop     forward(n) sample(n)   plan n+1   forward(n+1) sample(n+1)   collect() -> n
    worker thread      └─ forward n ─ sample n ─┴─ forward n+1 ─ sample n+1 ─┘

A step that raises is lost alone: its sample is skipped, its `collect` raises `DeviceError`, and the
steps behind it run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from deepinfer.errors import DeviceError, EngineClosedError, EngineError
from deepinfer.step import CacheSpec, StepPlan, StepResult


class StepRunner(Protocol):
    """What the worker thread drives; `Runner` is one."""

    cache_spec: CacheSpec
    num_blocks: int
    num_slots: int

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, plan: StepPlan, mask: Any | None = None) -> StepResult: ...


class _Step:
    """A step in the line. Only the worker thread touches it until `outcome` is set."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.error: BaseException | None = None
        self.device_s = 0.0
        self.outcome: Future[StepResult | EngineError] = Future()


class CpuDevice:
    """Implements `step.Device`.

    `before_step`, if set, is called in the worker thread with the step's number before its
    forward: a test may wait in it or raise, a profiler may mark it.
    """

    def __init__(
        self,
        runner: StepRunner,
        before_step: Callable[[int], None] | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`thread`: one worker that has built the runner, if it is to go on; closed with this."""
        self.cache_spec = runner.cache_spec
        self.num_blocks = runner.num_blocks
        self.num_slots = runner.num_slots
        self.before_step = before_step
        self._runner: StepRunner | None = runner  # None once closed
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="deepinfer-step")
        self._unsampled: _Step | None = None
        self._line: deque[_Step] = deque()  # sampled, not yet collected; oldest first
        self._closed = False

    def forward(self, plan: StepPlan) -> None:
        self._require_open()
        if self._unsampled is not None:
            raise RuntimeError(f"Step {self._unsampled.plan.number} was not sampled yet.")
        self._unsampled = _Step(plan)
        self._thread.submit(self._run_forward, self._unsampled)

    def sample(self, plan: StepPlan, mask: Any | None = None) -> None:
        self._require_open()
        step, self._unsampled = self._unsampled, None
        if step is None or step.plan is not plan:
            raise RuntimeError(f"sample({plan.number}) without its forward.")
        self._line.append(step)
        self._thread.submit(self._run_sample, step, mask)

    async def collect(self) -> StepResult:
        self._require_open()
        if not self._line:
            raise RuntimeError("collect() without a sampled step.")
        step = self._line[0]
        arrived = asyncio.wrap_future(step.outcome)
        # Unlike `await arrived`, this leaves the step in the line when the caller is cancelled.
        await asyncio.wait([arrived])
        if self._line and self._line[0] is step:
            self._line.popleft()
        outcome = arrived.result()
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Drops what waits in the line, lets the running part end, joins the thread.

        The runner goes too, and with it weights and cache, however long somebody keeps the device.
        """
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        try:
            await asyncio.to_thread(self._thread.shutdown, wait=True)
            self._runner = None
        finally:
            while self._line:
                _resolve(
                    self._line.popleft(),
                    EngineClosedError("The device was closed before this step was collected."),
                )

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The device is closed.")

    # --- in the worker thread ---

    def _run_forward(self, step: _Step) -> None:
        begin = time.perf_counter()
        try:
            if self.before_step is not None:
                self.before_step(step.plan.number)
            assert self._runner is not None
            self._runner.forward(step.plan)
        except BaseException as error:  # whatever it was, somebody awaits this step
            step.error = error
        step.device_s = time.perf_counter() - begin

    def _run_sample(self, step: _Step, mask: Any | None) -> None:
        begin = time.perf_counter()
        result = None
        if step.error is None:
            try:
                assert self._runner is not None
                result = self._runner.sample(step.plan, mask)
            except BaseException as error:
                step.error = error
        if result is None:
            _resolve(step, _device_error(step))
        else:
            device_s = step.device_s + time.perf_counter() - begin
            _resolve(step, msgspec.structs.replace(result, device_s=device_s))


def _resolve(step: _Step, outcome: StepResult | EngineError) -> None:
    """The first outcome counts: a close that was itself cut short may race with the thread."""
    try:
        step.outcome.set_result(outcome)
    except InvalidStateError:
        pass


def _device_error(step: _Step) -> DeviceError:
    plan, cause = step.plan, step.error
    error = DeviceError(
        f"Step {plan.number} with {len(plan.slots)} rows and {plan.num_tokens} tokens failed: "
        f"{type(cause).__name__}: {cause}. Its requests end with this error; other requests go on."
    )
    error.__cause__ = cause
    return error
