"""What happens around every handler, outermost first.

    account         request id in and out, one log line, the HTTP counters
    answer_failures exceptions become OpenAI's error shape
    allow_origins   CORS, only where origins are configured
    authenticate    API keys, only where keys are configured

Open without a key are the endpoints marked `needs_key=False`: what probes and scrapers call, and
what tells how to call the rest. All others, also paths that do not exist, ask for one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from deepinfer import __version__
from deepinfer.serve.endpoint import Endpoint
from deepinfer.serve.failures import ApiError, client_left, describe, log_failure
from deepinfer.serve.keys import CONFIG, FAILURE, METRICS, REQUEST_ID
from deepinfer.serve.settings import ServerConfig

log = logging.getLogger("deepinfer.serve")

REQUEST_ID_HEADER = "x-request-id"
CLIENT_LEFT = 499  # nginx's number; nobody is there to read it, the log and the counters have it
_GOOD_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_QUIET = frozenset({"/health", "/ready", "/metrics"})  # machines ask every few seconds
_EXPOSED = "x-request-id, x-deepinfer-timeline, retry-after"


def build_middlewares(
    config: ServerConfig, endpoints: tuple[Endpoint, ...]
) -> tuple[Middleware, ...]:
    chain: list[Middleware] = [account, answer_failures]
    if config.cors_origins:
        chain.append(allow_origins(config.cors_origins))
    if config.api_keys:
        chain.append(authenticate(config.api_keys, endpoints))
    return tuple(chain)


async def label_response(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before any headers leave."""
    response.headers["Server"] = f"deepinfer/{__version__}"
    if REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    origins = request.app[CONFIG].cors_origins
    if origins:
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin", "")
        if origin and _is_allowed(origin, origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _is_allowed(origin: str, origins: tuple[str, ...]) -> bool:
    return "*" in origins or origin in origins


@web.middleware
async def account(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A client's own id is kept if it is harmless in logs and headers; else it gets a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _GOOD_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    start_s = time.perf_counter()
    try:
        response = await handler(request)
    except BaseException:  # `answer_failures` answers the others
        _note(request, CLIENT_LEFT, start_s)
        raise
    _note(request, response.status, start_s)
    return response


def _note(request: web.Request, status: int, start_s: float) -> None:
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "other"
    if METRICS in request.app:
        method = request.method if resource is not None else "other"
        request.app[METRICS].on_http(method, path, status)
    level = logging.DEBUG if path in _QUIET and status in (200, 503) else logging.INFO
    failure = request.get(FAILURE)
    log.log(
        level,
        "%s %s %d in %.1f ms%s",
        request.method,
        request.rel_url.raw_path,
        status,
        (time.perf_counter() - start_s) * 1000,
        f" broke off: {failure}" if failure else "",
        extra={"request_id": request[REQUEST_ID]},
    )


@web.middleware
async def answer_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        if client_left(request):
            raise
        failure = describe(error, request[REQUEST_ID])
        log_failure(error, failure, request[REQUEST_ID])
        return failure.response()


def allow_origins(origins: tuple[str, ...]) -> Middleware:
    """Answers preflights for pages of these origins; `label_response` marks the answers."""

    @web.middleware
    async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = (
            request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        )
        if not (is_preflight and _is_allowed(request.headers.get("Origin", ""), origins)):
            return await handler(request)
        asked = request.headers.get("Access-Control-Request-Headers", "")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": asked or "authorization, content-type",
                "Access-Control-Max-Age": "600",
            },
        )

    return cors


def authenticate(keys: tuple[str, ...], endpoints: tuple[Endpoint, ...]) -> Middleware:
    """Asks for `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    known = [_digest(key) for key in keys]
    open_paths = {endpoint.path for endpoint in endpoints if not endpoint.needs_key}

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in open_paths:
            return await handler(request)
        given = _digest(_given_key(request))
        # All keys are compared, in constant time each: timing tells nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in known]
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong; send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return check_key


def _given_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Equal lengths for the comparison."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
