"""The HTTP front: puts routes, middlewares and limits together, and runs them on sockets.

    async with run_server(create_app(engine, config, observer), config) as server:
        print(server.url)
        await stop.wait()            # whoever owns the process owns the signals
        await engine.drain()         # /ready says no, new requests get 503, running ones finish

Leaving the block stops accepting, waits for answers under way, then closes. Knows the engine only
as `client.EngineClient`; does not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from deepinfer.client import EngineClient
from deepinfer.clock import Clock, RealClock
from deepinfer.errors import ConfigError
from deepinfer.serve import openai, system
from deepinfer.serve.keys import (
    ALL_ENDPOINTS,
    CLOCK,
    CONFIG,
    CREATED,
    ENGINE,
    METRICS,
    SERIAL,
)
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.serve.middleware import build_middlewares, label_response
from deepinfer.serve.settings import ServerConfig as ServerConfig

log = logging.getLogger("deepinfer.serve")


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens. `port` is the real one, also if the system chose it."""

    url: str  # "http://127.0.0.1:8000"; for a Unix socket "http://unix:PATH"
    host: str = ""
    port: int = 0
    uds: str = ""


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    observer: PrometheusObserver | None = None,
    *,
    clock: Clock | None = None,
) -> web.Application:
    """`observer` is the one that the engine reports to; without one, only HTTP is counted."""
    config.validate()
    endpoints = (*openai.ENDPOINTS, *system.ENDPOINTS)
    app = web.Application(
        middlewares=build_middlewares(config, endpoints), client_max_size=config.max_body_bytes
    )
    observer = observer or PrometheusObserver()
    observer.bind(engine)
    app[ENGINE] = engine
    app[CONFIG] = config
    app[CLOCK] = clock or RealClock()
    app[METRICS] = observer
    app[ALL_ENDPOINTS] = endpoints
    app[CREATED] = int(time.time())
    app[SERIAL] = itertools.count()
    for endpoint in endpoints:
        if endpoint.method == "GET":
            app.router.add_get(endpoint.path, endpoint.handler)  # takes HEAD as well
        else:
            app.router.add_route(endpoint.method, endpoint.path, endpoint.handler)
    app.on_response_prepare.append(label_response)
    return app


class _ConnectionLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's own log: what no handler sees. A peer that breaks the protocol gets one line.

    Such a peer (a port scanner, say) is answered 400 and cut off by aiohttp, which by itself would
    write a traceback at "error" each time: anybody could fill the log and hide real errors.
    """

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            reason = exc_info.message.partition(":")[0]  # what follows may quote a header: a key
            kind = type(exc_info).__name__
            self.info("Closed a connection that does not speak proper HTTP: %s, %s", kind, reason)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)


@contextlib.asynccontextmanager
async def run_server(app: web.Application, config: ServerConfig) -> AsyncIterator[RunningServer]:
    """Serves `app` inside the block. A client that leaves cancels the handler of its request."""
    tls = _tls_context(config)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,  # serve/middleware.py writes its own lines, with request ids
        logger=_ConnectionLog(log, {}),
        shutdown_timeout=config.shutdown_timeout_s,
    )
    await runner.setup()
    try:
        yield await _listen(runner, config, tls)
    finally:
        await runner.cleanup()
        if config.uds:  # closing a Unix socket leaves its file
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)


async def _listen(
    runner: web.AppRunner, config: ServerConfig, tls: ssl.SSLContext | None
) -> RunningServer:
    scheme = "https" if tls else "http"
    if config.uds:
        try:
            await web.UnixSite(runner, config.uds, ssl_context=tls, backlog=1024).start()
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on the Unix socket {config.uds}: {error.strerror or error}. "
                "Choose another --uds.",
                "uds",
            ) from error
        return RunningServer(url=f"{scheme}://unix:{config.uds}", uds=config.uds)
    site = web.TCPSite(runner, config.host, config.port, ssl_context=tls, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}. "
            "Choose another --host or --port.",
            "port",
        ) from error
    host = f"[{config.host}]" if ":" in config.host else config.host
    return RunningServer(url=f"{scheme}://{host}:{site.port}", host=config.host, port=site.port)


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if not config.tls_cert_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"Cannot load the TLS certificate {config.tls_cert_file} and its key: {error}.",
            "tls_cert_file",
        ) from error
    return context
