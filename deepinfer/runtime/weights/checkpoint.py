"""What a checkpoint is to the rest of the house, whatever files it came from.

Owns the `Checkpoint` value and the lazy mapping of its tensors. Does not know any file format:
`gguf.py`, `huggingface.py` and `dummy.py` build checkpoints, the engine and the models read them.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, overload

import torch

from deepinfer.errors import CheckpointError


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    format: str  # of the stored bytes, e.g. "BF16" or "Q4_K"
    num_bytes: int  # as stored

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors under Hugging Face names, each read when asked for and not kept.

    A tensor may be a view of the mapped file: treat it as read-only. Reading is safe from several
    threads. A name that is missing raises `CheckpointError` (also from `[]`), never `KeyError`.
    """

    def __init__(
        self,
        source: Path,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        self._source = source
        self._infos = infos
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._infos:
            self._refuse(name)
        return self._read(name)

    @overload
    def get(self, name: str, /) -> torch.Tensor | None: ...
    @overload
    def get(self, name: str, /, default: Any) -> Any: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        return self._read(name) if name in self._infos else default

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Shape and stored format, without reading the tensor."""
        if name not in self._infos:
            self._refuse(name)
        return self._infos[name]

    def _refuse(self, name: str) -> NoReturn:
        similar = difflib.get_close_matches(name, self._infos, n=3, cutoff=0.6)
        hint = f" Similar names: {', '.join(similar)}." if similar else ""
        raise CheckpointError(
            f"{self._source} has no tensor {name!r} among its {len(self._infos)}.{hint} "
            "The file is incomplete, or its configuration describes another model."
        )


@dataclass(frozen=True)
class Checkpoint:
    """One model's configuration, tensors and text settings, read from files on this machine."""

    name: str  # good as a served model name
    path: Path
    format: str  # "GGUF v3", "safetensors" or "dummy"
    config: dict[str, Any]  # in the spelling of config.json, rope settings normalised
    tensors: LazyTensors
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tokenizer_json: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: those of the generation settings, then of the config."""
        ids: dict[int, None] = {}
        for settings in (self.generation_config, self.config):
            stored = settings.get("eos_token_id")
            if stored is not None:
                ids.update(dict.fromkeys(stored if isinstance(stored, list) else [stored]))
        return tuple(ids)

    @property
    def num_parameters(self) -> int:
        return sum(self.tensors.info(name).num_values for name in self.tensors)

    @property
    def num_bytes(self) -> int:
        """As stored, not as loaded."""
        return sum(self.tensors.info(name).num_bytes for name in self.tensors)

    def describe(self) -> str:
        """One line for a person: format, mix of tensor formats, parameters, bytes."""
        formats = Counter(self.tensors.info(name).format for name in sorted(self.tensors))
        mix = ", ".join(f"{count} {name}" for name, count in formats.most_common())
        return (
            f"{self.name}: {self.format}, {self.config.get('model_type', 'unknown model type')}, "
            f"{self.num_parameters / 1e6:,.1f} M parameters, {self.num_bytes / 1e6:,.1f} MB "
            f"({mix} tensors)"
        )
