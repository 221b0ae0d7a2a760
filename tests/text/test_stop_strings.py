"""The automaton finds what reading one character at a time would find."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.stop_strings import Match, StopAutomaton


def first_match(text, stops):
    """The rule itself: earliest end; then the longest; then the first in the list."""
    for end in range(1, len(text) + 1):
        found = [(-len(s), i) for i, s in enumerate(stops) if s and text[:end].endswith(s)]
        if found:
            return Match(min(found)[1], end)
    return None


def num_held(text, stops):
    """The longest end of the text that a stop string begins with."""
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stops)), 0)


LETTERS = st.text("ab", max_size=6)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), stops=st.lists(LETTERS, max_size=5))
def test_equals_the_rule(pieces, stops):
    automaton = StopAutomaton(stops)
    read = ""
    for piece in pieces:
        match = automaton.read(piece)
        expected = first_match(read + piece, stops)
        if expected is not None:
            assert match == Match(expected.position, expected.end - len(read))
            return
        assert match is None
        read += piece
        assert automaton.num_held == num_held(read, stops)


@pytest.mark.parametrize(
    ("stops", "text", "position", "end"),
    [
        (["abcd", "bc"], "xabcd", 1, 4),  # complete first, though the other begins earlier
        (["bc", "abc"], "xabcd", 1, 4),  # complete together: the longest
        (["aab"], "aaab", 0, 4),  # begins inside a failed attempt
        (["x", "x"], "x", 0, 1),  # equal: the first
    ],
)
def test_ties_and_overlaps(stops, text, position, end):
    assert StopAutomaton(stops).read(text) == Match(position, end)


def test_no_stop_strings_hold_nothing():
    automaton = StopAutomaton([])
    assert automaton.read("anything") is None
    assert automaton.num_held == 0
