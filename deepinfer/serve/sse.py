"""Server-sent events over one response: events out, comments in long silence, back-pressure.

Owns the response of a streaming request while it is open. Knows neither the engine nor what an
event means; `serve/openai.py` calls it, other protocols will.

The headers leave with the first event, or with the first comment where nothing came for
`keepalive_interval_s`. Until then the caller may still fail with a proper status.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from aiohttp import web

from deepinfer.clock import Clock

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks nginx not to collect events
}


class EventStream:
    """An async context manager around the response; leaving it stops the comments."""

    def __init__(self, request: web.Request, clock: Clock, keepalive_interval_s: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._clock = clock
        self._keepalive_interval_s = keepalive_interval_s
        self._last_write_s = clock.now()
        self._started = False
        self._starting = asyncio.Lock()
        self._group = asyncio.TaskGroup()

    @property
    def started(self) -> bool:
        """The status line is out: a failure can only be told as an event."""
        return self._started

    async def send(self, events: bytes) -> None:
        """Writes whole events in one go; waits while the client's buffers are full."""
        self._last_write_s = self._clock.now()
        if not self._started:
            await self._start()
        await self.response.write(events)

    async def finish(self, events: bytes) -> web.StreamResponse:
        """Sends the last events and the end of the body, in one write.

        A client may close as soon as it has them, and that cancels the handler: so the comments are
        stopped before, and nothing that follows waits. The request counts as answered, not as left.
        """
        self._comments.cancel()
        await asyncio.wait((self._comments,))
        if not self._started:
            await self._start()
        await self.response.write_eof(events)
        return self.response

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._comments = self._group.create_task(self._comment_on_silence())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The group is not told of `error`: it would wrap it, and the caller wants it bare.
        self._comments.cancel()
        await self._group.__aexit__(None, None, None)

    async def _start(self) -> None:
        async with self._starting:
            if not self._started:
                await self.response.prepare(self._request)
                self._started = True

    async def _comment_on_silence(self) -> None:
        while True:
            due_s = self._last_write_s + self._keepalive_interval_s
            if self._clock.now() < due_s:
                await self._clock.sleep_until(due_s)
                continue
            try:
                await self.send(_COMMENT)
            except ConnectionError:
                return  # the client left; its handler is being cancelled
