"""The Engine Protocol: all that a server, a script or a tool may ask of an engine.

`engine.Engine` implements it in this process; a remote engine will implement it over a control
channel. `generate` checks and admits or refuses at once (`RequestError`, `RefusedError`), and what
it returns is a live request: leaving it, in any way, cancels it.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from deepinfer.observe import EngineStats
from deepinfer.types import Delta, SamplingParams

if TYPE_CHECKING:
    from deepinfer.text.chat import ChatTemplate
    from deepinfer.text.tokenizer import Tokenizer


class EngineState(enum.StrEnum):
    """Alive is every state but FAILED; ready is READY alone."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class TokenStream(Protocol):
    """An async iterator of `Delta` and an async context manager. The last delta has a reason.

    Iterating raises `DeviceError` or `DeadlineExceededError` if the request ended that way.
    """

    request_id: str

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def aclose(self) -> None:
        """Cancels the request if it still runs; its blocks are free when this returns."""


class EngineClient(Protocol):
    """Local or remote, the same calls."""

    @property
    def state(self) -> EngineState: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else the neutral defaults."""

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> TokenStream: ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new, lets what runs finish; False if the time-out cut something off."""
