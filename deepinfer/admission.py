"""Admission: what a caller asks for becomes a checked `Request`, or a refusal that teaches.

Called by the engine for every request, before the scheduler sees it. Pure functions of their
arguments: no clock, no queue, no tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import PromptTooLongError, RequestError
from deepinfer.text.detokenizer import Detokenizer
from deepinfer.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """The facts of a model and its engine that requests are held against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    engine_seed: int

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        number: int,
        now: float,
        priority: int,
        timeout_s: float | None,
        cache_salt: str,
    ) -> Request:
        """`number` counts the engine's requests: it seeds those that bring no seed.

        Raises `RequestError`. More `max_tokens` than the context has room for are cut to that.
        """
        params.validate()
        token_ids = _token_ids(prompt, self.vocab_size)
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(len(token_ids), self.max_model_len - 1)
        for token_id in params.stop_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"stop_token_ids has {token_id}; ids of this model are 0 to "
                    f"{self.vocab_size - 1}.",
                    "stop_token_ids",
                )
        if timeout_s is not None and not timeout_s > 0:
            raise RequestError(f"timeout is {timeout_s} s; it must be positive.", "timeout")
        room = self.max_model_len - len(token_ids)
        ends = () if params.ignore_eos else self.eos_token_ids
        return Request(
            id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=_seed(self.engine_seed, number) if params.seed is None else params.seed,
            max_total_tokens=len(token_ids) + min(room, params.max_tokens or room),
            stop_token_ids=tuple(dict.fromkeys((*ends, *params.stop_token_ids))),
            priority=priority,
            arrived_s=now,
            deadline_s=None if timeout_s is None else now + timeout_s,
            cache_salt=cache_salt.encode(),
        )


def stop_check(
    detokenizer: Detokenizer, params: SamplingParams
) -> Callable[[int], str | None] | None:
    """Only requests with stop strings pay for text on the scheduler's path."""
    if not params.stop:
        return None

    def check(token_id: int) -> str | None:
        detokenizer.push((token_id,))
        return detokenizer.stop_match

    return check


def _token_ids(prompt: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """The checked prompt: not empty, every id one that the model has."""
    try:
        wide = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        wide = np.empty((0, 0))
    if wide.shape == (0,):
        raise RequestError("The prompt is empty; give at least one token.", "prompt")
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
        raise RequestError("The prompt is neither a text nor a list of token ids.", "prompt")
    if wide.min() < 0 or wide.max() >= vocab_size:
        wrong = int(wide[(wide < 0) | (wide >= vocab_size)][0])
        raise RequestError(
            f"The prompt has the token id {wrong}; ids of this model are 0 to {vocab_size - 1}.",
            "prompt",
        )
    return wide.astype(np.int32)


def _seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's `number`-th request, for those who brought none."""
    text = f"{engine_seed}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
