"""Streams over time: comments in silence, slow readers, one write for what is ready together."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from deepinfer.clock import VirtualClock
from deepinfer.serve.sse import EventStream

COUNTER = "deepinfer:http_requests_total"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


async def test_comments_break_long_silence(serve: Any, engine: Any) -> None:
    clock = VirtualClock()
    engine.gate.hold()
    async with serve(clock=clock, keepalive_interval_s=15.0) as front, asyncio.TaskGroup() as group:
        asking = group.create_task(front.session.post("/v1/chat/completions", json=CHAT))
        await engine.gate.waiting.wait()
        assert clock.next_wake_s == 15.0
        clock.advance(14.0)
        assert clock.next_wake_s == 15.0
        clock.advance(1.0)
        async with await asking as response:  # the comment brought the headers
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            assert clock.next_wake_s == 30.0
            engine.gate.let(1)
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
            assert (await response.content.readuntil(b"\n\n")).startswith(b"data: ")
            engine.gate.let(100)
            rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b": keep-alive" not in rest


async def test_a_token_puts_the_comment_off(serve: Any, engine: Any) -> None:
    clock = VirtualClock()
    engine.gate.hold()
    async with serve(clock=clock, keepalive_interval_s=15.0) as front, asyncio.TaskGroup() as group:
        asking = group.create_task(front.session.post("/v1/chat/completions", json=CHAT))
        await engine.gate.waiting.wait()
        clock.advance(10.0)
        engine.gate.let(1)
        async with await asking as response:
            await response.content.readuntil(b"\n\n")
            await response.content.readuntil(b"\n\n")
            clock.advance(14.0)  # 24 s after the start, 14 after the token
            engine.gate.let(100)
            assert b": keep-alive" not in await response.read()


async def test_failure_after_a_comment_is_an_event(serve: Any, engine: Any) -> None:
    clock = VirtualClock()
    engine.gate.hold()
    engine.failure = ValueError("late")
    async with serve(clock=clock) as front, asyncio.TaskGroup() as group:
        asking = group.create_task(front.session.post("/v1/chat/completions", json=CHAT))
        await engine.gate.waiting.wait()
        clock.advance(15.0)
        async with await asking as response:
            engine.gate.let(1)
            assert response.status == 200
            text = await response.text()
    assert '"code":"internal_error"' in text
    assert "[DONE]" not in text
    assert "late" not in text


async def test_a_slow_reader_holds_the_stream_back(serve: Any, engine: Any) -> None:
    engine.answer, engine.text_factor = "x" * 2000, 20_000  # 40 MB, more than sockets hold
    async with serve() as front:
        connection = socket.create_connection((front.server.host, front.server.port))
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
        body = b'{"prompt": "x", "stream": true, "max_tokens": 2000}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"data: ")
        before = -1
        while engine.num_pulled != before:  # until the buffers on the way are full
            before = engine.num_pulled
            for _ in range(20):
                assert (await front.get("/health")).status == 200
        assert before < 2000
        while data := await reader.read(2**20):
            last = data
        assert engine.num_pulled == 2000
        assert b"0\r\n\r\n" in last
        writer.close()


async def test_choices_that_are_ready_together_leave_together(serve: Any, engine: Any) -> None:
    engine.gate.hold()
    async with serve() as front, asyncio.TaskGroup() as group:
        asking = group.create_task(front.session.post("/v1/chat/completions", json=CHAT | {"n": 4}))
        await engine.gate.waiting.wait()
        engine.gate.let(4)
        async with await asking as response:
            data, _ = await response.content.readchunk()
            assert data.count(b"data: ") == 8  # a role and a token for each of four choices
            engine.gate.let(400)
            await response.read()


async def test_closing_at_the_end_of_a_stream_is_not_leaving(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client closes while the handler is still on its way out, as curl does."""
    finish = EventStream.finish

    async def finish_and_lose_the_client(
        stream: EventStream, *arguments: bytes
    ) -> web.StreamResponse:
        response = await finish(stream, *arguments)
        transport = stream._request.transport
        assert transport is not None
        transport.close()
        return response

    monkeypatch.setattr(EventStream, "finish", finish_and_lose_the_client)
    async with front.session.post("/v1/chat/completions", json=CHAT) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    exposition = front.observer.exposition().decode()
    answered = [line for line in exposition.splitlines() if line.startswith(f"{COUNTER}{{")]
    assert answered == [f'{COUNTER}{{method="POST",path="/v1/chat/completions",status="200"}} 1.0']
