"""Texts and conversations to token ids, without holding up the event loop.

A short text is encoded where it stands; a long one in a worker thread of the loop's executor,
because streams of other clients must not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.client import EngineClient
from deepinfer.errors import RequestError
from deepinfer.serve.protocol import ChatMessage
from deepinfer.serve.requests import template_messages

if TYPE_CHECKING:
    from deepinfer.text.chat import ChatTemplate
    from deepinfer.text.tokenizer import Tokenizer

T = TypeVar("T")


async def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    add_special_tokens: bool,
    thread_above_characters: int,
) -> list[list[int]]:
    """Texts that the caller wrote whole: special tokens in them count as such."""

    def encode_all() -> list[list[int]]:
        return [
            tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)
            for text in texts
        ]

    return await _run(encode_all, sum(map(len, texts)), thread_above_characters)


async def decode_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], thread_above_characters: int
) -> str:
    return await _run(
        lambda: tokenizer.decode(token_ids, skip_special_tokens=False),
        len(token_ids),
        thread_above_characters,
    )


async def encode_chat(
    engine: EngineClient,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any],
    thread_above_characters: int,
) -> list[int]:
    """A conversation through the model's template; special tokens in messages stay plain text."""
    template = engine.chat_template
    if template is None:
        raise RequestError(
            f"{engine.model_name} has no chat template; use /v1/completions, or start the server "
            "with --chat-template.",
            "messages",
        )
    plain = template_messages(messages, developer_role(template))
    tokenizer = engine.tokenizer

    def render_and_encode() -> list[int]:
        rendered = template.render(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_kwargs,
        )
        return tokenizer.encode_rendered(rendered)

    size = sum(_num_characters(message) for message in messages)
    return await _run(render_and_encode, size, thread_above_characters)


def _num_characters(message: ChatMessage) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text or "") for part in message.content or ())


def developer_role(template: ChatTemplate) -> str:
    """The role that developer messages take: templates that do not know it get "system"."""
    return "developer" if "developer" in template.source else "system"


async def _run(work: Callable[[], T], num_characters: int, thread_above_characters: int) -> T:
    if num_characters <= thread_above_characters:
        return work()
    return await asyncio.to_thread(work)
