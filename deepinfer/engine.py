"""Engine: a model that answers requests inside somebody's asyncio program.

    async with Engine(EngineConfig()) as engine:
        async for delta in engine.generate("The capital of France is"):
            print(delta.text, end="")

It owns the life of the parts (device, scheduler state, step loop) and the way in and out: a request
is checked and admitted or refused here, and its tokens leave through a `Stream`. It does not know
HTTP, installs no signal handlers, starts no processes and keeps no module-level state, so several
engines live in one loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from deepinfer.admission import Admission, stop_check
from deepinfer.client import EngineState
from deepinfer.clock import Clock, RealClock
from deepinfer.config import EngineConfig
from deepinfer.errors import (
    ConfigError,
    DrainingError,
    EngineClosedError,
    EngineError,
)
from deepinfer.observe import EngineStats, NoObserver, Observer, RequestReport
from deepinfer.scheduler.loop import StepLoop
from deepinfer.scheduler.policy import Policy
from deepinfer.scheduler.prefix import root_key
from deepinfer.scheduler.sequence import Sequence as ScheduledSequence
from deepinfer.scheduler.state import SchedulerState
from deepinfer.stream import Stream, timeline_of, usage_of
from deepinfer.text.chat import ChatTemplate
from deepinfer.text.detokenizer import Detokenizer
from deepinfer.text.tokenizer import TextCheckpoint, Tokenizer
from deepinfer.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from deepinfer.runtime.build import BuiltDevice
    from deepinfer.runtime.weights import Checkpoint

BEAT_INTERVAL_S = 0.05  # how often the event loop's delay is measured
LAG_MEMORY = 0.98  # per interval, how slowly the worst delay is forgotten


class Engine:
    """Implements `client.EngineClient` in this process, between `start` and `aclose`."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        on_progress: Callable[[str], None] | None = None,
        clock: Clock | None = None,
        build: Callable[[EngineConfig, Callable[[str], None]], BuiltDevice] | None = None,
    ) -> None:
        """`build` makes the device; the default loads the model that `config` names."""
        self.config = config or EngineConfig()
        self.config.validate()
        self._observer = observer or NoObserver()
        self._on_progress = on_progress or (lambda line: None)
        self._clock = clock or RealClock()
        self._build = build
        self._state = EngineState.NEW
        self._failure: BaseException | None = None
        self._live: set[ScheduledSequence] = set()
        self._nobody_left = asyncio.Event()
        self._nobody_left.set()
        self._numbers = itertools.count()
        self._lag_s = 0.0
        self._tokens_per_s = 0.0
        self._loading: asyncio.Task[BuiltDevice] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        """Loads the model, in a thread, and starts the step loop. Raises what loading raises."""
        if self._state is not EngineState.NEW:
            raise EngineClosedError(f"start() on an engine that is {self._state}; make a new one.")
        self._state = EngineState.LOADING
        self._event_loop = asyncio.get_running_loop()
        self._loading = self._event_loop.create_task(self._load(), name="deepinfer load")
        try:
            built = await asyncio.shield(self._loading)
        except asyncio.CancelledError:
            self._state = EngineState.CLOSED
            raise
        except BaseException as error:
            if self._state is EngineState.LOADING:
                self._state, self._failure = EngineState.FAILED, error
            raise
        if self._state is not EngineState.LOADING:  # closed meanwhile
            raise EngineClosedError("The engine was closed while it was loading.")
        self._assemble(built)
        self._state = EngineState.READY

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new, lets what runs finish; False if the time-out cut something off."""
        if self._state is EngineState.READY:
            self._state = EngineState.DRAINING
        try:
            async with asyncio.timeout(
                self.config.drain_timeout_s if timeout_s is None else timeout_s
            ):
                await self._nobody_left.wait()
        except TimeoutError:
            for sequence in list(self._live):
                self.cancel(sequence, "shutdown")
            return False
        return True

    async def aclose(self) -> None:
        """Cancels what runs and frees everything. May be called again, and from several tasks."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._state = EngineState.CLOSED
        if not self._tasks:
            await self._close_unstarted()
            return
        for sequence in list(self._live):
            self.cancel(sequence, "shutdown")
        self._loop.stop()
        await self._device.close()
        stepping, beating = self._tasks
        beating.cancel()
        await asyncio.gather(stepping, beating, return_exceptions=True)

    async def _close_unstarted(self) -> None:
        """A thread that loads cannot be stopped: waits for what it brings, and closes that."""
        if self._loading is not None:
            (built,) = await asyncio.gather(self._loading, return_exceptions=True)
            if not isinstance(built, BaseException):
                await built.device.close()

    async def _load(self) -> BuiltDevice:
        """The device, and the text side beside it. All of it blocks, so it runs in threads."""
        built = await asyncio.to_thread(self._load_device)
        try:
            await asyncio.to_thread(self._load_text, built.checkpoint)
        except BaseException:
            await built.device.close()
            raise
        return built

    def _load_device(self) -> BuiltDevice:
        if self._build is not None:
            return self._build(self.config, self._on_progress)
        self._on_progress("importing torch")
        from deepinfer.runtime.build import build_device

        return build_device(self.config, self._on_progress)

    def _load_text(self, checkpoint: Checkpoint) -> None:
        self._tokenizer = _tokenizer(self.config, checkpoint)
        template = _chat_template_source(self.config, checkpoint.chat_template)
        self._chat_template = ChatTemplate(template, self._tokenizer) if template else None

    def _assemble(self, built: BuiltDevice) -> None:
        self._built = built
        self._device = built.device
        self.model_name = self.config.served_model_name or built.checkpoint.name
        self.max_model_len = built.max_model_len
        self._admission = Admission(
            vocab_size=built.vocab_size,
            max_model_len=built.max_model_len,
            eos_token_ids=self._tokenizer.eos_token_ids,
            engine_seed=self.config.seed,
        )
        self._scheduler = SchedulerState(
            built.device.cache_spec,
            built.device.num_blocks,
            built.device.num_slots,
            built.max_model_len,
            _policy(self.config),
            self.config.enable_prefix_caching,
        )
        self._loop = StepLoop(
            self._scheduler, built.device, self._clock, self._deliver, self._observer
        )
        steps = self._loop.run_overlapped if self.config.overlap else self._loop.run_plain
        self._tasks = [
            self._event_loop.create_task(steps(), name="deepinfer steps"),
            self._event_loop.create_task(self._beat(), name="deepinfer beat"),
        ]
        self._tasks[0].add_done_callback(self._steps_ended)

    def _steps_ended(self, task: asyncio.Task[None]) -> None:
        """The step loop returns only when told to; if it did not, the engine is beyond repair."""
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._state is EngineState.CLOSED or failure is None:
            return
        self._state, self._failure = EngineState.FAILED, failure
        error = EngineError(f"The engine failed and must be restarted: {self._failure!r}.")
        error.__cause__ = self._failure
        for sequence in list(self._live):
            sequence.error = error
            self._scheduler.abandon(sequence, self._clock.now())
        self._deliver(list(self._live))

    # --- facts ---

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is EngineState.CLOSED

    @property
    def failure(self) -> BaseException | None:
        """What made the engine FAILED."""
        return self._failure

    @property
    def tokenizer(self) -> Tokenizer:
        self._require_loaded()
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        self._require_loaded()
        return self._chat_template

    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else the neutral defaults."""
        self._require_loaded()
        stored: dict[str, Any] = self._built.checkpoint.generation_config
        if stored.get("do_sample") is False:
            return SamplingParams(temperature=0.0)
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {name: stored[name] for name in names if stored.get(name) is not None}
        return SamplingParams(**given)

    def explain(self) -> list[str]:
        """Every derived value with its reason, a line each, for start-up."""
        self._require_loaded()
        policy = _policy(self.config)
        return [
            *self._built.explanation,
            f"step: at most {policy.max_num_batched_tokens} tokens, of them "
            f"{policy.max_prefill_tokens_beside_decode} prefill when others decode",
            f"loop: {'overlapped' if self.config.overlap else 'plain'}, prefix cache "
            f"{'on' if self.config.enable_prefix_caching else 'off'}, batch-invariant mode "
            f"{'on' if self.config.batch_invariant else 'off'}",
        ]

    def stats(self) -> EngineStats:
        if not self._tasks:
            return EngineStats()
        state = self._scheduler
        return EngineStats(
            num_running=int(np.count_nonzero(state.slots.wants)),
            num_waiting=state.waiting.num_requests,
            num_waiting_tokens=state.waiting.num_tokens,
            num_blocks=state.pool.usable,
            num_blocks_held=state.pool.num_held,
            num_blocks_cached=state.pool.num_idle,
            prefix_queries_tokens=state.prefix.queries_tokens,
            prefix_hits_tokens=state.prefix.hits_tokens,
            num_preemptions=state.num_preemptions,
            num_steps=state.step_number,
            loop_lag_s=self._lag_s,
        )

    def check(self) -> None:
        """Proves that blocks, slots and sequences are all accounted for. Raises AssertionError."""
        self._require_loaded()
        self._scheduler.check()

    # --- the way in ---

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> Stream:
        """Admits the request or refuses it at once (`RequestError`, `RefusedError`).

        A text is encoded as it is, special tokens in it included. `timeout_s` is the request's own
        deadline from now on. `cache_salt` keeps requests from sharing cached prefixes with others.
        """
        self._require_ready()
        params = self.default_params() if params is None else params
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=True)
        number = next(self._numbers)
        request = self._admission.request(
            prompt,
            params,
            request_id=request_id or f"req-{number}",
            number=number,
            now=self._clock.now(),
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
        )
        detokenizer = Detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )
        root = root_key(self.model_name, self._device.cache_spec.block_tokens, request.cache_salt)
        sequence = ScheduledSequence(request, root, stop_check(detokenizer, params))
        self._scheduler.submit(sequence, self._tokens_per_s)
        self._live.add(sequence)
        self._nobody_left.clear()
        self._loop.wake()
        return Stream(self, sequence, detokenizer)

    # --- the way out ---

    def cancel(self, sequence: ScheduledSequence, cause: str) -> None:
        """Ends a request that its caller left; its blocks are free when this returns."""
        if self._scheduler.cancel(sequence, FinishReason.CANCELLED, self._clock.now()):
            self._observer.on_cancel(cause)
            self._deliver([sequence])
            self._loop.wake()

    def abandon(self, sequence: ScheduledSequence) -> None:
        """As `cancel`, from wherever the garbage collector happens to run."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self.cancel, sequence, "abandoned")

    def _deliver(self, sequences: list[ScheduledSequence]) -> None:
        for sequence in sequences:
            if sequence.finished and sequence in self._live:
                self._forget(sequence)
            if sequence.listener is not None:
                sequence.listener()

    def _forget(self, sequence: ScheduledSequence) -> None:
        self._live.discard(sequence)
        if not self._live:
            self._nobody_left.set()
        assert sequence.finish_reason is not None
        if sequence.finish_reason is FinishReason.DEADLINE:
            self._observer.on_cancel("deadline")
        first_s, arrived_s = sequence.first_token_s, sequence.request.arrived_s
        timeline = timeline_of(sequence)
        usage = usage_of(sequence)
        if timeline.total_s > 0:
            rate = (usage.prompt_tokens + usage.completion_tokens) / timeline.total_s
            rate *= max(1, len(self._live))  # as many others shared the time
            before = self._tokens_per_s or rate
            self._tokens_per_s = before + 0.1 * (rate - before)
        self._observer.on_finish(
            RequestReport(
                request_id=sequence.id,
                finish_reason=sequence.finish_reason,
                usage=usage,
                timeline=timeline,
                time_to_first_token_s=None if first_s is None else first_s - arrived_s,
            )
        )

    async def _beat(self) -> None:
        """Measures how late the event loop runs what is due: what blocking it does to everybody.

        Also ends requests whose deadline passes while a long step keeps the step loop waiting.
        """
        while True:
            due_s = self._clock.now() + BEAT_INTERVAL_S
            await self._clock.sleep_until(due_s)
            now = self._clock.now()
            lag_s = max(0.0, now - due_s)
            self._lag_s = max(lag_s, self._lag_s * LAG_MEMORY)
            self._observer.on_loop_lag(lag_s)
            expired = self._scheduler.expire(now)
            if expired:
                self._deliver(expired)
                self._loop.wake()

    def _require_loaded(self) -> None:
        if not self._tasks:
            raise EngineClosedError(
                f"The engine is {self._state}; it answers between start() and aclose()."
            )

    def _require_ready(self) -> None:
        if self._state is EngineState.DRAINING:
            raise DrainingError("The server is shutting down and takes no new requests.", 5.0)
        if self._state is EngineState.FAILED:
            raise EngineError(
                f"The engine failed and must be restarted: {self._failure!r}."
            ) from self._failure
        if self._state is not EngineState.READY:
            raise EngineClosedError(
                f"The engine is {self._state}; it answers between start() and aclose()."
            )


def _policy(config: EngineConfig) -> Policy:
    """Bounds from the settings; the budget's default lets everybody decode beside a full chunk."""
    beside = config.max_prefill_tokens_beside_decode
    return Policy(
        max_num_batched_tokens=config.max_num_batched_tokens
        or max(2 * beside, config.max_num_seqs + max(beside, config.min_prefill_tokens)),
        max_prefill_tokens_beside_decode=beside,
        min_prefill_tokens=config.min_prefill_tokens,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        max_skips=config.max_skips,
    )


def _chat_template_source(config: EngineConfig, own: str | None) -> str | None:
    if not config.chat_template:
        return own
    try:
        with open(config.chat_template, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template {config.chat_template} cannot be read: {error}.", "chat_template"
        ) from error


def _tokenizer(config: EngineConfig, checkpoint: TextCheckpoint) -> Tokenizer:
    """The checkpoint's own, unless the settings name another."""
    if not config.tokenizer:
        return Tokenizer.from_checkpoint(checkpoint)
    settings = {**checkpoint.config, **checkpoint.generation_config}
    return Tokenizer.from_path(config.tokenizer, settings=settings)
