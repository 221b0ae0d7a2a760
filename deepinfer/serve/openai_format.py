"""Deltas as OpenAI's chunks and bodies. Bytes out; no I/O and no engine.

Nearly every chunk of a stream differs from the one before in its text alone. So the bytes around
the text are made once per choice, and only the text is encoded per step:

    data: {"id":...,"choices":[{"index":0,"delta":{"content": "text" },"logprobs":null,...}]}
    ├──────────────────────── before ───────────────────────┤      ├───────── after ────────┤
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import UNSET

from deepinfer.serve.answers import Choice, slowest, timings, usage_info
from deepinfer.serve.logprobs import CompletionLogprobsWriter, chat_logprobs
from deepinfer.serve.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatDelta,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from deepinfer.types import Delta, TokenLogprob

if TYPE_CHECKING:
    from deepinfer.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What about an answer's form the request decided."""

    id: str
    created: int
    model: str
    include_usage: bool = False
    return_token_ids: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    prompt_token_ids: tuple[Sequence[int], ...] = ()  # by prompt, where asked for
    echoes: tuple[str, ...] = ()  # by prompt, where asked for
    n: int = 1

    def prompt_of(self, choice: Choice) -> int:
        return choice.index // self.n


class _Envelope:
    """The part of a chunk that all choices share."""

    def __init__(self, kind: str, options: AnswerOptions) -> None:
        common = {
            "id": options.id,
            "object": kind,
            "created": options.created,
            "model": options.model,
        }
        self.before = b"data: " + _encode(common)[:-1] + b',"choices":['
        self._usage = b',"usage":null' if options.include_usage else b""
        self.after = b"]" + self._usage + b"}\n\n"

    def event(self, choice: Any, **extra: Any) -> bytes:
        if not extra:
            return self.before + _encode(choice) + self.after
        more = b"," + _encode(extra)[1:]
        return self.before + _encode(choice) + b"]" + self._usage + more + b"\n\n"

    def usage_event(self, choices: Sequence[Choice]) -> bytes:
        last = {"usage": usage_info(choices), "timings": timings(slowest(choices))}
        return self.before + b"]," + _encode(last)[1:] + b"\n\n"


class AnswerFormat(ABC):
    """How an answer leaves: as events while it grows, or as one body."""

    _kind: ClassVar[str]  # the `object` of a chunk
    _before_text: ClassVar[bytes]  # of a plain choice, between its index and its text
    _after_text: ClassVar[bytes]  # of a plain choice, from its text to its end

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._envelope = _Envelope(self._kind, options)
        self._plain = options.logprobs is None and not options.return_token_ids
        self._before: dict[int, bytes] = {}  # by choice
        self._after = self._after_text + self._envelope.after

    def opening(self, choice: Choice) -> bytes:
        """Events before a choice's first delta."""
        start = b'{"index":%d,' % choice.index
        self._before[choice.index] = self._envelope.before + start + self._before_text
        return self._first_event(choice)

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """Events for a delta; empty where there is nothing to tell yet."""
        if delta.finish_reason is None and self._plain:
            if not delta.text:
                return b""
            return self._before[choice.index] + _encode(delta.text) + self._after
        chunk = self._chunk(choice, delta)
        if delta.finish_reason is None:
            return self._envelope.event(chunk)
        chunk.finish_reason = str(delta.finish_reason)
        chunk.stop_reason = delta.stop_match
        return self._envelope.event(chunk, timings=timings(choice.timeline))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Events after the last delta of all choices."""
        return self._envelope.usage_event(choices) if self._options.include_usage else b""

    @abstractmethod
    def body(self, choices: Sequence[Choice]) -> bytes:
        """The whole answer as one JSON object."""

    @abstractmethod
    def _first_event(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def _chunk(self, choice: Choice, delta: Delta) -> ChatChunkChoice | CompletionChoice:
        """What a delta brings, without how it ended."""

    def _token_ids(self, token_ids: Sequence[int]) -> Any:
        return list(token_ids) if self._options.return_token_ids else UNSET

    def _prompt_ids(self, choice: Choice) -> Any:
        ids = self._options.prompt_token_ids
        return [int(token) for token in ids[self._options.prompt_of(choice)]] if ids else UNSET


class ChatFormat(AnswerFormat):
    _kind = "chat.completion.chunk"
    _before_text = b'"delta":{"content":'
    _after_text = b'},"logprobs":null,"finish_reason":null}'

    def _first_event(self, choice: Choice) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        first = ChatChunkChoice(index=choice.index, delta=delta)
        if self._options.prompt_token_ids:
            return self._envelope.event(first, prompt_token_ids=self._prompt_ids(choice))
        return self._envelope.event(first)

    def _chunk(self, choice: Choice, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text or UNSET),
            logprobs=self._logprobs(delta.logprobs),
            token_ids=self._token_ids(delta.token_ids),
        )

    def body(self, choices: Sequence[Choice]) -> bytes:
        options = self._options
        return _encode(
            ChatCompletionResponse(
                id=options.id,
                created=options.created,
                model=options.model,
                choices=[
                    ChatChoice(
                        index=choice.index,
                        message=AnswerMessage(content=choice.text),
                        logprobs=self._logprobs(choice.logprobs),
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_match,
                        token_ids=self._token_ids(choice.token_ids),
                    )
                    for choice in choices
                ],
                usage=usage_info(choices),
                timings=timings(slowest(choices)),
                prompt_token_ids=self._prompt_ids(choices[0]),
            )
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> Any:
        if self._options.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, logprobs or ())


class CompletionFormat(AnswerFormat):
    _kind = "text_completion"
    _before_text = b'"text":'
    _after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer) -> None:
        super().__init__(options, tokenizer)
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def _first_event(self, choice: Choice) -> bytes:
        echo = self._echo(choice)
        if not echo and not self._options.prompt_token_ids:
            return b""
        return self._envelope.event(
            CompletionChoice(
                index=choice.index, text=echo, prompt_token_ids=self._prompt_ids(choice)
            )
        )

    def _chunk(self, choice: Choice, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=delta.text,
            logprobs=self._logprobs(choice, delta.logprobs),
            token_ids=self._token_ids(delta.token_ids),
        )

    def body(self, choices: Sequence[Choice]) -> bytes:
        options = self._options
        return _encode(
            CompletionResponse(
                id=options.id,
                created=options.created,
                model=options.model,
                choices=[
                    CompletionChoice(
                        index=choice.index,
                        text=self._echo(choice) + choice.text,
                        logprobs=self._logprobs(choice, choice.logprobs),
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_match,
                        token_ids=self._token_ids(choice.token_ids),
                        prompt_token_ids=self._prompt_ids(choice),
                    )
                    for choice in choices
                ],
                usage=usage_info(choices),
                timings=timings(slowest(choices)),
            )
        )

    def _echo(self, choice: Choice) -> str:
        echoes = self._options.echoes
        return echoes[self._options.prompt_of(choice)] if echoes else ""

    def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprob] | None
    ) -> CompletionLogprobs | None:
        options = self._options
        if options.logprobs is None:
            return None
        writer = self._writers.get(choice.index)
        if writer is None:
            writer = self._writers[choice.index] = CompletionLogprobsWriter(
                self._tokenizer, len(self._echo(choice)), options.skip_special_tokens
            )
        return writer.write(logprobs or (), options.logprobs)
