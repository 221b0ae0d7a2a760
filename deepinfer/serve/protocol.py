"""The wire format of the OpenAI protocol and of our additions, as typed structs.

Owns field names, types and documented ranges, and nothing else: `serve/requests.py` turns these
into the engine's vocabulary, `serve/openapi.py` turns them into a document. Fields that nobody
knows are accepted and ignored; fields that are known but not served yet are declared here so that
`serve/requests.py` can refuse them by name. Fields after "ours" are not OpenAI's: they bear the
names that users of vLLM and SGLang know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from deepinfer.types import MAX_TOP_LOGPROBS


def _range(low: float, high: float | None = None) -> Meta:
    """Documents a range; the check itself, with its better message, is `SamplingParams`'."""
    schema: dict[str, Any] = {"minimum": low}
    if high is not None:
        schema["maximum"] = high
    return Meta(extra_json_schema=schema)


_AT_LEAST_ONE = Meta(extra_json_schema={"minItems": 1})
TokenId = Annotated[int, _range(0)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None  # empty: the model that is served
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _range(1)] | None = None
    temperature: Annotated[float, _range(0, 100)] | None = None
    top_p: (
        Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None
    ) = None
    max_tokens: Annotated[int, _range(1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    # ours
    top_k: Annotated[int, _range(-1)] | None = None
    min_p: Annotated[float, _range(0, 1)] | None = None
    min_tokens: Annotated[int, _range(0)] | None = None
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0  # lower goes first
    timeout: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})] | None = None
    cache_salt: str | None = None  # requests share cached prefixes only when it is equal
    return_token_ids: bool = False
    # known, refused unless neutral
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions. `max_tokens` is 16 unless given, as at OpenAI."""

    # one text, texts, one list of ids, lists of ids
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], _AT_LEAST_ONE]
    echo: bool | None = None
    logprobs: Annotated[int, _range(0, MAX_TOP_LOGPROBS)] | None = None
    # ours
    add_special_tokens: bool = True
    # known, refused unless neutral
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # known, refused unless neutral
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], _AT_LEAST_ONE]
    max_completion_tokens: Annotated[int, _range(1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _range(0, MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None  # handed to the template
    # ours
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    # known, refused unless neutral
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: str | None = None


# --- answers ---


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageInfo(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(msgspec.Struct, kw_only=True):
    """Where the time went, in milliseconds. With several choices: of the one that took longest."""

    queued_ms: float  # arrival to first admission
    prefill_ms: float  # first admission to first token
    decode_ms: float  # first token to last
    total_ms: float
    cached_tokens: int
    prefix_miss: str  # why the prefix cache did not serve more
    preemptions: int
    stalls_ms: dict[str, float]  # cause -> time it cost


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]  # where the token begins in the text, in characters


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # ours: the stop string or token id that matched
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
    timings: Timings | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "deepinfer"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a `prompt`, or `messages` that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class StateResponse(msgspec.Struct, kw_only=True):
    status: str
    state: str


class VersionResponse(msgspec.Struct):
    version: str
