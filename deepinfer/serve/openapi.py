"""The OpenAPI document, generated from the endpoint list and the msgspec structs themselves.

Nothing is written down twice: types, required fields and documented ranges are the structs',
paths and possible statuses the endpoints'.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from deepinfer.serve.endpoint import Endpoint
from deepinfer.serve.protocol import ErrorResponse, GenerationRequest
from deepinfer.serve.requests import NOT_SERVED

_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def build_document(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    named = {
        part
        for endpoint in endpoints
        for part in (endpoint.body, endpoint.answer, endpoint.event)
        if part is not None
    }
    types = [ErrorResponse, *sorted(named, key=repr)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for endpoint in endpoints:
        if _is_generation(endpoint.body):
            _mark_not_served(components[endpoint.body.__name__])
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "deepinfer",
            "version": version,
            "description": "OpenAI's protocol, and what an engine can do beyond it. "
            "Fields that are not listed are accepted and ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _is_generation(body: Any) -> bool:
    return isinstance(body, type) and issubclass(body, GenerationRequest)


def _mark_not_served(component: dict[str, Any]) -> None:
    """Says of fields that are refused by name which values pass."""
    for field, neutral in NOT_SERVED.items():
        if field in component["properties"]:
            passing = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
            component["properties"][field]["description"] = (
                f"Not supported yet: refused unless it is {passing}."
            )


def _operation(endpoint: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.handler.__name__,
        "responses": {"200": _success(endpoint, schema_of)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    statuses = (*endpoint.error_statuses, *((401,) if endpoint.needs_key else ()))
    for status in sorted(statuses):
        schema = schema_of[ErrorResponse] if endpoint.needs_key else schema_of[endpoint.answer]
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
    if endpoint.needs_key:  # only where the server has keys: the empty entry says "or nothing"
        operation["security"] = [{"key": []}, {}]
    return operation


def _success(endpoint: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if endpoint.answer is None:
        content = {endpoint.answer_media_type: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schema_of[endpoint.answer]}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": _event(schema_of[endpoint.event])}
    return {"description": "OK", "content": content}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream: its data is a chunk, an error, or the mark that ends the stream."""
    chunk = {"oneOf": [data, {"$ref": "#/components/schemas/ErrorResponse"}]}
    as_json = {"contentMediaType": "application/json", "contentSchema": chunk}
    return {
        "description": "One server-sent event.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, {"type": "string", **as_json}]}},
    }
