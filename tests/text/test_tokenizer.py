"""The tokenizer gives the ids that others give, and its text comes back whole."""

import json
import runpy
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.text.special_tokens import Span
from deepinfer.text.tokenizer import Rendered, Tokenizer

# transformers' GGUF loader builds plain byte level for every `gpt2` vocabulary. The pre-tokenizer
# that this file names, `smollm`, also separates each digit, as llama.cpp does and as the model was
# trained; it shows where a run of spaces or a numeric symbol stands before another one.
WRONG_IN_TRANSFORMERS = ["  42  43", "½ ² ③ Ⅷ ㊿ 〇"]
# The vocabulary has no token for some bytes; characters that need them vanish.
LOSSY = ("\x04", "\U00040000")


def differing(tokenizer, recorded, oracle):
    ids = recorded["oracles"][oracle]
    rows = zip(recorded["texts"], ids["special"], ids["plain"], strict=True)
    return [
        text
        for text, special, plain in rows
        if tokenizer.encode(text) != special or tokenizer.encode(text, parse_special=False) != plain
    ]


def test_ids_equal_llama_cpp(tokenizer, recorded):
    assert len(recorded["texts"]) >= 60
    assert differing(tokenizer, recorded, "cyllama") == []


def test_ids_equal_transformers_but_for_its_digits(tokenizer, recorded):
    assert differing(tokenizer, recorded, "transformers") == WRONG_IN_TRANSFORMERS


def test_the_record_is_of_the_strings_in_the_tree(recorded):
    path = Path(__file__).parents[1] / "data" / "hard_strings.py"
    assert list(runpy.run_path(str(path))["HARD_STRINGS"]) == recorded["texts"]


def test_text_comes_back(tokenizer, recorded):
    for text in recorded["texts"]:
        if any(character in text for character in LOSSY):
            continue
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_decode_equals_the_library(tokenizer, recorded):
    backend = tokenizers.Tokenizer.from_str(tokenizer._parsing.to_str())
    for ids in recorded["oracles"]["cyllama"]["special"]:
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
                ids, skip_special_tokens=skip
            )


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(-2, 49160), max_size=20))
def test_any_ids_decode(tokenizer, ids):
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == joined.decode("utf-8", "replace")


def test_special_tokens_count_or_do_not(tokenizer):
    text = "a<|im_end|>b"
    assert tokenizer.encode(text) == [81, 2, 82]
    plain = tokenizer.encode(text, parse_special=False)
    assert not tokenizer.special_token_ids.intersection(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode([81, 2, 82]) == "ab"
    assert tokenizer.decode([81, 2, 82], skip_special_tokens=False) == text


def test_facts_of_the_embedded_model(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_ids == set(range(17))
    assert not tokenizer.add_bos
    assert tokenizer.encode("hi", add_special_tokens=True) == tokenizer.encode("hi")
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.token_text(tokenizer.encode(" world")[0]) == " world"
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("\ud800", "\ufffd"),
        ("a\udfffb", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
    ],
)
def test_surrogates_are_joined_or_replaced(tokenizer, text, meaning):
    for parse_special in (True, False):
        assert tokenizer.encode(text, parse_special=parse_special) == tokenizer.encode(meaning)
    assert tokenizer.encode_rendered(Rendered(text, ())) == tokenizer.encode(meaning)


def test_a_long_text_has_the_ids_of_its_parts(tokenizer):
    line = "The quick brown fox jumps over 12 lazy dogs.\n\n"
    ids = tokenizer.encode(line + "x")[:-1]
    assert tokenizer.encode(line * 200 + "x")[:-1] == ids * 200


def test_a_long_text_leaves_other_threads_running(tokenizer):
    text = "Hello world, this is a test of 1234 things.\n" * 10_000
    threads_ids = []
    thread = threading.Thread(target=lambda: threads_ids.append(tokenizer.encode(text)))
    turns = 0
    started = time.process_time()
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert len(threads_ids[0]) == 160_000
    assert turns > 5, f"{turns} turns while encoding took {time.process_time() - started:.2f} s"


def test_building_is_quick(checkpoint):
    def build():
        started = time.process_time()
        Tokenizer.from_checkpoint(checkpoint)
        return time.process_time() - started

    assert min(build() for _ in range(3)) < 0.5  # usually 0.1


# --- rendered prompts ---


def test_only_the_spans_of_a_rendered_prompt_are_special(tokenizer):
    text = "<|im_start|>a<|im_end|>b<|im_end|>"
    rendered = Rendered(text, (Span(0, 12, 1), Span(len(text) - 10, len(text), 2)))
    ids = tokenizer.encode_rendered(rendered)
    assert ids == [1, *tokenizer.encode("a<|im_end|>b", parse_special=False), 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_an_empty_rendered_prompt(tokenizer):
    assert tokenizer.encode_rendered(Rendered("", ())) == []


# --- tokenizer.json ---


def save(tmp_path, backend):
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


def byte_level_backend(post_processor=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    if post_processor is not None:
        backend.post_processor = post_processor
    return backend


def test_json_equals_gguf(tokenizer, recorded, tmp_path):
    path = save(tmp_path, tokenizer._parsing)
    settings_of_model = {"eos_token_id": [2, 0]}
    loaded = Tokenizer.from_json(
        path,
        {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
        settings=settings_of_model,
    )
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (1, (2, 0))
    assert loaded.special_token_ids == tokenizer.special_token_ids
    assert differing(loaded, recorded, "cyllama") == []


def test_checkpoint_settings_add_ids_that_end_an_answer(tmp_path):
    checkpoint = SimpleNamespace(
        tokenizer_json=save(tmp_path, byte_level_backend()),
        gguf_metadata=None,
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [257, 258]},
    )
    loaded = Tokenizer.from_checkpoint(checkpoint)
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (256, (257, 258))


def test_the_files_template_adds_its_ids(tmp_path):
    template = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    path = save(tmp_path, byte_level_backend(template))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    loaded = Tokenizer.from_json(path, names)
    bare = loaded.encode("hi")
    assert len(bare) == 2
    assert loaded.add_bos
    assert loaded.encode("hi", add_special_tokens=True) == [256, *bare, 257]
    without = Tokenizer.from_json(path, {**names, "add_bos_token": False, "add_eos_token": False})
    assert not without.add_bos
    assert without.encode("hi", add_special_tokens=True) == bare


def test_the_settings_add_ids_that_the_file_does_not(tmp_path):
    path = save(tmp_path, byte_level_backend())
    loaded = Tokenizer.from_json(path, {"bos_token": "<s>", "add_bos_token": True})
    assert loaded.add_bos
    assert loaded.encode("", add_special_tokens=True) == [256]


def test_a_named_end_is_special_even_where_the_file_forgot_it(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens(["<end>"])
    loaded = Tokenizer.from_json(save(tmp_path, backend), {"eos_token": "<end>"})
    assert loaded.encode("a<end>")[-1] == 259
    assert loaded.decode(loaded.encode("a<end>")) == "a"
    assert 259 not in loaded.encode("a<end>", parse_special=False)


def test_added_tokens_that_are_not_special_always_count(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens(["    "])
    loaded = Tokenizer.from_json(save(tmp_path, backend))
    assert loaded.encode("a    b", parse_special=False)[1] == 259
    assert loaded.decode(loaded.encode("a    b")) == "a    b"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=16)
    loaded = Tokenizer.from_json(save(tmp_path, backend))
    for parse_special in (True, False):
        assert len(loaded.encode("abcdef", parse_special=parse_special)) == 6


def sentence_piece_backend(prepend_scheme):
    letters = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    vocabulary = {token: i for i, token in enumerate(letters)}
    merges = [("▁", "a"), ("b", "c")]
    vocabulary |= {"▁a": len(letters), "bc": len(letters) + 1}
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


@pytest.mark.parametrize("prepend_scheme", ["first", "always"])
def test_sentence_piece_spaces_and_bytes(tmp_path, prepend_scheme):
    backend = sentence_piece_backend(prepend_scheme)
    loaded = Tokenizer.from_json(save(tmp_path, backend))
    for text in ("a bc", " a", "a  é中b", "", " ", "é"):
        ids = loaded.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == backend.decode(ids)
        assert loaded.decode(ids) in (text, text[1:])  # " a" and "a" are the same to Metaspace
    # A prompt in segments is as the library encodes it whole.
    text = "<s>a bc<s>a"
    rendered = Rendered(text, (Span(0, 3, 1), Span(7, 10, 1)))
    assert loaded.encode_rendered(rendered) == backend.encode(text, add_special_tokens=False).ids
    rendered = Rendered("a b<s>a", (Span(3, 6, 1),))
    assert loaded.encode_rendered(rendered) == loaded.encode("a b<s>a")


def test_an_unknown_decoder_is_refused_by_name(tmp_path):
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_json(save(tmp_path, backend))


def test_a_broken_file_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "?"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_json(path)


def test_a_checkpoint_without_vocabulary_is_refused():
    empty = SimpleNamespace(
        tokenizer_json=None,
        gguf_metadata=None,
        tokenizer_config={},
        config={},
        generation_config={},
    )
    with pytest.raises(CheckpointError, match="--tokenizer"):
        Tokenizer.from_checkpoint(empty)
