"""The OpenAI protocol: /v1/completions, /v1/chat/completions, /v1/models.

    bytes -> protocol struct -> refusals -> token ids -> one engine stream per answer
          -> deltas -> chunks (SSE) or one body

Knows the engine only as `client.EngineClient`. A client that leaves cancels the handler (see
`serve/app.py`), the handler leaves `open_streams`, and that cancels the streams.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from deepinfer.errors import RequestError
from deepinfer.serve import requests
from deepinfer.serve.answers import Choice, slowest, timeline_header
from deepinfer.serve.body import read_json
from deepinfer.serve.endpoint import Endpoint
from deepinfer.serve.failures import ApiError, client_left, describe, log_failure
from deepinfer.serve.generation import (
    IndexedDelta,
    Submission,
    follow,
    open_streams,
    require_ready,
)
from deepinfer.serve.keys import CLOCK, CONFIG, CREATED, ENGINE, FAILURE, REQUEST_ID, SERIAL
from deepinfer.serve.openai_format import (
    AnswerFormat,
    AnswerOptions,
    ChatFormat,
    CompletionFormat,
)
from deepinfer.serve.prompts import encode_chat, encode_texts
from deepinfer.serve.protocol import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    GenerationRequest,
    ModelCard,
    ModelList,
)
from deepinfer.serve.sse import DONE, EventStream
from deepinfer.types import Delta, SamplingParams

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)


async def completions(http: web.Request) -> web.StreamResponse:
    body = await read_json(http, _completion_decoder)
    engine, config = http.app[ENGINE], http.app[CONFIG]
    require_ready(engine)
    model = served_model(http, body.model)
    n = requests.check_common(body, config.max_n)
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo together with logprobs is not supported yet: log-probabilities of the prompt "
            "are not computed. Leave one of them out.",
            "echo",
        )
    defaults = engine.default_params()
    limit = requests.DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = requests.sampling_params(body, defaults, max_tokens=limit, logprobs=body.logprobs)
    prompts = requests.completion_prompts(body, config.max_prompts)
    token_ids = await _encode_prompts(http, prompts, body.add_special_tokens)
    options = _options(http, "cmpl", model, body, token_ids, params, n)
    if body.echo:
        echoes = [p if isinstance(p, str) else engine.tokenizer.decode(p) for p in prompts]
        options = msgspec.structs.replace(options, echoes=tuple(echoes))
    format = CompletionFormat(options, engine.tokenizer)
    return await _answer(http, body, token_ids, params, n, format, requests.COMPLETION_FIELDS)


async def _encode_prompts(
    http: web.Request, prompts: Sequence[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each prompt; those that are ids already stay as they are."""
    encoded = await encode_texts(
        http.app[ENGINE].tokenizer,
        [prompt for prompt in prompts if isinstance(prompt, str)],
        add_special_tokens,
        http.app[CONFIG].encode_in_thread_characters,
    )
    texts = iter(encoded)
    return [next(texts) if isinstance(prompt, str) else prompt for prompt in prompts]


async def chat_completions(http: web.Request) -> web.StreamResponse:
    body = await read_json(http, _chat_decoder)
    engine, config = http.app[ENGINE], http.app[CONFIG]
    require_ready(engine)
    model = served_model(http, body.model)
    n = requests.check_common(body, config.max_n)
    defaults = engine.default_params()
    params = requests.sampling_params(
        body,
        defaults,
        max_tokens=requests.chat_max_tokens(body, defaults.max_tokens),
        logprobs=requests.chat_logprobs(body),
    )
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    token_ids = await encode_chat(
        engine,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
        thread_above_characters=config.encode_in_thread_characters,
    )
    options = _options(http, "chatcmpl", model, body, [token_ids], params, n)
    format = ChatFormat(options, engine.tokenizer)
    fields = requests.CHAT_FIELDS
    if body.max_completion_tokens is not None:
        fields = fields | {"max_tokens": "max_completion_tokens"}
    return await _answer(http, body, [token_ids], params, n, format, fields)


def served_model(http: web.Request, name: str | None) -> str:
    """The served model's own name, if `name` is it, an alias of it, or left out."""
    served = http.app[ENGINE].model_name
    aliases = http.app[CONFIG].model_aliases
    if name and name != served and name not in aliases:
        known = ", ".join((served, *aliases))
        raise ApiError(
            404,
            f"The model {name!r} does not exist here. This server serves {known}.",
            code="model_not_found",
            param="model",
        )
    return served


def _options(
    http: web.Request,
    prefix: str,
    model: str,
    body: GenerationRequest,
    token_ids: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
) -> AnswerOptions:
    return AnswerOptions(
        id=f"{prefix}-{http[REQUEST_ID]}",
        created=int(time.time()),
        model=model,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=body.return_token_ids,
        logprobs=params.logprobs,
        skip_special_tokens=params.skip_special_tokens,
        prompt_token_ids=tuple(token_ids) if body.return_token_ids else (),
        n=n,
    )


async def _answer(
    http: web.Request,
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
    format: AnswerFormat,
    fields: dict[str, str],
) -> web.StreamResponse:
    """Submits `n` sequences per prompt and sends what comes, streamed or at once.

    `fields` renames the engine's parameters to the request's, for messages about them.
    """
    timeout_s = requests.deadline(body, http.app[CONFIG].request_timeout_s)
    serial = http.app[SERIAL]
    submissions = [
        Submission(
            request_id=f"{http[REQUEST_ID]}-{next(serial)}",
            prompt_token_ids=prompt,
            params=choice_params,
            priority=body.priority,
            timeout_s=timeout_s,
            cache_salt=body.cache_salt or "",
        )
        for prompt in prompts
        for choice_params in requests.params_per_choice(params, n)
    ]
    choices = [
        Choice(index, is_first_of_prompt=index % n == 0) for index in range(len(submissions))
    ]
    try:
        if body.stream:
            return await _send_events(http, submissions, choices, format)
        return await _send_body(http, submissions, choices, format)
    except RequestError as error:
        error.field = fields.get(error.field or "", error.field)
        raise


async def _send_body(
    http: web.Request,
    submissions: Sequence[Submission],
    choices: Sequence[Choice],
    format: AnswerFormat,
) -> web.StreamResponse:
    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        for index, delta in deltas:
            choices[index].take(delta)

    async with open_streams(http.app[ENGINE], submissions) as streams:
        await follow(streams, receive)
    return web.Response(
        body=format.body(choices),
        content_type="application/json",
        headers={"x-deepinfer-timeline": timeline_header(slowest(choices))},
    )


async def _send_events(
    http: web.Request,
    submissions: Sequence[Submission],
    choices: Sequence[Choice],
    format: AnswerFormat,
) -> web.StreamResponse:
    opened: set[int] = set()

    def events_of(index: int, delta: Delta) -> bytes:
        choice = choices[index]
        choice.take_end(delta)
        if index in opened:
            return format.events(choice, delta)
        opened.add(index)
        return format.opening(choice) + format.events(choice, delta)

    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        data = b"".join([events_of(index, delta) for index, delta in deltas])
        if data:
            await events.send(data)

    async with EventStream(http, http.app[CLOCK], http.app[CONFIG].keepalive_interval_s) as events:
        try:
            async with open_streams(http.app[ENGINE], submissions) as streams:
                await follow(streams, receive)
        except Exception as error:
            if not events.started or client_left(http):
                raise  # to be told in a status line, or to nobody
            http[FAILURE] = f"{type(error).__name__}: {error}"
            failure = describe(error, http[REQUEST_ID])
            log_failure(error, failure, http[REQUEST_ID])
            last = b"data: " + failure.body() + b"\n\n"
        else:
            last = format.closing(choices) + DONE
        return await events.finish(last)


def _cards(http: web.Request) -> list[ModelCard]:
    engine = http.app[ENGINE]
    require_ready(engine)
    return [
        ModelCard(
            id=name,
            created=http.app[CREATED],
            root=engine.model_name,
            max_model_len=engine.max_model_len,
        )
        for name in (engine.model_name, *http.app[CONFIG].model_aliases)
    ]


async def list_models(http: web.Request) -> web.StreamResponse:
    return web.Response(
        body=msgspec.json.encode(ModelList(data=_cards(http))), content_type="application/json"
    )


async def get_model(http: web.Request) -> web.StreamResponse:
    cards = _cards(http)
    name = http.match_info["model"]
    served_model(http, name)
    card = next(card for card in cards if card.id == name)
    return web.Response(body=msgspec.json.encode(card), content_type="application/json")


_ANSWER_ERROR_STATUSES = (400, 404, 408, 413, 415, 500, 503, 504)

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation.",
        body=ChatCompletionRequest,
        answer=ChatCompletionResponse,
        event=ChatCompletionChunk,
        error_statuses=_ANSWER_ERROR_STATUSES,
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue one or several texts.",
        body=CompletionRequest,
        answer=CompletionResponse,
        event=CompletionResponse,
        error_statuses=_ANSWER_ERROR_STATUSES,
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=list_models,
        summary="List the names under which the model is served.",
        answer=ModelList,
        error_statuses=(500, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model:.+}",
        handler=get_model,
        summary="Describe one model.",
        answer=ModelCard,
        error_statuses=(404, 500, 503),
    ),
)
