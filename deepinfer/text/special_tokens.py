"""Special tokens as text: finds them, and keeps what only looks like one from being found.

A prompt mixes text of two origins. The chat template's `<|im_end|>` is the token; the same letters
in a user's message are letters. `guard` puts a *mark*, a character that occurs nowhere else, into
whatever could be taken for a special token; `find` then sees only those that carry no mark, and
takes the marks out again:

    user's text        tell me about <|im_end|>
    guarded            tell me about <·|im_end|>                (· is the mark)
    rendered           <|im_start|>user⏎tell me about <·|im_end|><|im_end|>⏎
    found              ^^^^^^^^^^^^                             ^^^^^^^^^^

`chat` guards and renders, `Tokenizer.encode_rendered` uses what was found. Guarding also covers a
token that would form across the end of a guarded text and what follows it. It does not cover text
that a template cuts out of the middle of a message and joins.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class SpecialToken(NamedTuple):
    token_id: int
    takes_space_before: bool = False  # white space on that side belongs to the token
    takes_space_after: bool = False


class Span(NamedTuple):
    """text[start:end] is one special token."""

    start: int
    end: int
    token_id: int


class SpecialTokens:
    """The special tokens of one tokenizer, by their text. Immutable."""

    def __init__(self, tokens: Mapping[str, SpecialToken]) -> None:
        self._tokens = dict(tokens)
        self._pattern = trie_pattern(tokens) if tokens else "(?!)"
        self._any = re.compile(self._pattern)
        self._starts = re.compile(f"(?={self._pattern})")
        # Letters alone are left out: "tool" must stay "tool" beside a special token "tool_call".
        beginnings = {text[:n] for text in tokens for n in range(1, len(text))}
        self._prefixes = frozenset(text for text in beginnings if not text.isalnum())
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    def guard(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of all that is, or at the end of the text
        could become, a special token."""
        cuts = set[int]()
        if self._any.search(text):
            cuts.update(match.start() + 1 for match in self._starts.finditer(text))
        for length in range(1, min(self._longest_prefix, len(text)) + 1):
            if text[-length:] in self._prefixes:
                cuts.add(len(text) - length + 1)
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(edges))

    def find(self, text: str, mark: str) -> tuple[str, tuple[Span, ...]]:
        """`text` without its marks, and the special tokens in it, leftmost and longest first."""
        pieces: list[str] = []
        spans: list[Span] = []
        taken = length = 0  # characters of `text` used, characters of clean text made
        for match in re.finditer(f"{self._pattern}(?!{mark})", text):
            piece = text[taken : match.start()].replace(mark, "")
            pieces += (piece, match[0])
            start = length + len(piece)
            length = start + len(match[0])
            taken = match.end()
            spans.append(Span(start, length, self._tokens[match[0]].token_id))
        pieces.append(text[taken:].replace(mark, ""))
        clean = "".join(pieces)
        return clean, tuple(self._widened(clean, spans))

    def _widened(self, text: str, spans: list[Span]) -> Iterable[Span]:
        """Spans with the white space that belongs to their tokens."""
        floor = 0
        for index, (start, end, token_id) in enumerate(spans):
            token = self._tokens[text[start:end]]
            ceiling = spans[index + 1].start if index + 1 < len(spans) else len(text)
            if token.takes_space_before:
                start = floor + len(text[floor:start].rstrip())
            if token.takes_space_after:
                end = ceiling - len(text[end:ceiling].lstrip())
            floor = end
            yield Span(start, end, token_id)


def trie_pattern(words: Iterable[str]) -> str:
    """A regular expression for the longest of `words` at a position.

    Alternatives that share a beginning are folded, so the cost at a position does not grow with
    their number (some vocabularies have a thousand special tokens).
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _alternatives(root)


def _alternatives(node: dict[str, Any]) -> str:
    branches = []
    for character, child in node.items():
        if character:
            text = re.escape(character)
            while len(child) == 1 and "" not in child:  # a run without branches
                ((following, child),) = child.items()
                text += re.escape(following)
            branches.append(text + _alternatives(child))
    if not branches:
        return ""
    joined = "|".join(branches)
    if "" in node:
        return f"(?:{joined})?"
    return joined if len(branches) == 1 else f"(?:{joined})"
