"""Detokenizer: turns one sequence's token ids, as they come, into text that may be shown.

Owns what is between "generated" and "shown": bytes that are not yet a character, and characters
that may yet become a stop string. Three promises, whatever the ids and however they are split:

* the texts taken, joined, equal `tokenizer.decode` of all ids, cut at the first stop string;
* nothing is shown that would have to be taken back: no half character, no part of a stop string;
* the cost of a token does not depend on how many came before.

        bytes of the ids ──> UTF-8 decoder ──> stop automaton ──> take()
                             keeps ≤ 3 bytes   keeps num_held characters

The engine makes one per sequence and calls it on the event loop.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from deepinfer.text.stop_strings import StopAutomaton
from deepinfer.text.tokenizer import Tokenizer


class Detokenizer:
    """`push` ids, `take` text, `finish` once at the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are looked for in the text after the first `min_tokens` tokens."""
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._drop_space = tokenizer.drops_leading_space  # and no text has come yet
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._automaton = StopAutomaton(self._stop) if stop else None
        self._undecoded = b""
        self._ready: list[str] = []  # may be taken
        self._held = ""  # may become a stop string
        self.stop_match: str | None = None  # the stop string that was found
        self.num_tokens = 0  # ids read, up to and with the one that completed the stop string

    def push(self, ids: Iterable[int]) -> bool:
        """Reads ids until a stop string is complete; True if it is. Ids after it are ignored."""
        if self._automaton is None:
            ids = list(ids)
            self.num_tokens += len(ids)
            self._decode(b"".join(map(self._piece, ids)))
            return False
        for token_id in ids:
            if self.stop_match is not None:
                break
            self.num_tokens += 1
            self._decode(self._piece(token_id))
        return self.stop_match is not None

    def take(self) -> str:
        """The text that became showable since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """The rest, after the last id. Bytes that no id completed become U+FFFD."""
        if self.stop_match is None:
            self._decode(b"", final=True)
            self._ready.append(self._held)
            self._held = ""
        return self.take()

    def _piece(self, token_id: int) -> bytes:
        # A model's vocabulary may be padded beyond the tokenizer's.
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def _decode(self, piece: bytes, final: bool = False) -> None:
        data = self._undecoded + piece
        text, used = utf_8_decode(data, "replace", final)
        self._undecoded = data[used:]
        if not text:
            return
        if self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self._automaton is None or self.num_tokens <= self._min_tokens:
            self._ready.append(text)
        else:
            self._look_for_stop(self._automaton, text)

    def _look_for_stop(self, automaton: StopAutomaton, text: str) -> None:
        match = automaton.read(text)
        if match is None:
            text = self._held + text
            shown = len(text) - automaton.num_held
            self._ready.append(text[:shown])
            self._held = text[shown:]
            return
        self.stop_match = stop = self._stop[match.position]
        text = self._held + text[: match.end]
        self._ready.append(text if self._include_stop else text.removesuffix(stop))
        self._held = ""
