"""Time, real or virtual, behind one interface: whatever waits or measures is given a Clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """`now()` is monotonic, in seconds; its zero means nothing."""

    def now(self) -> float: ...

    async def sleep_until(self, when_s: float) -> None: ...


class RealClock:
    """The machine's monotonic clock and the event loop's timers."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep_until(self, when_s: float) -> None:
        await asyncio.sleep(max(0.0, when_s - time.monotonic()))


class VirtualClock:
    """A clock that moves only when told: `advance` wakes the sleepers in order of their times."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now_s

    async def sleep_until(self, when_s: float) -> None:
        if when_s <= self._now_s:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (when_s, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Moves time forward and wakes every sleeper whose moment has come."""
        self.advance_to(self._now_s + seconds)

    def advance_to(self, when_s: float) -> None:
        while self._sleepers and self._sleepers[0][0] <= when_s:
            at_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, at_s)
            if not future.done():
                future.set_result(None)
        self._now_s = max(self._now_s, when_s)

    @property
    def next_wake_s(self) -> float | None:
        """When the earliest sleeper wants to wake; `None` if nobody sleeps."""
        return self._sleepers[0][0] if self._sleepers else None
