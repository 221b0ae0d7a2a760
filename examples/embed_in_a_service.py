"""An aiohttp service with routes of its own that has an engine inside.

    .venv/bin/python examples/embed_in_a_service.py --port 8080
    curl -N 'http://127.0.0.1:8080/explain?topic=tides'
    curl -X POST --data-binary @README.md http://127.0.0.1:8080/headline

The engine lives in the service's own event loop: it starts and ends with the application, installs
no signal handlers and starts no processes. Leaving a stream, for whatever reason, ends its request
on the engine and frees its memory.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.errors import RefusedError, RequestError

ENGINE = web.AppKey("engine", Engine)
HEADLINE_TIMEOUT_S = 30.0


async def engine_context(app: web.Application) -> AsyncIterator[None]:
    """aiohttp runs the part before `yield` at start-up and the rest at shut-down."""
    async with Engine(EngineConfig(max_num_seqs=16), on_progress=print) as engine:
        app[ENGINE] = engine
        yield


def conversation(engine: Engine, question: str) -> str | list[int]:
    """The question as the model wants to read it."""
    if engine.chat_template is None:
        return question
    rendered = engine.chat_template.render([{"role": "user", "content": question}])
    return engine.tokenizer.encode_rendered(rendered)


async def explain(request: web.Request) -> web.StreamResponse:
    """Streams plain text, piece by piece, as it is generated.

    When the client leaves, writing fails, the `async with` is left, and the engine stops working
    on an answer that nobody reads.
    """
    engine = request.app[ENGINE]
    topic = request.query.get("topic", "event loops")
    prompt = conversation(engine, f"Explain {topic} to a child.")
    params = SamplingParams(temperature=0.0, max_tokens=120)
    # `generate` admits or refuses at once, so the status can still be chosen here.
    async with engine.generate(prompt, params) as stream:
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        async for delta in stream:
            if delta.text:
                await response.write(delta.text.encode())
        await response.write_eof(b"\n")
        return response


async def headline(request: web.Request) -> web.Response:
    """Answers as a whole, or not at all: `asyncio.timeout` ends the request like any other code."""
    engine = request.app[ENGINE]
    text = (await request.text())[:4000]
    prompt = conversation(engine, f"Write a headline for this text, nothing else:\n\n{text}")
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=("\n",))
    try:
        async with asyncio.timeout(HEADLINE_TIMEOUT_S), engine.generate(prompt, params) as stream:
            pieces = [delta.text async for delta in stream]
    except TimeoutError:
        raise web.HTTPGatewayTimeout(text=f"No headline in {HEADLINE_TIMEOUT_S:g} s.\n") from None
    return web.json_response({"headline": "".join(pieces).strip()})


async def health(request: web.Request) -> web.Response:
    stats = request.app[ENGINE].stats()
    return web.json_response({"running": stats.num_running, "waiting": stats.num_waiting})


@web.middleware
async def engine_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The engine's refusals in this service's words."""
    try:
        return await handler(request)
    except RefusedError as error:
        headers = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        raise web.HTTPServiceUnavailable(text=f"{error}\n", headers=headers) from error
    except RequestError as error:
        raise web.HTTPBadRequest(text=f"{error}\n") from error


def create_app() -> web.Application:
    app = web.Application(middlewares=[engine_errors])
    app.cleanup_ctx.append(engine_context)
    app.router.add_get("/explain", explain)
    app.router.add_post("/headline", headline)
    app.router.add_get("/health", health)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8080)
    # With handler_cancellation a client that leaves cancels its handler at once, also one that
    # waits for the first token and writes nothing.
    web.run_app(
        create_app(),
        host="127.0.0.1",
        port=parser.parse_args().port,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
