"""However ids are split, the text is the same, and nothing is shown that must be taken back."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.text.detokenizer import Detokenizer
from deepinfer.text.tokenizer import Tokenizer

# Strings whose tokens are parts of characters, and what makes stop strings hard.
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text("ab \n<|>", max_size=30),
    st.sampled_from(["👩🏽‍💻 中文字符", "e\u0301\u0302", "\ufffd", "<|im_end|>\n", "    x", "𝔘𐒠"]),
)
STOPS = st.lists(st.text("ab \n<|\ufffd中", min_size=1, max_size=5), max_size=4).map(tuple)


@st.composite
def streams(draw, tokenizer):
    """Chunks of ids: encodings of hard strings, random ids, bytes, special and unknown ids."""
    spaces_and_bytes = st.sampled_from(range(17, 300))
    some = st.one_of(
        TEXTS.map(tokenizer.encode),
        st.lists(st.integers(0, 49300), max_size=6),
        st.lists(spaces_and_bytes, max_size=8),
        st.lists(st.integers(0, 16), max_size=2),
    )
    ids = [i for part in draw(st.lists(some, max_size=5)) for i in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]


def first_stop(text, stops):
    """(start, end, stop) of the match that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return None


def read(detokenizer, chunks):
    """The texts taken after each chunk, and the last."""
    taken = []
    for chunk in chunks:
        detokenizer.push(chunk)
        taken.append(detokenizer.take())
    return taken, detokenizer.finish()


@settings(max_examples=400, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_split_gives_the_text_of_all_at_once(tokenizer, data, skip):
    chunks = data.draw(streams(tokenizer))
    ids = [i for chunk in chunks for i in chunk]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    taken, rest = read(detokenizer, chunks)
    assert "".join(taken) + rest == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.stop_match is None
    assert detokenizer.finish() == ""


@settings(max_examples=400, deadline=None)
@given(data=st.data(), stops=STOPS, include_stop=st.booleans())
def test_stop_strings_cut_the_whole_text(tokenizer, data, stops, include_stop):
    chunks = data.draw(streams(tokenizer))
    ids = [i for chunk in chunks for i in chunk]
    whole = tokenizer.decode(ids)
    match = first_stop(whole, stops)
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop=include_stop)
    taken, rest = read(detokenizer, chunks)
    text = "".join(taken) + rest
    if match is None:
        assert text == whole
        assert detokenizer.stop_match is None
    else:
        start, end, stop = match
        assert text == whole[: end if include_stop else start]
        assert detokenizer.stop_match == stop


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stops=STOPS)
def test_nothing_is_shown_that_may_become_a_stop_string(tokenizer, data, stops):
    chunks = data.draw(streams(tokenizer))
    detokenizer = Detokenizer(tokenizer, stop=stops)
    shown, ids = "", []
    for chunk in chunks:
        ids += chunk
        if detokenizer.push(chunk):
            break
        shown += detokenizer.take()
        known = tokenizer.decode(ids)
        assert known.startswith(shown)
        # What is shown stays true even if the worst comes next: no rest completes a stop string
        # that begins inside it.
        for stop in stops:
            for length in range(1, len(stop)):
                assert not (known.endswith(stop[:length]) and len(known) - length < len(shown))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stops=STOPS)
def test_the_stop_is_found_at_the_same_token_in_any_split(tokenizer, data, stops):
    chunks = data.draw(streams(tokenizer))
    one_by_one = Detokenizer(tokenizer, stop=stops)
    for token_id in (i for chunk in chunks for i in chunk):
        if one_by_one.push([token_id]):
            break
    chunked = Detokenizer(tokenizer, stop=stops)
    found = [chunked.push(chunk) for chunk in chunks]
    assert chunked.num_tokens == one_by_one.num_tokens
    assert chunked.stop_match == one_by_one.stop_match
    assert (found[-1:] == [True]) == (one_by_one.stop_match is not None)
    assert found == sorted(found)  # once found, it stays found


def test_half_a_character_waits_for_its_rest(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids[:-1]:
        detokenizer.push([token_id])
        assert detokenizer.take() == ""
    detokenizer.push(ids[-1:])
    assert detokenizer.take() == "😀"


def test_half_a_character_at_the_end_is_replaced(tokenizer):
    ids = tokenizer.encode("a😀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids)
    assert detokenizer.take() == "a"
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(ids)[1:]


def test_ids_after_the_stop_are_ignored(tokenizer):
    ids = tokenizer.encode("one\nEND two")
    detokenizer = Detokenizer(tokenizer, stop=("\nEND",))
    assert detokenizer.push(ids)
    assert detokenizer.push(tokenizer.encode(" three"))
    assert detokenizer.take() == "one"
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == len(tokenizer.encode("one\nEND"))
    assert detokenizer.stop_match == "\nEND"


def test_a_possible_stop_string_is_held_and_let_go(tokenizer):
    detokenizer = Detokenizer(tokenizer, stop=("\n\nUser:",))
    detokenizer.push(tokenizer.encode("Hi\n\nUs"))
    assert detokenizer.take() == "Hi"
    detokenizer.push(tokenizer.encode("e it"))
    assert detokenizer.take() == "\n\nUse it"
    detokenizer.push(tokenizer.encode("\n\n"))
    assert detokenizer.take() == ""
    assert detokenizer.finish() == "\n\n"


def test_special_tokens_do_not_break_a_stop_string(tokenizer):
    ids = [*tokenizer.encode("EN"), 0, *tokenizer.encode("D")]
    detokenizer = Detokenizer(tokenizer, stop=("END",))
    assert detokenizer.push(ids)
    assert not Detokenizer(tokenizer, stop=("END",), skip_special_tokens=False).push(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 280), max_size=12), size=st.integers(1, 4))
def test_sentence_piece_drops_one_space_once(sentence_piece, ids, size):
    detokenizer = Detokenizer(sentence_piece)
    taken, rest = read(detokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(taken) + rest == sentence_piece.decode(ids)


@pytest.fixture(scope="module")
def sentence_piece():
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", "▁a", "a", "中", "a▁"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *pieces],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
            "tokenizer.ggml.scores": [0.0] * (len(pieces) + 3),
        }
    )


def test_the_cost_of_a_token_does_not_grow(tokenizer):
    """Neither with the length of the stream, nor with text untaken or held."""

    def seconds(num_ids, stop):
        detokenizer = Detokenizer(tokenizer, stop=stop)
        ids = [tokenizer.encode("a")[0]] * num_ids
        started = time.process_time()
        for token_id in ids:
            detokenizer.push((token_id,))
        detokenizer.finish()
        return time.process_time() - started

    for stop in ((), ("a" * 1023 + "b",)):
        short = min(seconds(20_000, stop) for _ in range(3))
        long = min(seconds(80_000, stop) for _ in range(3))
        assert long < 12 * short  # 4 if linear, 16 if squared
