"""The jinja2 environment that chat templates run in, with the conventions they are written for.

Owns what a template may do and how much of it. A template sees plain values and cannot reach
attributes of Python objects, files or modules; what it builds is bounded in size. It is not bounded
in time: a template comes with the model, from whoever runs the server, never from a request.

Called by `chat` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024


class RefusedByTemplateError(jinja2.TemplateError):
    """The template called raise_exception."""


class RenderedTooLongError(jinja2.TemplateError):
    """The output, or a value on the way to it, passed the limit."""


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here it is
    its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compile with `from_string`, render with `render_bounded`."""

    intercepted_binops = frozenset({"*", "**"})  # one of these makes much out of little

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
        )
        self.filters["tojson"] = _to_json
        self.filters["center"] = _center
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        for value in (*arguments, *named.values()):  # e.g. the width in text.ljust(width)
            if isinstance(value, int) and value > MAX_RENDERED_CHARACTERS:
                raise RenderedTooLongError(f"{value} is beyond what a template may ask for")
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1e6 and abs(right) <= 64):
            raise RenderedTooLongError(f"{left} ** {right} is beyond what a template may compute")
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__") and len(one) * other > MAX_RENDERED_CHARACTERS:
                    raise RenderedTooLongError(
                        f"repeating {len(one)} items {other} times passes the limit of "
                        f"{MAX_RENDERED_CHARACTERS}"
                    )
        return super().call_binop(context, operator, left, right)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The output; `RenderedTooLongError` once it passes `MAX_RENDERED_CHARACTERS`."""
    pieces, length = list[str](), 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            raise RenderedTooLongError(
                f"the rendered prompt passes the limit of {MAX_RENDERED_CHARACTERS} characters"
            )
        pieces.append(piece)
    return "".join(pieces)


def _center(value: Any, width: int = 80) -> str:
    if width > MAX_RENDERED_CHARACTERS:
        raise RenderedTooLongError(f"{width} is beyond what a template may ask for")
    return str(value).center(width)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML, which models never saw."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
