"""A scripted engine, a byte-level tokenizer, and a real server on a real socket for the front.

The engine is the only thing that is not real here: it says what the test tells it to say, when the
test lets it. Tokenizer and chat template are the project's own, over a vocabulary of single bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from deepinfer.client import EngineState
from deepinfer.errors import DrainingError, PromptTooLongError
from deepinfer.observe import EngineStats
from deepinfer.serve.app import RunningServer, ServerConfig, create_app, run_server
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.text.chat import ChatTemplate
from deepinfer.text.tokenizer import Tokenizer
from deepinfer.types import (
    Delta,
    FinishReason,
    PrefixMiss,
    SamplingParams,
    Timeline,
    TokenLogprob,
    Usage,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TIMELINE = Timeline(
    queued_s=0.001,
    prefill_s=0.002,
    decode_s=0.003,
    total_s=0.006,
    cached_tokens=2,
    prefix_miss=PrefixMiss.DIVERGED,
    preemptions=1,
    stalls_s={"preempted": 0.0005},
)


def build_byte_backend() -> tokenizers.Tokenizer:
    """One token a byte, and ChatML's two special tokens."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


@pytest.fixture
def byte_backend() -> tokenizers.Tokenizer:
    return build_byte_backend()


@pytest.fixture
def chat_template_source() -> str:
    return CHATML


class ScriptedStream:
    """Yields one delta per token of the script, each after a turn of the engine's gate."""

    def __init__(
        self, engine: ScriptedEngine, request_id: str, ids: list[int], params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt_token_ids = ids
        self.closed = asyncio.Event()
        self.was_cancelled = False
        self._engine = engine
        self._deltas = engine.script(self)
        self._ended = False

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> Delta:
        if self._ended or self.closed.is_set():
            raise StopAsyncIteration
        await self._engine.gate.acquire_turn()
        item = next(self._deltas)
        self._engine.num_pulled += 1
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.was_cancelled = self.was_cancelled or not self._ended
        self.closed.set()


class Gate:
    """Open by default; once `hold` was called, every delta needs a `let`."""

    def __init__(self) -> None:
        self._turns: asyncio.Semaphore | None = None
        self.waiting = asyncio.Event()  # somebody stands before the gate

    def hold(self) -> None:
        self._turns = asyncio.Semaphore(0)

    def let(self, count: int) -> None:
        assert self._turns is not None
        for _ in range(count):
            self._turns.release()

    async def acquire_turn(self) -> None:
        if self._turns is not None:
            if self._turns.locked():
                self.waiting.set()
            await self._turns.acquire()


class ScriptedEngine:
    """An `EngineClient` that answers every prompt with `answer`, byte by byte."""

    model_name = "scripted"
    max_model_len = 512

    def __init__(self) -> None:
        backend = build_byte_backend()
        end = backend.token_to_id("<|im_end|>")
        self.tokenizer = Tokenizer(backend, eos_token_ids=[end])
        self.chat_template: ChatTemplate | None = ChatTemplate(CHATML, self.tokenizer)
        self.state = EngineState.READY
        self.answer = "Hello, world."
        self.text_factor = 1  # repeats each delta's text, to fill buffers
        self.num_pulled = 0  # deltas that left the engine
        self.refusal: Exception | None = None
        self.refuse_from = 0  # the request, counted from 0, that is refused first
        self.failure: Exception | None = None  # raised in the stream, after `fail_after` tokens
        self.fail_after = 0
        self.gate = Gate()
        self.streams: list[ScriptedStream] = []
        self.calls: list[dict[str, Any]] = []
        self.submitted = asyncio.Event()

    def default_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, top_p=0.9)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> ScriptedStream:
        assert not isinstance(prompt, str)
        params = params or self.default_params()
        params.validate()
        if self.state is EngineState.DRAINING:
            raise DrainingError("The engine is draining.", 7.2)
        if self.refusal is not None and len(self.calls) >= self.refuse_from:
            raise self.refusal
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(len(prompt), self.max_model_len - 1)
        self.calls.append(
            {
                "request_id": request_id,
                "priority": priority,
                "timeout_s": timeout_s,
                "cache_salt": cache_salt,
            }
        )
        stream = ScriptedStream(self, request_id or "", list(prompt), params)
        self.streams.append(stream)
        self.submitted.set()
        return stream

    def script(self, stream: ScriptedStream) -> Iterator[Delta | Exception]:
        ids = self.tokenizer.encode(self.answer)
        limit = stream.params.max_tokens or len(ids) + 1
        shown = ids[:limit]
        text, pending = "", b""
        for position, token in enumerate(shown):
            if self.failure is not None and position >= self.fail_after:
                yield self.failure
            pending += self.tokenizer.token_bytes(token)
            try:
                text, pending = pending.decode(), b""
            except UnicodeDecodeError:
                text = ""
            is_last = position == len(shown) - 1
            yield self._delta(stream, token, text, position, is_last, len(ids) > limit)

    def _delta(
        self,
        stream: ScriptedStream,
        token: int,
        text: str,
        position: int,
        is_last: bool,
        was_cut: bool,
    ) -> Delta:
        reason = None
        if is_last:
            reason = FinishReason.LENGTH if was_cut else FinishReason.STOP
        logprobs = None
        if stream.params.logprobs is not None:
            top = tuple((i, -0.5 - i) for i in range(stream.params.logprobs))
            logprobs = (TokenLogprob(token, -0.25, top),)
        return Delta(
            request_id=stream.request_id,
            token_ids=(token,),
            text=text * self.text_factor,
            logprobs=logprobs,
            finish_reason=reason,
            usage=Usage(len(stream.prompt_token_ids), position + 1, 2) if is_last else None,
            timeline=TIMELINE if is_last else None,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=sum(not stream.closed.is_set() for stream in self.streams),
            num_waiting=3,
            num_waiting_tokens=30,
            num_blocks=8,
            num_blocks_held=2,
            num_blocks_cached=1,
            prefix_queries_tokens=100,
            prefix_hits_tokens=40,
            num_preemptions=5,
            num_steps=9,
            loop_lag_s=0.004,
        )

    async def drain(self, timeout_s: float | None = None) -> bool:
        self.state = EngineState.DRAINING
        return True


class Reply(msgspec.Struct):
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of each event; the last of a complete stream is `[DONE]`."""
        lines = [line for line in self.text.split("\n\n") if line.startswith("data: ")]
        bodies = [line.removeprefix("data: ") for line in lines]
        return [body if body == "[DONE]" else json.loads(body) for body in bodies]


class Front:
    """A running server and a client for it."""

    def __init__(
        self,
        engine: Any,
        server: RunningServer,
        session: aiohttp.ClientSession,
        observer: PrometheusObserver,
    ) -> None:
        self.engine = engine
        self.server = server
        self.session = session
        self.observer = observer

    async def call(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, path, **options) as response:
            return Reply(response.status, response.headers, await response.text())

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        return await self.call("POST", path, json=body, **options)

    async def chat(self, content: str = "Hi", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages} | fields)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"prompt": prompt} | fields)

    async def open_socket(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.server.host, self.server.port)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


ServeFront = Callable[..., contextlib.AbstractAsyncContextManager[Front]]


@pytest.fixture
def serve(engine: ScriptedEngine) -> ServeFront:
    """Starts a server with these settings, on a free port unless they say a Unix socket."""

    @contextlib.asynccontextmanager
    async def start(
        clock: Any = None,
        other_engine: Any = None,
        observer: PrometheusObserver | None = None,
        **settings: Any,
    ) -> AsyncIterator[Front]:
        config = ServerConfig(**{"port": 0, "shutdown_timeout_s": 5.0} | settings)
        observer = observer or PrometheusObserver()
        serving = other_engine or engine
        app = create_app(serving, config, observer, clock=clock)
        tls = (
            ssl.create_default_context(cafile=config.tls_cert_file)
            if config.tls_cert_file
            else True
        )
        async with run_server(app, config) as server:
            connector = (
                aiohttp.UnixConnector(config.uds) if config.uds else aiohttp.TCPConnector(ssl=tls)
            )
            address = "http://localhost" if config.uds else server.url
            async with aiohttp.ClientSession(address, connector=connector) as session:
                yield Front(serving, server, session, observer)

    return start


@pytest.fixture
async def front(serve: ServeFront) -> AsyncIterator[Front]:
    async with serve() as running:
        yield running
