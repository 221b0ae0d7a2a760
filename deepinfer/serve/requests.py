"""A decoded OpenAI request in the engine's vocabulary: prompts, sampling parameters, refusals.

Pure functions on structs; no HTTP and no engine calls. What is declared in the protocol but not
served yet is refused by name here, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from deepinfer.errors import RequestError
from deepinfer.serve.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)
from deepinfer.types import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for completions only
_SEED_LIMIT = 2**64

# Field -> the values with which it asks for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_grammar": (None,),
    "guided_choice": (None,),
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "chat_template": (None, ""),
}
_MESSAGE_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "audio": (None,),
}
_ROLES = ("system", "developer", "user", "assistant")

# Names of the engine that differ from those on the wire.
COMPLETION_FIELDS = {"include_stop": "include_stop_str_in_output"}
CHAT_FIELDS = COMPLETION_FIELDS | {"prompt": "messages", "logprobs": "top_logprobs"}


def check_common(request: GenerationRequest, max_n: int) -> int:
    """Refuses what is not served and returns the number of answers per prompt."""
    _refuse_not_served(request, NOT_SERVED, "")
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_n:
        raise RequestError(f"n is {n}; it must lie in [1, {max_n}].", "n")
    if request.best_of is not None and request.best_of != n:
        raise RequestError(
            f"best_of is {request.best_of} and n is {n}; choosing the best of more answers than "
            "are returned is not supported yet. Leave best_of out.",
            "best_of",
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed together with stream: true.", "stream_options"
        )
    return n


def _refuse_not_served(part: Any, table: dict[str, tuple[Any, ...]], where: str) -> None:
    for field, neutral in table.items():
        value = getattr(part, field, None)
        if value not in neutral:
            raise RequestError(
                f"{where}{field} is not supported yet. Leave it out.", f"{where}{field}"
            )


def completion_prompts(request: CompletionRequest, max_prompts: int) -> list[str | list[int]]:
    """`prompt` has four forms; what comes out is one entry per prompt, as text or token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one prompt.", "prompt")
    if len(set(map(type, prompt))) > 1:
        odd = next(i for i, entry in enumerate(prompt) if type(entry) is not type(prompt[0]))
        raise RequestError(
            "prompt mixes forms; it is a string, a list of strings, a list of token ids or a "
            "list of such lists.",
            f"prompt[{odd}]",
        )
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    n = request.n or 1
    if len(prompt) * n > max_prompts:
        times = f", times n = {n}" if n > 1 else ""
        raise RequestError(
            f"prompt holds {len(prompt)} prompts{times}; one request may hold {max_prompts}.",
            "prompt",
        )
    return cast(list[str | list[int]], prompt)


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """The request's own values over the checkpoint's recommendations."""
    stop = request.stop
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "min_tokens": request.min_tokens,
        "seed": request.seed,
        "max_tokens": max_tokens,
        "stop": (stop,) if isinstance(stop, str) else stop,
        "stop_token_ids": request.stop_token_ids,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    for name in ("stop", "stop_token_ids"):
        if name in changes:
            changes[name] = tuple(changes[name])
    return msgspec.structs.replace(
        defaults,
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        **changes,
    )


def params_per_choice(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The i-th answer to a prompt has the seed plus i, so that answers differ and repeat."""
    if params.seed is None or n == 1:
        return [params] * n
    return [
        msgspec.structs.replace(params, seed=_wrapped_seed(params.seed + index))
        for index in range(n)
    ]


def _wrapped_seed(seed: int) -> int:
    return seed - _SEED_LIMIT if seed >= _SEED_LIMIT else seed


def deadline(request: GenerationRequest, server_limit_s: float) -> float | None:
    """Seconds that the request may take: its own time-out, capped by the server's."""
    limits = [server_limit_s] if server_limit_s > 0 else []
    if request.timeout is not None:
        if not (request.timeout > 0 and math.isfinite(request.timeout)):
            raise RequestError(
                f"timeout is {request.timeout}; it is a time in seconds and must be positive.",
                "timeout",
            )
        limits.append(request.timeout)
    return min(limits, default=None)


def chat_max_tokens(request: ChatCompletionRequest, default: int | None) -> int | None:
    """`max_completion_tokens` replaced `max_tokens` at OpenAI; both given must agree."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens is {new} and max_tokens is {old}; give one of them.",
            "max_completion_tokens",
        )
    if new is not None:
        return new
    return old if old is not None else default


def chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            "top_logprobs is only allowed together with logprobs: true.", "top_logprobs"
        )
    return None


def template_messages(messages: Sequence[ChatMessage], developer_role: str) -> list[dict[str, Any]]:
    """Messages as `ChatTemplate.render` takes them; it refuses content that is no text itself."""
    if not messages:
        raise RequestError("messages is empty; give at least one message.", "messages")
    return [
        _template_message(message, f"messages[{position}].", developer_role)
        for position, message in enumerate(messages)
    ]


def _template_message(message: ChatMessage, where: str, developer_role: str) -> dict[str, Any]:
    _refuse_not_served(message, _MESSAGE_NOT_SERVED, where)
    if message.role in ("tool", "function"):
        raise RequestError(f"The role {message.role} is not supported yet.", f"{where}role")
    if message.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise RequestError(f"The role {message.role!r} is not one of {known}.", f"{where}role")
    if message.content is None:
        raise RequestError("The message has no content; give a text.", f"{where}content")
    entry: dict[str, Any] = msgspec.to_builtins(message)
    if message.role == "developer":
        entry["role"] = developer_role
    return entry
