"""What the commands that run an engine share: the event loop, and how they tell what they load."""

from __future__ import annotations

import asyncio
import sys

import uvloop


def new_runner() -> asyncio.Runner:
    """A uvloop runner. SIGINT cancels what it runs, which then raises `KeyboardInterrupt`."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def show_progress(text: str) -> None:
    """One dim line on standard error; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\033[2m{text}\033[0m", file=sys.stderr, flush=True)
