"""Finds the first stop string in a text that arrives in pieces.

The rule, whatever the pieces: the match that is *complete* first counts; of several that are
complete at the same character the longest. The text is cut where that match begins.

    stops "abcd" and "bc"     in  x a b c d     "bc" is complete first: the text is "xa"
    stops "abc" and "bc"      in  x a b c d     complete together: "abc", the text is "x"

An Aho-Corasick automaton over the stop strings: its state is the longest end of the text so far
that a stop string begins with, which is just what may not be shown yet. Costs one dictionary
look-up a character, however many and long the stop strings are. Called by `detokenizer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The stop string at `position` (0-based) of the list, complete after `end` characters."""

    position: int
    end: int


class StopAutomaton:
    """One reading of one text. `num_held` characters at its end may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # by state: character -> deeper state
        self._depth = [0]  # characters that lead to the state
        self._found: list[int | None] = [None]  # the longest stop string that ends here
        for position, stop in enumerate(stops):
            self._add(stop, position)
        self._fallback = [0] * len(self._next)  # the longest shorter end that is a beginning too
        self._link()
        self._first = frozenset(self._next[0])
        self._state = 0

    @property
    def num_held(self) -> int:
        return self._depth[self._state]

    def read(self, text: str) -> Match | None:
        """Goes on with `text`; after a match nothing more may be read."""
        state = self._state
        if state == 0 and self._first.isdisjoint(text):
            return None
        steps, fallback, found = self._next, self._fallback, self._found
        for index, character in enumerate(text):
            while (deeper := steps[state].get(character)) is None and state:
                state = fallback[state]
            state = deeper or 0
            position = found[state]
            if position is not None:
                return Match(position, index + 1)
        self._state = state
        return None

    def _add(self, stop: str, position: int) -> None:
        state = 0
        for character in stop:
            deeper = self._next[state].get(character)
            if deeper is None:
                deeper = len(self._next)
                self._next[state][character] = deeper
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = deeper
        if state and self._found[state] is None:  # of equal stop strings the first
            self._found[state] = position

    def _link(self) -> None:
        """Breadth first: a state's fallback is shallower, so it is known by then."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            if self._found[state] is None:
                self._found[state] = self._found[self._fallback[state]]
            for character, deeper in self._next[state].items():
                candidate = self._fallback[state]
                while candidate and character not in self._next[candidate]:
                    candidate = self._fallback[candidate]
                self._fallback[deeper] = self._next[candidate].get(character, 0)
                states.append(deeper)
