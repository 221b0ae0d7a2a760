"""GGUF vocabularies of both kinds, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {
    "▁": -90.0, "a": -91.0, "b": -92.0, "c": -93.0,
    "▁a": -3.0, "ab": -1.0, "bc": -2.0, "abc": -4.0, "▁ab": -5.0, "aa": -2.5, "▁▁": -6.0,
    "▁abc": -7.0, "cab": -0.5,
}  # fmt: skip


def sentence_piece_metadata(**changes):
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<think>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0] * 259 + list(PIECES.values()) + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def merged_by_score(text):
    """SentencePiece's rule in its plainest form: merge the best-scored adjacent pair, the leftmost
    of equals, until none is a token; spell what is left over in bytes."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        known = [(-PIECES[pair], i) for i, pair in enumerate(pairs) if pair in PIECES]
        if not known:
            break
        _, i = min(known)
        symbols[i : i + 2] = [pairs[i]]
    tokens = []
    for symbol in symbols:
        spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        tokens += [symbol] if symbol in PIECES else spelled
    return tokens


@given(text=st.text("abc é中😀", min_size=1, max_size=24))
def test_scores_decide_as_in_sentence_piece(text):
    metadata = sentence_piece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert [tokens[i] for i in ids] == merged_by_score(text)
    assert tokenizer.decode(ids) == text


def test_sentence_piece_defaults():
    tokenizer = Tokenizer.from_gguf(sentence_piece_metadata())
    assert tokenizer.add_bos
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 1
    assert tokenizer.special_token_ids == {0, 1, 2}
    tokenizer = Tokenizer.from_gguf(
        sentence_piece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    )
    assert not tokenizer.add_bos
    assert tokenizer.encode("a", add_special_tokens=True)[-1] == 2
    assert tokenizer.token_text(tokenizer.encode("a")[0]) == "a"


def test_a_user_defined_token_counts_in_plain_text():
    tokenizer = Tokenizer.from_gguf(sentence_piece_metadata())
    last = tokenizer.vocab_size - 1
    assert last in tokenizer.encode("a<think>", parse_special=False)
    assert tokenizer.decode([last]) == "<think>"


def test_ends_of_turn_and_of_message_end_an_answer():
    metadata = sentence_piece_metadata(eot_token_id=259, eom_token_id=2)
    tokenizer = Tokenizer.from_gguf(metadata, settings={"eos_token_id": [2, 260]})
    assert tokenizer.eos_token_ids == (2, 259, 260)


def byte_level_metadata(checkpoint, pre):
    return {**checkpoint.gguf_metadata, "tokenizer.ggml.pre": pre}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'m", " x", "1234", " 5", "  ", " y", "\n\n"]),
        ("smollm", ["I", "'m", " x", "1", "2", "3", "4", " ", "5", "  ", " y", "\n\n"]),
        ("llama-bpe", ["I", "'m", " x", "123", "4", " ", "5", "  ", " y", "\n\n"]),
        ("qwen2", ["I", "'m", " x", "1", "2", "3", "4", " ", "5", "  ", " y", "\n\n"]),
    ],
)
def test_the_named_pre_tokenizer_cuts_the_text(checkpoint, pre, pieces):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(checkpoint, pre))
    text = "I'm x1234 5   y\n\n"
    backend = tokenizer._parsing
    cut = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_that_names_no_pre_tokenizer_says_so(checkpoint, caplog):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(checkpoint, None))
    assert "no pre-tokenizer" in caplog.text
    assert tokenizer.encode("hi 12") == tokenizer.encode("hi 12", parse_special=False)


def test_qwen2_composes_characters(checkpoint):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(checkpoint, "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": None}, CheckpointError, "no vocabulary"),
        ({"tokens": []}, CheckpointError, "no vocabulary"),
        ({"model": "t5"}, UnsupportedModelError, "'t5'"),
        ({"model": "gpt2", "pre": "tekken"}, UnsupportedModelError, "'tekken'"),
        ({"model": "gpt2", "merges": ["x y"]}, CheckpointError, "1 merges"),
        ({"scores": None}, CheckpointError, "0 scores"),
        ({"token_type": np.ones(3, np.int32)}, CheckpointError, "types 3 tokens"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(sentence_piece_metadata(**changes))
