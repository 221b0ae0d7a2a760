"""What handlers find in the application and on a request: typed keys, no globals.

`serve/app.py` fills the application's, `serve/middleware.py` the request's.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from deepinfer.client import EngineClient
from deepinfer.clock import Clock
from deepinfer.serve.endpoint import Endpoint
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.serve.settings import ServerConfig

ENGINE: web.AppKey[EngineClient] = web.AppKey("engine", EngineClient)
CONFIG: web.AppKey[ServerConfig] = web.AppKey("config", ServerConfig)
CLOCK: web.AppKey[Clock] = web.AppKey("clock", Clock)
METRICS: web.AppKey[PrometheusObserver] = web.AppKey("metrics", PrometheusObserver)
ALL_ENDPOINTS: web.AppKey[tuple[Endpoint, ...]] = web.AppKey("endpoints", tuple)
CREATED: web.AppKey[int] = web.AppKey("created", int)  # when the server started, in Unix seconds
SERIAL: web.AppKey[Iterator[int]] = web.AppKey("serial", Iterator)  # makes engine ids unique

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
FAILURE: web.RequestKey[str] = web.RequestKey(
    "failure", str
)  # why an answer broke off, for the log
