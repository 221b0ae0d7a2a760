"""The examples run as written."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).parent.parent
LONG_ENOUGH_S = 120.0


async def run(*arguments: str) -> asyncio.subprocess.Process:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_offline_inference_prints_an_answer_to_each_question() -> None:
    process = await run("examples/offline_inference.py", "--max-tokens", "3")
    async with asyncio.timeout(LONG_ENOUGH_S):
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    text = out.decode()
    assert len(re.findall(r"^Write one sentence about .+\n    \S", text, re.MULTILINE)) == 8
    assert len(re.findall(r"^Name three things that go with .+\n    \S", text, re.MULTILINE)) == 8
    assert re.search(r"^16 answers, 4[0-8] tokens, the last one after ", text, re.MULTILINE)


@pytest.fixture
async def service() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await run("examples/embed_in_a_service.py", "--port", str(port))
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LONG_ENOUGH_S):
            while b"Running on" not in (line := await process.stdout.readline()):
                assert line, "it ended instead of running"
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_the_service_streams_answers_and_forgets_clients_that_leave(
    service: tuple[asyncio.subprocess.Process, str],
) -> None:
    process, address = service
    async with asyncio.timeout(LONG_ENOUGH_S), aiohttp.ClientSession(address) as session:
        async with session.post("/headline", data=b"Scientists find water on the moon.") as reply:
            assert reply.status == 200
            assert (await reply.json())["headline"]
        async with session.get("/explain", params={"topic": "tides"}) as reply:
            assert reply.content_type == "text/plain"
            assert await reply.content.readany()
            running = await (await session.get("/health")).json()
            assert running == {"running": 1, "waiting": 0}
        # The request goes with its client, not after the hundred tokens that it still had to come.
        for _ in range(100):
            if (await (await session.get("/health")).json())["running"] == 0:
                break
        else:
            pytest.fail("the engine still works for a client that left")
        async with session.post("/headline", data=b"") as reply:
            assert reply.status == 200
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(LONG_ENOUGH_S):
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
