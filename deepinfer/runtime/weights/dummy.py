"""Random tensors of the right shapes, for measuring without a checkpoint's weights.

A tensor depends on (seed, name) alone: not on the order of reading, the process or the machine's
thread count. Norms are one and biases zero, so that activations stay in a sane range. A directory
that has no tokenizer either gets a vocabulary of bytes, so that it can be served like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from deepinfer.runtime.weights.checkpoint import LazyTensors, TensorInfo
from deepinfer.runtime.weights.shapes import dense_shapes

_STANDARD_DEVIATION = 0.02


def dummy_tensors(source: Path, config: Mapping[str, Any], seed: int) -> LazyTensors:
    """float32 tensors of the dense model that `config` describes."""
    shapes = dense_shapes(config)
    infos = {}
    for name, shape in shapes.items():
        info = TensorInfo(shape, "F32", 0)
        infos[name] = TensorInfo(shape, "F32", 4 * info.num_values)

    def read(name: str) -> torch.Tensor:
        return _random_tensor(name, shapes[name], seed)

    return LazyTensors(source, infos, read)


def byte_vocabulary(vocab_size: int) -> dict[str, Any]:
    """Keys of a GGUF vocabulary: token n is the byte n; those above 255 are spelled `<|n|>`.

    Every id that a random model chooses has a text, so streaming can be measured as well.
    """
    symbols = ByteLevel.alphabet()
    printable = [n for n in range(256) if chr(n) in symbols]  # bytes that stand for themselves
    others = sorted(set(range(256)) - set(printable))
    strange = sorted(symbol for symbol in symbols if ord(symbol) > 255)  # in order of their bytes
    spelling = {n: chr(n) for n in printable} | dict(zip(others, strange, strict=True))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [spelling.get(n, f"<|{n}|>") for n in range(vocab_size)],
        "tokenizer.ggml.merges": [],
    }


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
