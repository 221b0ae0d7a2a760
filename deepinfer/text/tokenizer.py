"""Tokenizer: text to token ids and back.

Owns one vocabulary: which ids begin and end a sequence, which are special, what bytes each stands
for. The merging itself is the `tokenizers` library's. Knows nothing of requests or streams; the
engine encodes prompts with it, `detokenizer` reads its bytes, `chat` its special tokens.

Two conventions hold everywhere:
* Special tokens in a text are parsed or not as the caller says (`parse_special`). Added tokens that
  a checkpoint does not mark special, such as runs of spaces, always count as ordinary vocabulary.
* `decode` never fails: ids without a token are empty, bytes that are no UTF-8 become U+FFFD.

Encoding is safe from several threads. It takes about 0.6 us a character; for a long text the GIL is
free meanwhile, so a thread can do it beside an event loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from deepinfer.errors import CheckpointError
from deepinfer.text.gguf_vocabulary import build_tokenizer
from deepinfer.text.special_tokens import Span, SpecialToken, SpecialTokens
from deepinfer.text.vocabulary import token_bytes

_LONG_CHARACTERS = 4096  # from here on the library is called in the way that frees the GIL


class TextCheckpoint(Protocol):
    """The part of a checkpoint that concerns text."""

    @property
    def tokenizer_json(self) -> Path | None: ...
    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def tokenizer_config(self) -> Mapping[str, Any]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...


class Rendered(NamedTuple):
    """A prompt that a chat template wrote: readable text, and where it is special tokens.

    Text outside the spans is ordinary even where it reads like a special token.
    """

    text: str
    special: tuple[Span, ...]


class Tokenizer:
    """Build one with `from_checkpoint`, `from_json` or `from_gguf`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._parsing = backend
        self._plain = _taking_special_as_text(backend)
        self._plain_inside = _without_first_prefix(self._plain)
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = SpecialTokens(
            {
                added[i].content: SpecialToken(i, added[i].lstrip, added[i].rstrip)
                for i in sorted(self.special_token_ids)
            }
        )
        self._bytes = token_bytes(backend, self.special_token_ids)

    # --- building ---

    @classmethod
    def from_checkpoint(cls, checkpoint: TextCheckpoint) -> Tokenizer:
        """From tokenizer.json where there is one, else from the GGUF vocabulary."""
        settings = {**checkpoint.config, **checkpoint.generation_config}
        if checkpoint.tokenizer_json is not None:
            return cls.from_json(
                checkpoint.tokenizer_json, checkpoint.tokenizer_config, settings=settings
            )
        if checkpoint.gguf_metadata is not None:
            return cls.from_gguf(checkpoint.gguf_metadata, settings=settings)
        raise CheckpointError(
            "The checkpoint has no tokenizer.json and no GGUF vocabulary. "
            "Add the file, or point --tokenizer at one."
        )

    @classmethod
    def from_path(
        cls, path: str | os.PathLike[str], *, settings: Mapping[str, Any] | None = None
    ) -> Tokenizer:
        """From a tokenizer.json, or a directory with one and perhaps a tokenizer_config.json."""
        place = Path(path)
        file = place / "tokenizer.json" if place.is_dir() else place
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; name a tokenizer.json or its directory.")
        beside = file.with_name("tokenizer_config.json")
        try:
            config = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
        except ValueError as error:
            raise CheckpointError(f"{beside} is not JSON: {error}.") from error
        return cls.from_json(file, config, settings=settings)

    @classmethod
    def from_json(
        cls,
        path: str | os.PathLike[str],
        tokenizer_config: Mapping[str, Any] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """`tokenizer_config` is tokenizer_config.json; `settings` may name more ids that end an
        answer, as config.json and generation_config.json do."""
        config, settings = tokenizer_config or {}, settings or {}
        try:
            backend = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{path} cannot be read as a tokenizer: {error}. Fetch the file again."
            ) from error
        bos = _token_id(backend, config.get("bos_token"), settings.get("bos_token_id"))
        eos = _token_id(backend, config.get("eos_token"), None)
        prefix, suffix = _template_ids(backend)
        return cls(
            backend,
            bos_token_id=bos,
            eos_token_ids=_ids(eos, settings.get("eos_token_id")),
            prefix_ids=_with_edge(prefix, bos, config.get("add_bos_token"), 0),
            suffix_ids=_with_edge(suffix, eos, config.get("add_eos_token"), -1),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None
    ) -> Tokenizer:
        """`metadata` holds the `tokenizer.ggml.*` keys of a GGUF file."""

        def read(key: str) -> Any:
            return metadata.get(f"tokenizer.ggml.{key}")

        bos, eos = read("bos_token_id"), read("eos_token_id")
        sentence_piece = read("model") == "llama"
        adds_bos = sentence_piece if read("add_bos_token") is None else read("add_bos_token")
        return cls(
            build_tokenizer(metadata),
            bos_token_id=bos,
            eos_token_ids=_ids(
                eos,
                read("eot_token_id"),
                read("eom_token_id"),
                (settings or {}).get("eos_token_id"),
            ),
            prefix_ids=_with_edge([], bos, adds_bos, 0),
            suffix_ids=_with_edge([], eos, read("add_eos_token"), -1),
        )

    # --- text to ids ---

    def encode(
        self, text: str, *, parse_special: bool = True, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of `text`. Lone surrogates, which are no text, count as U+FFFD.

        `add_special_tokens` puts around them what the checkpoint wants around a sequence (often a
        beginning-of-sequence id, often nothing). Characters that a vocabulary cannot spell (the
        embedded one lacks some control characters) vanish.
        """
        backend = self._parsing if parse_special else self._plain
        ids = _encode(backend, text)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered chat. Nothing is put around it: the template has written that."""
        text, ids, start = rendered.text, list[int](), 0
        for span in (*rendered.special, Span(len(text), len(text), -1)):
            if start < span.start:
                backend = self._plain_inside if start else self._plain
                ids += _encode(backend, text[start : span.start])
            ids.append(span.token_id)
            start = span.end
        ids.pop()  # of the sentinel span
        return ids

    # --- ids to text ---

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        pieces = self.pieces(skip_special_tokens)
        size = len(pieces)
        text = b"".join([pieces[i] for i in token_ids if 0 <= i < size]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._bytes.drops_leading_space else text

    def pieces(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """The bytes of every id, special ones empty if they are to be skipped. Do not change it."""
        return self._bytes.visible if skip_special_tokens else self._bytes.every

    @property
    def drops_leading_space(self) -> bool:
        """Decoded text loses one space at its start (SentencePiece puts one there)."""
        return self._bytes.drops_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; empty for an id without a token."""
        return self._bytes.every[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token alone, for people: part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # --- facts ---

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model's own vocabulary may be padded beyond it."""
        return len(self._bytes.every)

    @property
    def add_bos(self) -> bool:
        """Whether `add_special_tokens` puts the beginning-of-sequence id first."""
        return self.bos_token_id is not None and self._prefix_ids[:1] == [self.bos_token_id]


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    text = _repaired(text)
    if len(text) < _LONG_CHARACTERS:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _repaired(text: str) -> str:
    """Pairs of surrogates joined, lone ones replaced: what remains is encodable."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _ids(*stored: Any) -> list[int]:
    """Token ids out of settings that hold an id, a list of ids or nothing."""
    ids: list[int] = []
    for value in stored:
        ids += value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [int(i) for i in ids]


def _token_id(backend: tokenizers.Tokenizer, token: Any, fallback: Any) -> int | None:
    """The id of a token that tokenizer_config.json names, and declares special by naming it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    token_id: int | None = backend.token_to_id(text) if text else None
    if token_id is None:
        return next(iter(_ids(fallback)), None)
    added = backend.get_added_tokens_decoder().get(token_id)
    if added is None or not added.special:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return token_id


def _template_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's own template puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _with_edge(ids: list[int], token_id: int | None, wanted: Any, edge: int) -> list[int]:
    """`ids` with `token_id` at that edge (0 or -1) or without it; as it is where unsaid."""
    if not isinstance(wanted, bool) or token_id is None or wanted == (token_id in ids):
        return ids
    if not wanted:
        return [i for i in ids if i != token_id]
    return [token_id, *ids] if edge == 0 else [*ids, token_id]


def _sharing_model(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second tokenizer over the same vocabulary and merges, which are not copied."""
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    twin.add_tokens([added[i] for i in sorted(added)])
    if twin.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps between
        twin = tokenizers.Tokenizer.from_str(backend.to_str())
    return twin


def _taking_special_as_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    twin = _sharing_model(backend)
    twin.encode_special_tokens = True
    return twin


def _without_first_prefix(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For text that follows a special token, where some tokenizers add no leading space."""
    splitter = plain.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.Metaspace) or splitter.prepend_scheme != "first":
        return plain
    inside = _taking_special_as_text(plain)
    inside.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=splitter.replacement, prepend_scheme="never", split=splitter.split
    )
    return inside
