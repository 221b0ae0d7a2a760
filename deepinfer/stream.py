"""A live request as its caller sees it: an async iterator of deltas that cancels when it is left.

The engine's loop only puts token ids into the sequence's outbox and rings; turning them into text
happens here, in the caller's own task and at the caller's own pace. A slow caller gets fewer and
larger deltas; what waits for it is bounded by the request's own length.

However the stream is left, the request is cancelled:

    aclose(), or leaving `async with`   at once
    a cancelled wait (asyncio.timeout)  at once
    `break` and nothing else            when the last reference to the stream goes
"""

from __future__ import annotations

import asyncio
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

from deepinfer.errors import DeadlineExceededError, EngineClosedError, EngineError
from deepinfer.scheduler.sequence import Sequence
from deepinfer.types import Delta, FinishReason, Timeline, TokenLogprob, Usage

if TYPE_CHECKING:
    from deepinfer.engine import Engine
    from deepinfer.text.detokenizer import Detokenizer


_RAISED = (FinishReason.ERROR, FinishReason.DEADLINE)


class Stream:
    """Implements `client.TokenStream`. For one consumer, on the engine's event loop."""

    def __init__(self, engine: Engine, sequence: Sequence, detokenizer: Detokenizer) -> None:
        self.request_id = sequence.id
        self._engine = engine
        self._sequence = sequence
        self._detokenizer = detokenizer
        self._ended = False
        self._news = asyncio.Event()
        sequence.listener = self._news.set
        self._leave = weakref.finalize(self, engine.abandon, sequence)
        self._leave.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        sequence = self._sequence
        while not sequence.new_token_ids and not sequence.finished:
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self._end("abandoned")
                raise
        if not sequence.finished:
            return self._next()
        if sequence.finish_reason in _RAISED and sequence.new_token_ids:
            return self._next()  # what was computed is not lost; the next call raises
        return self._last()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._end("closed")

    def _end(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._leave.detach()
            self._engine.cancel(self._sequence, cause)

    def _take(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...] | None]:
        """Empties the outbox into the detokenizer, unless a stop check has fed it already."""
        sequence = self._sequence
        token_ids, sequence.new_token_ids = tuple(sequence.new_token_ids), []
        if sequence.stop_check is None:
            self._detokenizer.push(token_ids)
        if sequence.request.params.logprobs is None:
            return token_ids, None
        logprobs, sequence.new_logprobs = tuple(sequence.new_logprobs), []
        return token_ids, logprobs

    def _next(self) -> Delta:
        token_ids, logprobs = self._take()
        return Delta(
            request_id=self.request_id,
            token_ids=token_ids,
            text=self._detokenizer.take(),
            logprobs=logprobs,
        )

    def _last(self) -> Delta:
        self._ended = True
        self._leave.detach()
        sequence = self._sequence
        reason = sequence.finish_reason
        if reason is FinishReason.ERROR:
            error = sequence.error
            if isinstance(error, EngineError):
                raise error
            raise EngineError(f"Request {sequence.id} failed: {error}.") from error
        if reason is FinishReason.DEADLINE:
            raise DeadlineExceededError(
                f"Request {sequence.id} reached its deadline after {sequence.num_output_tokens} "
                "tokens. Give it a longer timeout or fewer max_tokens."
            )
        if reason is FinishReason.CANCELLED and self._engine.closed:
            raise EngineClosedError(f"The engine was closed while request {sequence.id} ran.")
        token_ids, logprobs = self._take()
        return Delta(
            request_id=self.request_id,
            token_ids=token_ids,
            text=self._detokenizer.finish(),
            logprobs=logprobs,
            finish_reason=reason,
            stop_match=sequence.stop_match,
            usage=usage_of(sequence),
            timeline=timeline_of(sequence),
        )


def usage_of(sequence: Sequence) -> Usage:
    return Usage(
        prompt_tokens=len(sequence.request.prompt_token_ids),
        completion_tokens=sequence.num_output_tokens,
        cached_tokens=sequence.cached_tokens,
    )


def timeline_of(sequence: Sequence) -> Timeline:
    """Of a finished sequence. Phases that it never reached are 0."""
    arrived_s, finished_s = sequence.request.arrived_s, sequence.finished_s
    admitted_s = finished_s if sequence.admitted_s is None else sequence.admitted_s
    first_s = finished_s if sequence.first_token_s is None else sequence.first_token_s
    last_s = first_s if sequence.last_token_s is None else sequence.last_token_s
    return Timeline(
        queued_s=admitted_s - arrived_s,
        prefill_s=first_s - admitted_s,
        decode_s=last_s - first_s,
        total_s=finished_s - arrived_s,
        cached_tokens=sequence.cached_tokens,
        prefix_miss=sequence.prefix_miss,
        preemptions=sequence.preemptions,
        stalls_s=dict(sequence.stalls_s),
    )
