"""Signals as events, and racing coroutines."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from deepinfer.cli.run import Interrupts, first_of
from deepinfer.errors import CheckpointError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_sets_the_first_event(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(interrupts.first.wait(), 5)
        assert not interrupts.second.is_set()


async def test_only_an_interrupt_from_the_keyboard_becomes_the_second() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(interrupts.first.wait(), 5)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        assert not interrupts.second.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(interrupts.second.wait(), 5)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_handlers_are_gone_after_leaving() -> None:
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_the_first_to_finish_cancels_the_others() -> None:
    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def quick() -> None:
        await asyncio.sleep(0)

    await first_of(endless(), quick())
    assert cancelled.is_set()


async def test_the_first_error_is_raised_bare() -> None:
    async def fails() -> None:
        raise CheckpointError("no such file")

    with pytest.raises(CheckpointError, match="no such file"):
        await first_of(asyncio.Event().wait(), fails())


async def test_a_cancel_from_outside_reaches_all() -> None:
    started = asyncio.Event()

    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(first_of(endless()))
        await started.wait()
        task.cancel()
    assert task.cancelled()
