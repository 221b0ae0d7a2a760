"""Everything beside generating: tokens, states, version, metrics, and how to call the rest."""

from __future__ import annotations

import html
from typing import Any

import msgspec
from aiohttp import web

from deepinfer import __version__
from deepinfer.client import EngineState
from deepinfer.errors import RequestError
from deepinfer.serve import metrics
from deepinfer.serve.body import read_json
from deepinfer.serve.endpoint import Endpoint
from deepinfer.serve.generation import require_ready
from deepinfer.serve.keys import ALL_ENDPOINTS, CONFIG, ENGINE, METRICS
from deepinfer.serve.openai import served_model
from deepinfer.serve.openapi import build_document
from deepinfer.serve.prompts import decode_tokens, encode_chat, encode_texts
from deepinfer.serve.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    StateResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_NOT_READY_RETRY_S = "2"


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )


async def tokenize(http: web.Request) -> web.StreamResponse:
    body = await read_json(http, _tokenize_decoder)
    engine, config = http.app[ENGINE], http.app[CONFIG]
    require_ready(engine)
    served_model(http, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        (token_ids,) = await encode_texts(
            engine.tokenizer,
            [body.prompt],
            body.add_special_tokens is not False,
            config.encode_in_thread_characters,
        )
    else:
        token_ids = await encode_chat(
            engine,
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs or {},
            thread_above_characters=config.encode_in_thread_characters,
        )
    texts = None
    if body.return_token_strs:
        texts = [engine.tokenizer.token_text(token) for token in token_ids]
    return _json(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=engine.max_model_len,
            tokens=token_ids,
            token_strs=texts,
        )
    )


async def detokenize(http: web.Request) -> web.StreamResponse:
    body = await read_json(http, _detokenize_decoder)
    engine, config = http.app[ENGINE], http.app[CONFIG]
    require_ready(engine)
    served_model(http, body.model)
    tokenizer = engine.tokenizer
    for position, token in enumerate(body.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(
                f"Token id {token} does not exist; ids lie in [0, {tokenizer.vocab_size - 1}].",
                f"tokens[{position}]",
            )
    text = await decode_tokens(tokenizer, body.tokens, config.encode_in_thread_characters)
    return _json(DetokenizeResponse(text))


async def health(http: web.Request) -> web.StreamResponse:
    """Alive: the event loop answers and the engine has not failed for good."""
    state = http.app[ENGINE].state
    alive = state is not EngineState.FAILED
    return _json(
        StateResponse(status="ok" if alive else "failed", state=str(state)), 200 if alive else 503
    )


async def ready(http: web.Request) -> web.StreamResponse:
    """Can serve: false while loading, draining, closed or failed."""
    state = http.app[ENGINE].state
    if state is EngineState.READY:
        return _json(StateResponse(status="ready", state=str(state)))
    return _json(
        StateResponse(status="not ready", state=str(state)),
        503,
        {"Retry-After": _NOT_READY_RETRY_S},
    )


async def version(http: web.Request) -> web.StreamResponse:
    return _json(VersionResponse(__version__))


async def show_metrics(http: web.Request) -> web.StreamResponse:
    return web.Response(
        body=http.app[METRICS].exposition(), headers={"Content-Type": metrics.CONTENT_TYPE}
    )


async def openapi(http: web.Request) -> web.StreamResponse:
    endpoints = http.app[ALL_ENDPOINTS]
    return _json(build_document(endpoints, __version__))


async def index(http: web.Request) -> web.StreamResponse:
    """For people who open the address in a browser."""
    engine = http.app[ENGINE]
    is_loaded = engine.state in (EngineState.READY, EngineState.DRAINING)
    model = html.escape(engine.model_name if is_loaded else "a model")
    address = html.escape(f"{http.scheme}://{http.host}")
    rows = "".join(
        f"<tr><td>{entry.method}</td><td><code>{html.escape(_path(entry))}</code></td>"
        f"<td>{html.escape(entry.summary)}</td></tr>"
        for entry in http.app[ALL_ENDPOINTS]
    )
    page = _PAGE.format(
        model=model, state=engine.state, version=__version__, address=address, rows=rows
    )
    return web.Response(text=page, content_type="text/html")


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace(":.+", "")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>deepinfer</title>
<style>body{{font:16px/1.5 sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#f4f4f4;padding:1rem;overflow-x:auto}}td{{padding:.1rem .8rem .1rem 0}}</style>
<h1>deepinfer {version}</h1>
<p>Serves <b>{model}</b>; its engine is <b>{state}</b>.</p>
<pre>curl -N {address}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'</pre>
<p>OpenAI's client libraries work with <code>base_url="{address}/v1"</code>.</p>
<table>{rows}</table>
</html>
"""


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Token ids of a text or a conversation.",
        body=TokenizeRequest,
        answer=TokenizeResponse,
        error_statuses=(400, 404, 408, 413, 415, 500, 503),
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="Text of token ids.",
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
        error_statuses=(400, 404, 408, 413, 415, 500, 503),
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=health,
        summary="Whether the server is alive.",
        answer=StateResponse,
        error_statuses=(503,),
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        handler=ready,
        summary="Whether the server takes requests: not while it loads or drains.",
        answer=StateResponse,
        error_statuses=(503,),
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/version",
        handler=version,
        summary="The version of this software.",
        answer=VersionResponse,
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        handler=show_metrics,
        summary="Metrics for Prometheus.",
        answer_media_type="text/plain",
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        summary="This interface as an OpenAPI document.",
        answer=dict[str, Any],
        needs_key=False,
    ),
    Endpoint(
        method="GET",
        path="/",
        handler=index,
        summary="What runs here and how to call it, for people.",
        answer_media_type="text/html",
        needs_key=False,
    ),
)
