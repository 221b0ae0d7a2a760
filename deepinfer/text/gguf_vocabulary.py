"""Rebuilds a tokenizer from the vocabulary that a GGUF file carries.

Owns the knowledge of GGUF's tokenizer keys: which pre-tokenizer a name stands for, and how scores
become merges. Called by `Tokenizer.from_gguf` alone. It reads no files and knows nothing of chat.

A vocabulary comes in one of two kinds:

    tokenizer.ggml.model = "gpt2"    byte-level BPE: every byte is spelled as one printable
                                     character, and the order of the merges decides
    tokenizer.ggml.model = "llama"   SentencePiece BPE: "▁" is a space, bytes outside the vocabulary
                                     are tokens such as <0xE4>, and the scores of the merged tokens
                                     decide
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from deepinfer.errors import CheckpointError, UnsupportedModelError

_log = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type; 1 is an ordinary token.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
# What tokenizer.ggml.pre may say -> how to cut text before merging.
_PRE_TOKENIZERS = {
    "gpt-2": "gpt-2",
    "default": "gpt-2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe, special tokens included."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise CheckpointError(
            "The GGUF file carries no vocabulary (tokenizer.ggml.model and tokenizer.ggml.tokens). "
            "Convert it again with its tokenizer, or point --tokenizer at a tokenizer.json."
        )
    tokens = list(tokens)
    stored = metadata.get("tokenizer.ggml.token_type")
    token_types = [1] * len(tokens) if stored is None else [int(kind) for kind in stored]
    if len(token_types) != len(tokens):
        raise CheckpointError(
            f"The GGUF file types {len(token_types)} tokens but lists {len(tokens)}; "
            "it is damaged. Fetch or convert it again."
        )
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, tokens, token_types)
    else:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer is of kind {kind!r}; 'gpt2' and 'llama' are supported. "
            "Point --tokenizer at a tokenizer.json of the same model."
        )
    _add_special_tokens(tokenizer, tokens, token_types)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The GGUF file's pre-tokenizer {name!r} is not implemented; known are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}. Point --tokenizer at a tokenizer.json of the "
            "same model."
        )
    if name == "default":
        _log.warning(
            "The GGUF file names no pre-tokenizer; GPT-2's is taken. If answers are poor, convert "
            "it again with a newer converter or point --tokenizer at a tokenizer.json."
        )
    style = _PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=style == "llama-bpe"))
    if style in _SPLIT_PATTERNS:
        split = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[style]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    elif style == "digits":
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if style == "qwen2":  # its authors train on composed characters; GGUF has no key for it
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    # Byte-level symbols never contain a space, so the only one separates the two sides.
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], token_types: Sequence[int]
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"The GGUF file lists {len(tokens)} SentencePiece tokens but "
            f"{0 if scores is None else len(scores)} scores; it is damaged. Convert it again."
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(token_types) if kind == _UNKNOWN), None)
    model = _bpe(
        vocabulary,
        merges_from_scores(vocabulary, [float(score) for score in scores]),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tail: list[decoders.Decoder] = [decoders.Fuse()]
    if adds_space:
        steps.insert(0, normalizers.Prepend("▁"))
        tail.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), *tail]
    )
    return tokenizer


def merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to put two tokens together to a third, best score of the third first.

    SentencePiece merges the adjacent pair whose union scores best; ranking all the pairs by that
    score makes ordinary BPE take the same decisions.
    """
    ranked = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"The GGUF file's {len(merges)} merges do not fit its {len(vocabulary)} tokens: "
            f"{error}. Convert it again."
        ) from error


def _add_special_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]
) -> None:
    # In the order of their ids, which an already known token keeps.
    added = [
        AddedToken(tokens[index], special=kind != _USER_DEFINED, normalized=False)
        for index, kind in enumerate(token_types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[index]
    ]
    tokenizer.add_tokens(added)
