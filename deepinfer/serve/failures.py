"""Exceptions as HTTP answers: status, OpenAI's error shape, and headers such as Retry-After.

    RequestError 400 · ApiError its own · RefusedError 503 · DeadlineExceededError 504
    EngineError 500 · aiohttp's own (404, 405, 413, ...) · anything else 500, without details

`x-should-retry` tells OpenAI's client libraries when trying again is pointless or welcome.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from deepinfer.errors import (
    DeadlineExceededError,
    DeepinferError,
    DrainingError,
    EngineError,
    PromptTooLongError,
    QueueFullError,
    RefusedError,
    RequestError,
)
from deepinfer.serve.protocol import ErrorDetail, ErrorResponse

log = logging.getLogger("deepinfer.serve")

INVALID = "invalid_request_error"
_NO_RETRY = {"x-should-retry": "false"}


class ApiError(DeepinferError):
    """The front itself refuses a request, for a reason that the engine never sees."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a client gets to see of an exception."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = {}

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.detail))

    def response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=self.body(),
            headers=self.headers,
            content_type="application/json",
        )


def client_left(request: web.Request) -> bool:
    """Nobody is there to be told. A `ConnectionError` alone may also be the engine's."""
    return request.transport is None or request.transport.is_closing()


def describe(error: BaseException, request_id: str) -> Failure:
    """The answer that `error` deserves."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        return _failure(400, str(error), INVALID, error.field, code)
    if isinstance(error, ApiError):
        kind = INVALID if error.status < 500 else "server_error"
        return _failure(error.status, str(error), kind, error.param, error.code, error.headers)
    if isinstance(error, RefusedError):
        return _refused(error)
    if isinstance(error, DeadlineExceededError):
        return _failure(504, str(error), "timeout_error", None, "deadline_exceeded", _NO_RETRY)
    if isinstance(error, EngineError):
        return _failure(500, str(error), "server_error", None, "engine_error")
    if isinstance(error, web.HTTPException):
        return _from_aiohttp(error)
    message = f"Something broke inside the server; its log tells what, under {request_id}."
    return _failure(500, message, "server_error", None, "internal_error")


def log_failure(error: BaseException, failure: Failure, request_id: str) -> None:
    """Our side's failures are logged as such; a client's mistake only shows in the access line."""
    if failure.status != 500:
        return
    is_unexpected = failure.detail.code == "internal_error"
    log.error(
        "%s: %s",
        type(error).__name__,
        error,
        exc_info=error if is_unexpected else None,
        extra={"request_id": request_id},
    )


def _failure(
    status: int,
    message: str,
    kind: str,
    param: str | None,
    code: str | None,
    headers: Mapping[str, str] | None = None,
) -> Failure:
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return Failure(status=status, detail=detail, headers=dict(headers or {}))


def _refused(error: RefusedError) -> Failure:
    code = "unavailable"
    if isinstance(error, QueueFullError):
        code = "queue_full"
    elif isinstance(error, DrainingError):
        code = "draining"
    seconds = str(max(1, math.ceil(error.retry_after_s)))
    return _failure(
        503, str(error), "service_unavailable_error", None, code, {"Retry-After": seconds}
    )


def _from_aiohttp(error: web.HTTPException) -> Failure:
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    if isinstance(error, web.HTTPNotFound):
        message = "There is nothing at this path; /openapi.json lists what there is."
        return _failure(404, message, INVALID, None, "not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"This path does not take {error.method}; it takes {allowed}."
        return _failure(405, message, INVALID, None, "method_not_allowed", headers)
    kind = INVALID if error.status < 500 else "server_error"
    return _failure(error.status, error.text or error.reason, kind, None, None, headers)
