"""An engine on a scripted device and a virtual clock: `start_engine(...)` gives one, running.

The tokenizer is real, over a vocabulary of single bytes: token id n below 256 is the byte n, so a
prompt's ids can be read, and 256 ends an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from deepinfer.clock import VirtualClock
from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.observe import RequestReport, StepReport
from deepinfer.runtime.host import limit_spinning
from deepinfer.runtime.scripted import (
    NextToken,
    ScriptedDevice,
    generate_alone,
    hashed_next_token,
    tabled_next_token,
)
from deepinfer.step import CacheSpec, SequenceStart, StepPlan

limit_spinning()  # before any test imports torch

END = 256
VOCAB_SIZE = 260  # padded beyond the tokenizer's, as those of real models are
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class TextCheckpoint:
    """The part of a checkpoint that the engine looks at."""

    tokenizer_json: Path
    name: str = "scripted"
    config: dict[str, Any] = field(default_factory=lambda: {"eos_token_id": END})
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    gguf_metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ScriptedModel:
    """Stands where `runtime.build.BuiltDevice` does."""

    device: ScriptedDevice
    checkpoint: TextCheckpoint
    max_model_len: int
    vocab_size: int = VOCAB_SIZE
    explanation: tuple[str, ...] = ("model: a script",)


class RecordingDevice(ScriptedDevice):
    """Keeps every sequence start, and may be told to break the engine's loop."""

    broken_by: BaseException | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.starts: list[SequenceStart] = []

    def forward(self, plan: StepPlan) -> None:
        self.starts += plan.starts
        super().forward(plan)

    async def collect(self) -> Any:
        result = await super().collect()
        if self.broken_by is not None:
            raise self.broken_by
        return result


class Witness:
    """An Observer that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.finished: dict[str, RequestReport] = {}
        self.cancels: list[str] = []
        self.num_intervals = 0
        self.lags_s: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_token_intervals(self, seconds: NDArray[np.float64]) -> None:
        self.num_intervals += len(seconds)

    def on_finish(self, report: RequestReport) -> None:
        assert report.request_id not in self.finished, "reported twice"
        self.finished[report.request_id] = report

    def on_cancel(self, cause: str) -> None:
        self.cancels.append(cause)

    def on_loop_lag(self, seconds: float) -> None:
        self.lags_s.append(seconds)


class ScriptedEngine(Engine):
    """An Engine with its device, clock and observer at hand."""

    def __init__(
        self,
        tokenizer_json: Path,
        *,
        answers: Mapping[str, str] | None = None,
        max_model_len: int = 64,
        num_blocks: int = 65,
        checkpoint: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`answers`: what follows each prompt; without, an endless and random-looking answer."""
        self.clock = VirtualClock()
        self.witness = Witness()
        sizes = {"max_num_seqs": 8, "block_tokens": BLOCK_TOKENS, "max_num_batched_tokens": 64}
        config = EngineConfig(**(sizes | settings))
        self.next_token = _next_token(answers)
        self.device = RecordingDevice(
            CacheSpec(block_tokens=BLOCK_TOKENS, block_bytes=1),
            num_blocks,
            config.max_num_seqs + 1,
            self.next_token,
            self.clock,
        )
        model = ScriptedModel(
            self.device, TextCheckpoint(tokenizer_json, **(checkpoint or {})), max_model_len
        )
        super().__init__(
            config, observer=self.witness, clock=self.clock, build=lambda config, tell: model
        )

    def alone(self, prompt: str, num_tokens: int) -> list[int]:
        """The answer's ids when no other request is there."""
        return generate_alone(self.next_token, list(prompt.encode()), num_tokens)

    async def turn(self, times: int = 1) -> None:
        """Lets everything that can run do so, `times` turns of the event loop."""
        for _ in range(times):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], Any], most_turns: int = 10_000) -> None:
        for _ in range(most_turns):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came true")

    async def settle(self) -> None:
        """Waits until nothing is in flight, then proves that nothing is held."""
        self.device.release()
        await self.until(lambda: not self.device.num_outstanding)
        await self.turn(4)
        self.check()
        assert self.stats().num_blocks_held == 0
        assert not self.device.violations


def _next_token(answers: Mapping[str, str] | None) -> NextToken:
    if answers is None:
        return hashed_next_token(256)
    table = {tuple(p.encode()): (*a.encode(), END, END) for p, a in answers.items()}
    return tabled_next_token(table)


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of bytes and one special token, `<|end|>`."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    own = [n for n in range(256) if chr(n) in symbols]  # bytes that stand for themselves
    others = [n for n in range(256) if chr(n) not in symbols]
    strange = sorted(symbol for symbol in symbols if ord(symbol) > 255)  # in order of their bytes
    vocabulary = {chr(n): n for n in own} | dict(zip(strange, others, strict=True))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


StartEngine = Callable[..., Awaitable[ScriptedEngine]]


@pytest.fixture
def make_engine(tokenizer_json: Path) -> Callable[..., ScriptedEngine]:
    return lambda **settings: ScriptedEngine(tokenizer_json, **settings)


@pytest.fixture
async def start_engine(make_engine: Callable[..., ScriptedEngine]) -> AsyncIterator[StartEngine]:
    """After the test every engine is closed; nothing may be held, and no task may be left."""
    before = asyncio.all_tasks()
    engines: list[ScriptedEngine] = []

    async def start(**settings: Any) -> ScriptedEngine:
        engine = make_engine(**settings)
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        broken = engine.failure is not None
        await engine.aclose()
        assert not engine.device.violations
        if not broken:
            engine.check()
            assert engine.stats().num_blocks_held == 0
    assert not asyncio.all_tasks() - before - {asyncio.current_task()}
