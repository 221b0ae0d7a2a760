"""A client that leaves, at any moment and in any manner, cancels what it asked for.

Over real sockets, on asyncio's own loop and on uvloop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

Loop = Callable[[], asyncio.AbstractEventLoop]
both_loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes as a killed process with unread data does: the peer gets a reset."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def _run(loop: Loop, main: Any) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@both_loops
@pytest.mark.parametrize("leave", [_reset, _close])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"n": 3}]
)
def test_leaving_cancels(
    serve: Any,
    engine: Any,
    loop: Loop,
    leave: Callable[[asyncio.StreamWriter], None],
    num_tokens: int,
    fields: dict[str, Any],
) -> None:
    async def main() -> None:
        engine.gate.hold()
        async with serve() as front:
            reader, writer = await front.open_socket()
            messages = [{"role": "user", "content": "Hi"}]
            writer.write(_request("/v1/chat/completions", {"messages": messages} | fields))
            await engine.gate.waiting.wait()
            engine.gate.let(num_tokens)
            if fields.get("stream") and num_tokens:
                await reader.readuntil(b'"content":"H"')
            leave(writer)
            async with asyncio.timeout(10):
                for stream in engine.streams:
                    await stream.closed.wait()
            assert [s.was_cancelled for s in engine.streams] == [True] * fields.get("n", 1)
            metrics = (await front.get("/metrics")).text
            assert 'path="/v1/chat/completions",status="499"} 1.0' in metrics

    _run(loop, main())


@both_loops
def test_leaving_within_the_body_asks_nothing(serve: Any, engine: Any, loop: Loop) -> None:
    async def main() -> None:
        async with serve() as front:
            _, writer = await front.open_socket()
            writer.write(_request("/v1/completions", {"prompt": "x" * 100})[:-20])
            await writer.drain()
            _reset(writer)
            assert (await front.complete()).status == 200
            assert len(engine.streams) == 1

    _run(loop, main())


@both_loops
def test_one_client_leaving_leaves_the_others(serve: Any, engine: Any, loop: Loop) -> None:
    async def main() -> None:
        engine.gate.hold()
        async with serve() as front, asyncio.TaskGroup() as group:
            staying = group.create_task(front.chat(stream=True))
            await engine.submitted.wait()
            engine.submitted.clear()
            _, writer = await front.open_socket()
            writer.write(_request("/v1/completions", {"prompt": "x", "stream": True}))
            await engine.submitted.wait()
            _reset(writer)
            async with asyncio.timeout(10):
                await engine.streams[1].closed.wait()
            engine.gate.let(100)
            assert (await staying).events[-1] == "[DONE]"
            assert not engine.streams[0].was_cancelled

    _run(loop, main())


@both_loops
def test_leaving_while_the_server_writes(serve: Any, engine: Any, loop: Loop) -> None:
    async def main() -> None:
        engine.answer, engine.text_factor = "x" * 2000, 20_000
        async with serve() as front:
            reader, writer = await front.open_socket()
            body = {"prompt": "x", "stream": True, "max_tokens": 2000}
            writer.write(_request("/v1/completions", body))
            await reader.readuntil(b"data: ")
            _reset(writer)
            async with asyncio.timeout(10):
                await engine.streams[0].closed.wait()
            assert engine.streams[0].was_cancelled

    _run(loop, main())
