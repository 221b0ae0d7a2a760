"""What an engine reports about itself while it runs: the seam between the engine and any metrics.

The engine calls an `Observer`; `serve/metrics.py` is one (Prometheus), `NoObserver` another.
Calls happen on the event loop and must return at once.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.types import FinishReason, Timeline, Usage


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step, after its results were committed."""

    number: int
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled_tokens: int
    device_s: float
    host_s: float  # planning and committing


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request."""

    request_id: str
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    time_to_first_token_s: float | None  # None: it ended before one


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine at one moment, for gauges, `/health` and the curious."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0  # usable ones
    num_blocks_held: int = 0  # by running sequences
    num_blocks_cached: int = 0  # not held, but kept for prefix hits
    prefix_queries_tokens: int = 0  # prompt tokens looked up since start
    prefix_hits_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    loop_lag_s: float = 0.0  # worst recent delay of the event loop

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running sequences hold."""
        return self.num_blocks_held / self.num_blocks if self.num_blocks else 0.0


class Observer(Protocol):
    def on_step(self, report: StepReport) -> None: ...

    def on_token_intervals(self, seconds: NDArray[np.float64]) -> None:
        """After a step: for each sequence with a new token, the time since its previous one."""

    def on_finish(self, report: RequestReport) -> None: ...

    def on_cancel(self, cause: str) -> None:
        """A request was cancelled; causes: "abandoned", "closed", "deadline", "shutdown"."""

    def on_loop_lag(self, seconds: float) -> None: ...


class NoObserver:
    """Looks away."""

    def on_step(self, report: StepReport) -> None: ...

    def on_token_intervals(self, seconds: NDArray[np.float64]) -> None: ...

    def on_finish(self, report: RequestReport) -> None: ...

    def on_cancel(self, cause: str) -> None: ...

    def on_loop_lag(self, seconds: float) -> None: ...
