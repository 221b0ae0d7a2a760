"""What each token id stands for, as bytes.

A token is a run of bytes, not of characters: a character may be spread over several tokens. Text is
therefore made by joining bytes and decoding UTF-8 once, and a stream of tokens is decoded by
feeding the same bytes to an incremental decoder (`detokenizer`).

This module reads the rule off a tokenizer's decoder; two families exist in practice:

    byte level       each byte is spelled as one printable character ("Ġ" is the space)
    SentencePiece    "▁" is the space, <0xE4> is a byte, and one leading space may be dropped

Called by `tokenizer` alone, once per tokenizer.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from tokenizers import Tokenizer

from deepinfer.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderRules(NamedTuple):
    byte_level: bool
    byte_tokens: bool = False  # <0x..> stands for a byte
    drops_leading_space: bool = False


class TokenBytes(NamedTuple):
    every: list[bytes]  # by token id
    visible: list[bytes]  # the same, empty for special tokens
    drops_leading_space: bool  # a text loses one space at its start


def token_bytes(backend: Tokenizer, special_token_ids: frozenset[int]) -> TokenBytes:
    """The bytes of every id of `backend`. Ids without a token have none."""
    rules = decoder_rules(backend)
    every = [b""] * max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    every.append(b"")
    spell = _byte_level_bytes if rules.byte_level else _sentence_piece_bytes
    for token, token_id in backend.get_vocab(with_added_tokens=False).items():
        byte = _BYTE_TOKEN.fullmatch(token) if rules.byte_tokens else None
        every[token_id] = bytes([int(byte[1], 16)]) if byte else spell(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        every[token_id] = added.content.encode()  # spelled as it is, in both families
    visible = list(every)
    for token_id in special_token_ids:
        if token_id < len(visible):
            visible[token_id] = b""
    return TokenBytes(every, visible, rules.drops_leading_space)


def decoder_rules(backend: Tokenizer) -> DecoderRules:
    """Which family a decoder belongs to; refuses what belongs to neither."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": "none"}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level = space_mark = byte_tokens = drops_space = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                space_mark = True
            case {"type": "Metaspace", "replacement": "▁"}:
                space_mark = True
                drops_space = step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                byte_tokens = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drops_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                _refuse(str(step["type"]))
    if byte_level == space_mark:
        _refuse(str(state["type"]))
    return DecoderRules(byte_level, byte_tokens, drops_space)


def _refuse(kind: str) -> NoReturn:
    raise UnsupportedModelError(
        f"The tokenizer's decoder {kind!r} is not implemented; byte-level and SentencePiece "
        "decoders are. Serve the model with a tokenizer.json that has one of them."
    )


def _characters_to_bytes() -> dict[int, int]:
    """Byte-level spelling: printable Latin-1 stands for itself, the rest is moved above it."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in kept)
    return {byte: byte for byte in kept} | {256 + n: byte for n, byte in enumerate(moved)}


_TO_BYTES = _characters_to_bytes()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # not spelled in bytes: an entry that no text can reach
        return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    return token.replace("▁", " ").encode()
