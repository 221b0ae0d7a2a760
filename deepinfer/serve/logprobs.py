"""Log-probabilities in OpenAI's two shapes. Knows the tokenizer, no HTTP."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.serve.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from deepinfer.types import TokenLogprob

if TYPE_CHECKING:
    from deepinfer.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Each token with its bytes, since part of a character has no text of its own."""
    content = []
    for entry in logprobs:
        token = _top_logprob(tokenizer, entry.token_id, entry.logprob)
        top = [_top_logprob(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatTokenLogprob(token.token, token.logprob, token.bytes, top))
    return ChatLogprobs(content=content)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(raw.decode("utf-8", "replace"), logprob, list(raw))


class CompletionLogprobsWriter:
    """Legacy log-probabilities of one answer; offsets go on from call to call.

    `text_offset` counts characters of the text before the token. A character whose bytes come in
    several tokens counts once it is complete; a token that is not shown in the text (an
    end-of-sequence id, say) counts nothing.
    """

    def __init__(self, tokenizer: Tokenizer, first_offset: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._offset = first_offset
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, logprobs: Iterable[TokenLogprob], num_top: int) -> CompletionLogprobs:
        result = CompletionLogprobs(
            tokens=[], token_logprobs=[], top_logprobs=[] if num_top else None, text_offset=[]
        )
        for entry in logprobs:
            result.tokens.append(self._text(entry.token_id))
            result.token_logprobs.append(entry.logprob)
            result.text_offset.append(self._offset)
            if result.top_logprobs is not None:
                result.top_logprobs.append(self._top(entry))
            self._advance(entry.token_id)
        return result

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the chosen one if it is not among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._text(token_id), logprob)
        return top

    def _text(self, token_id: int) -> str:
        """The token's text; part of a character is written as its bytes, to stay distinct."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _advance(self, token_id: int) -> None:
        if self._skip_special_tokens and not self._tokenizer.decode(
            [token_id], skip_special_tokens=True
        ):
            return
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
