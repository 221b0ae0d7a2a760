"""What the commands that run an engine share: the event loop, its signals, and showing progress."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import uvloop

EXIT_INTERRUPTED = 130  # as shells say it: 128 + SIGINT

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def new_runner() -> asyncio.Runner:
    """A uvloop runner. SIGINT cancels what it runs, which then raises `KeyboardInterrupt`."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class Interrupts:
    """While entered, SIGTERM and SIGINT set events: `first` at once, `second` for one more.

    SIGTERM repeated stays a request to finish in peace (supervisors do repeat it); only SIGINT, a
    person at a keyboard, becomes the second. After it the signals are Python's own again, so that a
    third ends a process whatever it hangs on.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def _receive(self, number: signal.Signals) -> None:
        if self.first.is_set() and number == signal.SIGINT:
            self.second.set()
            self._remove_handlers()
        self.first.set()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_handlers()

    def _remove_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Runs all until one is done, cancels the others, and raises the first one's error, if any."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def show_progress(text: str) -> None:
    """One dim line on standard error; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)
