"""From prompts to running streams, and from several streams to one flow of deltas.

Knows the Engine Protocol and no wire format: every protocol module uses it. Leaving
`open_streams`, in whatever way, cancels what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from deepinfer.client import EngineClient, EngineState, TokenStream
from deepinfer.errors import DrainingError, EngineClosedError, RefusedError
from deepinfer.types import Delta, FinishReason, SamplingParams

IndexedDelta = tuple[int, Delta]
Receive = Callable[[Sequence[IndexedDelta]], Awaitable[None]]
_LOADING_RETRY_S = 2.0
_CUT_OFF = "The server stopped before the answer was complete."


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as `EngineClient.generate` takes it."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""


def require_ready(engine: EngineClient) -> None:
    """Raises what a request deserves that comes while the engine cannot serve it."""
    state = engine.state
    if state in (EngineState.NEW, EngineState.LOADING):
        raise RefusedError("The model is still loading; /ready says when.", _LOADING_RETRY_S)
    if state in (EngineState.CLOSED, EngineState.FAILED):
        raise EngineClosedError(f"The engine is {state}; restart the server.")


@contextlib.asynccontextmanager
async def open_streams(
    engine: EngineClient, submissions: Sequence[Submission]
) -> AsyncIterator[list[TokenStream]]:
    """Submits all or none: if one is refused, those before it are cancelled."""
    streams: list[TokenStream] = []
    try:
        for submission in submissions:
            streams.append(  # noqa: PERF401  a comprehension would lose those before a refusal
                engine.generate(
                    submission.prompt_token_ids,
                    submission.params,
                    request_id=submission.request_id,
                    priority=submission.priority,
                    timeout_s=submission.timeout_s,
                    cache_salt=submission.cache_salt,
                )
            )
        yield streams
    finally:
        if len(streams) == 1:
            await streams[0].aclose()
        else:  # at once: each may wait for the step under way
            await asyncio.gather(*(stream.aclose() for stream in streams))


async def follow(streams: Sequence[TokenStream], receive: Receive) -> None:
    """Hands every delta to `receive`, those that are ready together in one call.

    Returns when all streams have ended. The first failure, of a stream or of `receive`, ends it
    and is raised bare. An engine that is closed meanwhile is a server that stops, not a failure.
    """
    try:
        await _follow(streams, receive)
    except EngineClosedError as error:
        raise DrainingError(_CUT_OFF, _LOADING_RETRY_S) from error


async def _follow(streams: Sequence[TokenStream], receive: Receive) -> None:
    if len(streams) == 1:
        async for delta in streams[0]:
            _refuse_cut_off(delta)
            await receive(((0, delta),))
        return
    ready: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(2 * len(streams))
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_forward(i, stream, ready)) for i, stream in enumerate(streams)]
        num_open = len(streams)
        while num_open and failure is None:
            arrived = [await ready.get()]
            while not ready.empty():
                arrived.append(ready.get_nowait())
            deltas = [(index, item) for index, item in arrived if isinstance(item, Delta)]
            num_open -= sum(item is None for _, item in arrived)
            failure = next((item for _, item in arrived if isinstance(item, Exception)), None)
            if deltas:
                try:
                    await receive(deltas)
                except Exception as error:
                    failure = error
        for task in tasks:
            task.cancel()
    if failure is not None:
        raise failure


async def _forward(
    index: int, stream: TokenStream, ready: asyncio.Queue[tuple[int, Delta | Exception | None]]
) -> None:
    try:
        async for delta in stream:
            _refuse_cut_off(delta)
            await ready.put((index, delta))
        await ready.put((index, None))
    except Exception as error:
        await ready.put((index, error))


def _refuse_cut_off(delta: Delta) -> None:
    """A cancel that the client did not ask for is the server's end, not an answer's."""
    if delta.finish_reason is FinishReason.CANCELLED:
        raise DrainingError(_CUT_OFF, _LOADING_RETRY_S)
