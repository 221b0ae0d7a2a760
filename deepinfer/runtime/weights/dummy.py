"""Random tensors of the right shapes, for measuring without a checkpoint's weights.

A tensor depends on (seed, name) alone: not on the order of reading, the process or the machine's
thread count. Norms are one and biases zero, so that activations stay in a sane range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.empty(shape).normal_(0.0, _STANDARD_DEVIATION, generator=generator)
