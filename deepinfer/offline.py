"""LLM: the engine for scripts that have no event loop.

It owns one background thread with an event loop in it, and an `Engine` in that loop. Calls may come
from any thread, also several at once: they share the engine's batch. It knows nothing that `Engine`
does not: prompts go in, completions come out in the order of the prompts.

    with LLM(max_num_seqs=16) as llm:
        for completion in llm.generate(["Once upon a time", "The sky is"]):
            print(completion.text)
"""

from __future__ import annotations

import asyncio
import contextlib
import numbers
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import rich.console
import rich.progress

from deepinfer.client import EngineClient, TokenStream
from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError, EngineClosedError, QueueFullError, RequestError
from deepinfer.runtime.host import limit_spinning
from deepinfer.types import FinishReason, SamplingParams, Timeline, TokenLogprob, Usage

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, bool], None]  # tokens since the last call, and whether a prompt is done
Result = TypeVar("Result")


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer to one prompt."""

    prompt: str | tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_match: str | int | None = None


class LLM:
    """A model behind plain calls. Close it, or use it in a `with` statement.

    `model` and the keyword arguments are the fields of `EngineConfig`.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        _refuse_inside_a_loop()
        limit_spinning()
        self.config = EngineConfig(model=model, **settings)
        self.config.validate()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a script that forgets to close still ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True)
        self._thread.start()
        self._engine = Engine(self.config)
        try:
            self._call(self._engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> EngineClient:
        """For its facts (`model_name`, `tokenizer`, `stats()`); its loop is not the caller's."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continues each prompt, a text or a list of token ids. One prompt gives a list of one.

        `params` is for all, or one for each; `None` is what the checkpoint recommends. The first
        request that fails ends the call with its error, which notes the number of the prompt.
        """
        many = _as_list(prompts)
        each = _one_for_each(params, len(many))
        with _progress_bar(len(many), progress) as on_progress:
            return self._call(_complete_all(self._engine, many, each, on_progress))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answers conversations: lists of messages such as {"role": "user", "content": "Hi"}."""
        template = self._engine.chat_template
        if template is None:
            raise ConfigError(
                f"{self._engine.model_name} has no chat template. Use `generate`, or start with "
                "chat_template='file.jinja'.",
                "chat_template",
            )
        many: list[Any] = list(conversations)
        if many and isinstance(many[0], Mapping):
            many = [many]
        encode = self._engine.tokenizer.encode_rendered
        prompts = [encode(template.render(messages)) for messages in many]
        return self.generate(prompts, params, progress=progress)

    def close(self) -> None:
        """Ends the engine and its thread. Later calls raise `EngineClosedError`."""
        if self._closed:
            return
        _refuse_inside_a_loop()
        try:
            self._call(self._shut_down())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut_down(self) -> None:
        await self._engine.aclose()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the engine's loop and waits; an interrupt here cancels it there."""
        try:
            _refuse_inside_a_loop()
            if self._closed:
                raise EngineClosedError("This LLM is closed. Create another one.")
        except BaseException:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _refuse_inside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "LLM was called inside a running event loop and would block it until the answer is there. "
        "Use `async with Engine(config) as engine` here, or call LLM in a thread: "
        "`await asyncio.to_thread(llm.generate, prompts)`."
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of many. Integers in a row are one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], numbers.Integral) else many


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts. Give one for all, or one for "
            "each."
        )
    return list(params)


async def _complete_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | None],
    on_progress: Progress,
) -> list[Completion]:
    """Keeps the engine busy without overfilling its waiting room; results in order of prompts."""
    completions: list[Completion | None] = [None] * len(prompts)
    queue = iter(enumerate(zip(prompts, params, strict=True)))

    async def work() -> None:
        for index, (prompt, wanted) in queue:
            try:
                completions[index] = await _complete(engine, prompt, wanted, on_progress)
            except Exception as error:
                error.add_note(f"This was prompt number {index} of {len(prompts)}, from zero.")
                raise

    config = engine.config
    num_workers = min(len(prompts), config.max_waiting_requests, 2 * config.max_num_seqs)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [completion for completion in completions if completion is not None]


async def _complete(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, on_progress: Progress
) -> Completion:
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    pieces: list[str] = []
    last = None
    async with await _admitted(engine, prompt, params) as stream:
        async for delta in stream:
            last = delta
            pieces.append(delta.text)
            token_ids += delta.token_ids
            logprobs += delta.logprobs or ()
            on_progress(len(delta.token_ids), delta.finish_reason is not None)
    if last is None or last.finish_reason is None or last.usage is None:
        raise EngineClosedError("The engine was closed before the answer was complete.")
    return Completion(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        text="".join(pieces),
        token_ids=tuple(token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timeline=last.timeline or Timeline(),
        logprobs=tuple(logprobs) or None,
        stop_match=last.stop_match,
    )


async def _admitted(engine: Engine, prompt: Prompt, params: SamplingParams | None) -> TokenStream:
    """Other threads share the waiting room: when it is full, comes back when it says so."""
    while True:
        try:
            return engine.generate(prompt, params)
        except QueueFullError as refusal:
            await asyncio.sleep(refusal.retry_after_s)


@contextlib.contextmanager
def _progress_bar(num_prompts: int, wanted: bool) -> Iterator[Progress]:
    """A bar on standard error with requests done and tokens per second, if there is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield lambda num_tokens, done: None
        return
    bar = rich.progress.Progress(
        rich.progress.TextColumn("{task.completed}/{task.total} prompts"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[tokens]} tokens"),
        rich.progress.TextColumn("{task.fields[rate]:.0f} tokens/s"),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
    )
    started_s = time.monotonic()
    total_tokens = 0
    task = bar.add_task("", total=num_prompts, tokens=0, rate=0.0)

    def on_progress(num_tokens: int, done: bool) -> None:
        nonlocal total_tokens
        total_tokens += num_tokens
        rate = total_tokens / max(time.monotonic() - started_s, 1e-9)
        bar.update(task, advance=int(done), tokens=total_tokens, rate=rate)

    with bar:
        yield on_progress
