"""The neutral vocabulary of a request: what goes into an engine and what comes out.

Nothing here knows HTTP, tokenizers or tensors. Every layer above the kernels may import it.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from deepinfer.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
_INT32_MAX = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence id, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"  # the caller left
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the step that computed it failed


class PrefixMiss(enum.StrEnum):
    """Why the prefix cache did not serve more of a prompt than it did."""

    NONE = "none"  # everything that can be served was served
    DISABLED = "disabled"  # prefix caching is off
    SHORT = "short"  # no full block before the last token, which is always computed
    COLD = "cold"  # the first block was never seen
    DIVERGED = "diverged"  # a leading part was found, then the prompt goes its own way
    EVICTED = "evicted"  # the next block was cached once and had to make room


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Validated by `validate()`, which engines call.

    `temperature == 0` is greedy. Filters apply in the order temperature, top_k, top_p, min_p, and
    each is off at its default. Log-probabilities are those of the raw distribution: before
    temperature and filters.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0  # stop token ids are masked until this many tokens are out
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the matched stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: off; 0: of the chosen token; k: and of the k best

    def validate(self) -> None:
        """Raises `RequestError` that names the first field that is out of range."""
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("top_k", self.top_k, -1, _INT32_MAX)
        _check("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, _INT32_MAX)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens}).",
                    "min_tokens",
                )
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(self.stop)} stop strings given, at most {MAX_STOP_STRINGS} are allowed.",
                "stop",
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARACTERS:
                raise RequestError(
                    f"A stop string has {len(text)} characters; "
                    f"1 to {MAX_STOP_STRING_CHARACTERS} are allowed.",
                    "stop",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    below = value <= low if low_open else value < low
    if math.isnan(value) or below or value > high:
        bracket = "(" if low_open else "["
        raise RequestError(f"{field} is {value}; it must lie in {bracket}{low}, {high}].", field)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute, in token ids. `arrived_s` and `deadline_s` are clock readings."""

    id: str
    prompt_token_ids: Any  # numpy int32 [prompt_tokens]
    params: SamplingParams
    seed: int  # resolved: never None
    max_total_tokens: int  # prompt + output, at most the context limit
    stop_token_ids: tuple[int, ...]  # resolved: end-of-sequence ids included unless ignored
    priority: int = 0  # lower goes first
    arrived_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: bytes = b""  # part of the prefix key: requests share blocks only when equal


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of an emitted token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in seconds. `stalls_s` maps a cause to the time it cost."""

    queued_s: float = 0.0  # arrival to first admission
    prefill_s: float = 0.0  # first admission to first token
    decode_s: float = 0.0  # first token to last
    total_s: float = 0.0
    cached_tokens: int = 0
    prefix_miss: PrefixMiss = PrefixMiss.NONE
    preemptions: int = 0
    stalls_s: dict[str, float] = {}


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What became known since the last delta. The one with a finish reason is the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None  # the stop string or token id that ended it
    usage: Usage | None = None  # on the last delta
    timeline: Timeline | None = None  # on the last delta
