"""`deepinfer serve`: the life of a server process, from the open port to the last answer.

The port opens first, so that a probe sees a process that is alive and not yet ready; then the model
is loaded. The first SIGTERM or SIGINT ends the intake and lets running requests finish; a second
SIGINT ends them too. This module decides when; `serve/app.py` knows HTTP, `engine.py` the model.

    listen ──── load ──── ready ──── signal ── drain ── close
      /health 200 ─────────────────────────────────────┤
      /ready 503 ─────────┤ 200 ───────┤ 503 ──────────┤
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.cli import flags
from deepinfer.cli.run import EXIT_INTERRUPTED, Interrupts, first_of, new_runner
from deepinfer.config import EngineConfig
from deepinfer.serve.settings import ServerConfig

if TYPE_CHECKING:
    from deepinfer.engine import Engine
    from deepinfer.serve.app import RunningServer

API_KEY_VARIABLE = "DEEPINFER_API_KEY"

log = logging.getLogger("deepinfer.serve")


def parser() -> argparse.ArgumentParser:
    result = flags.command_parser(
        "serve",
        "Serve a model over HTTP, with the OpenAI protocol.",
        positional="[MODEL]",
        epilog=f"The API key may also be given in the environment variable {API_KEY_VARIABLE}.",
    )
    flags.add_model_argument(result)
    flags.add_flags(result, "server", ServerConfig, flags.SERVER_FLAGS)
    flags.add_engine_flags(result)
    flags.add_log_flags(result, level="info")
    return result


def main(arguments: Sequence[str]) -> int:
    parsed = flags.parse_and_configure_logging(parser(), arguments)
    engine_config = flags.engine_config(parsed, parsed.model)
    server = server_config(parsed)
    with new_runner() as runner:
        return runner.run(_serve(engine_config, server))


def server_config(parsed: argparse.Namespace) -> ServerConfig:
    """The validated ServerConfig; keys on the command line win over the environment's."""
    values = flags.given(parsed, ServerConfig, flags.SERVER_FLAGS)
    if API_KEY_VARIABLE in os.environ:
        values.setdefault("api_keys", (os.environ[API_KEY_VARIABLE],))
    config = ServerConfig(**values)
    config.validate()
    return config


async def _serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Returns the exit code when a signal has come and everything is closed."""
    from deepinfer.engine import Engine
    from deepinfer.serve.app import create_app, run_server
    from deepinfer.serve.metrics import PrometheusObserver

    started_s = time.monotonic()
    observer = PrometheusObserver()
    engine = Engine(engine_config, observer=observer, on_progress=log.info)
    app = create_app(engine, server_config, observer)
    with Interrupts() as interrupts:
        async with run_server(app, server_config) as server:
            log.info("Listening on %s; not ready before the model is loaded.", server.url)
            try:
                await first_of(engine.start(), interrupts.first.wait())
                if not interrupts.first.is_set():
                    _tell_ready(engine, server_config, server, time.monotonic() - started_s)
                    await interrupts.first.wait()
                    await _drain(engine, interrupts)
            finally:
                # Before the server: its handlers end when their streams do.
                await engine.aclose()
    log.info("Closed.")
    return EXIT_INTERRUPTED if interrupts.second.is_set() else 0


async def _drain(engine: Engine, interrupts: Interrupts) -> None:
    stats = engine.stats()
    log.info(
        "Draining: %d running and %d waiting requests may finish; Ctrl-C ends them at once.",
        stats.num_running,
        stats.num_waiting,
    )
    await first_of(engine.drain(), interrupts.second.wait())


def _tell_ready(
    engine: Engine, config: ServerConfig, server: RunningServer, seconds: float
) -> None:
    for line in engine.explain():
        log.info("%s", line)
    log.info("Ready after %.1f s: %s on %s. Try:", seconds, engine.model_name, server.url)
    chat = engine.chat_template is not None
    log.info("%s", curl_line(engine.model_name, config, server.url, chat=chat))


def curl_line(model_name: str, config: ServerConfig, url: str, *, chat: bool) -> str:
    """A command that gets an answer from this server. Keys stay out of the log."""
    body: dict[str, Any] = {"model": model_name, "max_tokens": 32}
    if chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Name three colours."}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Three colours are"
    words = ["curl", "-s"]
    if config.uds:
        words += ["--unix-socket", shlex.quote(config.uds)]
        url = "http://localhost"  # curl wants a host, and the socket makes it irrelevant
    if config.tls_cert_file:
        words.append("-k")
    words.append(url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + path)
    if config.api_keys:
        words += ["-H", f'"Authorization: Bearer ${API_KEY_VARIABLE}"']
    words += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(body))]
    return " ".join(words)
