"""Look-alikes of special tokens are told from the real ones."""

import re

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.text.special_tokens import Span, SpecialToken, SpecialTokens, trie_pattern

NAMES = ["<a>", "<ab>", "<a", "<<", "<a<", "|"]
TOKENS = SpecialTokens({name: SpecialToken(i) for i, name in enumerate(NAMES)})
TEXT = st.text("<>ab|", max_size=12)


@given(text=TEXT)
def test_nothing_guarded_is_found(text):
    assert TOKENS.find(TOKENS.guard(text, "·"), "·") == (text, ())


@given(before=TEXT, text=st.text("<>ab", max_size=12), after=TEXT)
def test_no_token_forms_across_the_end_of_a_guarded_text(before, text, after):
    guarded = TOKENS.guard(text, "·")
    clean, spans = TOKENS.find(f"{before}␟{guarded}{after}", "·")
    start = len(before) + 1
    end = start + len(text)
    assert clean == f"{before}␟{text}{after}"
    assert not [span for span in spans if start <= span.start < end]


@given(text=TEXT)
def test_unguarded_tokens_are_found_leftmost_and_longest(text):
    clean, spans = TOKENS.find(text, "·")
    expected, position = [], 0
    while position < len(text):
        names = [name for name in NAMES if text.startswith(name, position)]
        longest = max(names, key=len, default="")
        if longest:
            end = position + len(longest)
            expected.append(Span(position, end, NAMES.index(longest)))
        position += max(1, len(longest))
    assert clean == text
    assert list(spans) == expected


def test_ordinary_text_is_left_alone():
    tokens = SpecialTokens({"<|im_end|>": SpecialToken(0), "tool_call": SpecialToken(1)})
    for text in ("a < b", "<|im", "tool", "x <| y", ""):
        assert tokens.guard(text, "·").replace("·", "") == text
    assert tokens.guard("a < b", "·") == "a < b"
    assert tokens.guard("tool", "·") == "tool"  # a role must stay what it is
    assert tokens.guard("<|im", "·") == "<·|im"


def test_white_space_may_belong_to_a_token():
    tokens = SpecialTokens(
        {"<l>": SpecialToken(1, takes_space_before=True), "<r>": SpecialToken(2, False, True)}
    )
    assert tokens.find("a  <r> \n b \t<l> c", "·")[1] == (Span(3, 9, 2), Span(10, 15, 1))
    assert tokens.find("<r>  <l>", "·")[1] == (Span(0, 5, 2), Span(5, 8, 1))


def test_no_special_tokens():
    tokens = SpecialTokens({})
    assert tokens.guard("<|x|>", "·") == "<|x|>"
    assert tokens.find("<|x|>", "·") == ("<|x|>", ())


@given(words=st.sets(st.text("ab*|", min_size=1, max_size=5), min_size=1, max_size=8))
def test_the_folded_pattern_matches_the_longest_word(words):
    pattern = re.compile(trie_pattern(words))
    for word in words:
        assert pattern.fullmatch(word)
        longest = max((w for w in words if (word + "ab").startswith(w)), key=len)
        assert pattern.match(word + "ab")[0] == longest
    assert not pattern.fullmatch("")
