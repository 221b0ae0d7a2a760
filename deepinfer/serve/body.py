"""Bytes in: reads a request's body within its limits and decodes it into a typed struct.

A mistake becomes a `RequestError` that names the field; too much or too slow an `ApiError`.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from deepinfer.errors import RequestError
from deepinfer.serve.failures import ApiError
from deepinfer.serve.keys import CONFIG

T = TypeVar("T")

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")


async def read_json(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the struct that `decoder` makes."""
    return decode_json(await _read(request), decoder)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _name_the_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError("The body nests deeper than any sensible request does.") from None


async def _read(request: web.Request) -> bytes:
    config = request.app[CONFIG]
    # Web pages may post text/plain and forms to any origin without asking; JSON they may not.
    declared = request.headers.get("Content-Type")
    if declared is not None and not _is_json(request.content_type):
        raise ApiError(
            415,
            f"The body is declared as {request.content_type}; "
            "send JSON and the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    size = request.content_length
    if size is not None and size > config.max_body_bytes:
        raise _too_large(f"The body has {size} bytes", config.max_body_bytes)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large("The body is larger", config.max_body_bytes) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(
            400, f"The body's transfer or content encoding is broken: {error}.", code="broken_body"
        ) from None
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {config.body_timeout_s:g} s.", code="body_timeout"
        ) from None


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _too_large(what: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"{what}, more than the {limit} bytes allowed. Send less, or start the server with a "
        "larger limit on bodies.",
        code="body_too_large",
    )


def _name_the_field(text: str) -> RequestError:
    """`Expected `int`, got `str` - at `$.n`` -> the message and the field `n`."""
    match = _PLACE.match(text)
    assert match is not None  # the pattern matches every text
    what, field = match["what"], (match["path"] or "").lstrip(".")
    missing = _MISSING.search(what)
    if missing is not None:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return RequestError(f"The field {field} is missing; it is required.", field)
    problem = "has the wrong type" if what.startswith("Expected") else "has a bad value"
    return RequestError(f"{field or 'The body'} {problem}: {what}.", field or None)
