"""ChatTemplate: messages to a prompt, through the checkpoint's own template.

Owns the meaning of a message list: which parts of a message become text, what a template is given,
and which special tokens in the result are the template's (see `special_tokens`). Knows nothing of
HTTP; the server, the command line and offline scripts call `render` and then
`Tokenizer.encode_rendered`.

    messages ── to plain strings ── guard look-alikes ── template ── find special tokens ── Rendered
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2

from deepinfer.errors import CheckpointError, RequestError
from deepinfer.text.sandbox import (
    RefusedByTemplateError,
    RenderedTooLongError,
    TemplateEnvironment,
    render_bounded,
)
from deepinfer.text.tokenizer import Rendered, Tokenizer

_MAX_DEPTH = 64  # of nested lists and objects in what a request brings
_MEDIA_WORDS = ("image", "audio", "video", "file")
# Printable letters that hardly any text has: a template may print, slice or trim around them.
_MARKS = range(0x2A6DF, 0x20000, -1)


class _Spelling(NamedTuple):
    """How an assistant's tool calls are written down for a template."""

    missing_content: str | None  # beside the calls
    object_arguments: bool  # parsed; else the JSON text that OpenAI's protocol has


# Templates disagree, and fail on the spelling that they do not expect: the first that works is it.
_SPELLINGS = (
    _Spelling(None, object_arguments=True),
    _Spelling("", object_arguments=True),
    _Spelling(None, object_arguments=False),
    _Spelling("", object_arguments=False),
)


class _TemplateFailedError(RequestError):
    """The template broke off, which another spelling may mend."""


class ChatTemplate:
    """Compiled once; `render` may be called from several threads.

    `now` is what `strftime_now` reads in the template. Raises `CheckpointError` for a template that
    does not compile.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        try:
            self._template = TemplateEnvironment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"The chat template does not compile: line {error.lineno}: {error.message}. "
                "Correct it, or name another with --chat-template."
            ) from error
        self._source_characters = frozenset(source)
        self._special_tokens = tokenizer.special_tokens
        self._constants = {"bos_token": "", "eos_token": ""}
        if tokenizer.bos_token_id is not None:
            self._constants["bos_token"] = tokenizer.token_text(tokenizer.bos_token_id)
        if tokenizer.eos_token_ids:
            self._constants["eos_token"] = tokenizer.token_text(tokenizer.eos_token_ids[0])
        self._wants_parts = self._shows_only([{"type": "text", "text": "probe"}])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt for `messages`, which are in the shape of OpenAI's chat protocol.

        `continue_final_message` leaves the last message open, so that the model goes on with it;
        no generation prompt is written then. Raises `RequestError`.
        """
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message.", "messages")
        given = {
            **(chat_template_kwargs or {}),
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        plain = [_normalized(message, i, self._wants_parts) for i, message in enumerate(messages)]
        calls_tools = any(message.get("tool_calls") for message in plain)
        failure: _TemplateFailedError | None = None
        for spelling in _SPELLINGS if calls_tools else _SPELLINGS[:1]:
            given["messages"] = [_spelled(message, spelling) for message in plain]
            try:
                return self._render_guarded(given, continue_final_message)
            except _TemplateFailedError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _render_guarded(self, values: Mapping[str, Any], continue_final_message: bool) -> Rendered:
        mark, end = self._unused_characters(values)
        guarded = _guarded(values, lambda text: self._special_tokens.guard(text, mark))
        if continue_final_message:
            _append(guarded["messages"][-1], end)
        text = self._render(guarded | self._constants)
        if continue_final_message:
            text = _cut_at(text, end)
        return Rendered(*self._special_tokens.find(text, mark))

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return render_bounded(self._template, variables)
        except RefusedByTemplateError as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error.message}", "messages"
            ) from error
        except RenderedTooLongError as error:
            raise RequestError(
                f"The chat template's output is too long: {error.message}. Send less.", "messages"
            ) from error
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise _failed(error) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _failed(error) from error

    def _shows_only(self, content: list[dict[str, str]]) -> bool:
        """Whether the template writes such content but not the same text as a plain string."""

        def writes(content: Any) -> bool:
            variables = {
                "messages": [{"role": "user", "content": content}],
                "add_generation_prompt": False,
            }
            try:
                return self._render(variables | self._constants).count("probe") == 1
            except RequestError:
                return False

        as_parts = writes(content)
        return as_parts and not writes("probe")

    def _unused_characters(self, values: Any) -> tuple[str, str]:
        used = self._source_characters.union(*_strings(values))
        unused = (chr(code) for code in _MARKS if chr(code) not in used)
        try:
            return next(unused), next(unused)
        except StopIteration:
            raise RequestError(
                f"The messages use all {len(_MARKS)} characters of CJK Extension B; one must "
                "remain to keep text apart from special tokens.",
                "messages",
            ) from None


def _failed(error: BaseException) -> _TemplateFailedError:
    reason = str(error).rstrip(".")
    return _TemplateFailedError(
        f"The chat template fails on these messages: {type(error).__name__}: {reason}. Check that "
        "roles and fields are ones that the model's template knows.",
        "messages",
    )


def _normalized(message: Mapping[str, Any], index: int, wants_parts: bool) -> dict[str, Any]:
    """A message as templates expect it: content a string, or one part, or absent beside calls."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role.", f"{where}.role")
    normalized = dict(message)
    text = _content_text(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list | tuple):
        raise RequestError(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
    if text is None and not calls:
        text = ""
    if wants_parts and text is not None:
        normalized["content"] = [{"type": "text", "text": text}]
    else:
        normalized["content"] = text
    return normalized


def _content_text(content: Any, where: str) -> str | None:
    """Content as one string; texts of several parts are joined by line feeds."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of parts.", where)
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    for word in _MEDIA_WORDS:
        if word in str(kind):
            raise RequestError(
                f"{where} is of type {kind!r}, but {word}s are not supported by this model. "
                "Send text parts only.",
                where,
            )
    raise RequestError(
        f'{where} is of type {kind!r}; expected {{"type": "text", "text": "..."}}.', where
    )


def _spelled(message: dict[str, Any], spelling: _Spelling) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    spelled = dict(message)
    if spelled["content"] is None:
        spelled["content"] = spelling.missing_content
    if spelling.object_arguments:
        spelled["tool_calls"] = [_with_object_arguments(call) for call in spelled["tool_calls"]]
    return spelled


def _with_object_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _append(message: dict[str, Any], end: str) -> None:
    content = message["content"]
    if isinstance(content, list):
        content[-1]["text"] += end
    elif isinstance(content, str):
        message["content"] = content + end
    else:
        raise RequestError(
            "The last message has no content that could be continued.", "continue_final_message"
        )


def _cut_at(text: str, end: str) -> str:
    """`text` up to the end of the last message, which `end` marks."""
    before, found, _ = text.rpartition(end)
    if not found:
        raise RequestError(
            "The chat template does not write the last message as it is, so it cannot be "
            "continued. Send it without continue_final_message.",
            "continue_final_message",
        )
    return before


def _guarded(value: Any, guard: Callable[[str], str], depth: int = 0) -> Any:
    """A copy of `value` in which every string, keys included, went through `guard`."""
    if isinstance(value, str):
        return guard(value)
    if depth > _MAX_DEPTH:
        raise RequestError(
            f"The messages, tools or documents are nested deeper than {_MAX_DEPTH} levels.",
            "messages",
        )
    if isinstance(value, Mapping):
        return {guard(str(key)): _guarded(item, guard, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(item, guard, depth + 1) for item in value]
    return value


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth > _MAX_DEPTH:
        return  # refused by `_guarded`
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, depth + 1)
