"""Endpoint: one route with what the router, the key check and the OpenAPI document know about it.

A protocol module (`serve/openai.py`, `serve/system.py`) lists its endpoints; `serve/app.py` puts
the lists together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None  # struct of the request's body
    answer: Any = None  # struct of the answer's body; None: see `answer_media_type`
    event: Any = None  # struct of one event, where the answer may be a stream of them
    answer_media_type: str = "application/json"
    error_statuses: tuple[int, ...] = ()  # beside those that the front itself gives
    needs_key: bool = True  # asks for an API key when the server has some
