"""Small GGUF files, written by the `gguf` package, of which nothing in deepinfer is a part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

WriteGguf = Callable[..., Path]

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 32, 64, 4, 2, 8, 24, 2


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A two-layer model under GGUF names, rows in Hugging Face's order."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    tensors = {
        "token_embd.weight": normal(VOCABULARY, WIDTH),
        "output_norm.weight": normal(WIDTH),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (HEADS * HEAD_DIM, WIDTH),
            "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
            "attn_output": (WIDTH, HEADS * HEAD_DIM),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = normal(*shape)
    return tensors


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """write_gguf(architecture=, tensors=, types=, metadata=, name=) -> path of a finished file.

    `metadata` overrides or (None) removes keys; `{arch}` in a key stands for the architecture.
    `types` maps a tensor's name to the quantisation that it is stored in.
    """

    def write(
        *,
        architecture: str = "llama",
        tensors: dict[str, np.ndarray] | None = None,
        types: dict[str, gguf.GGMLQuantizationType] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        values: dict[str, Any] = {
            "{arch}.block_count": LAYERS,
            "{arch}.context_length": 128,
            "{arch}.embedding_length": WIDTH,
            "{arch}.feed_forward_length": INNER,
            "{arch}.attention.head_count": HEADS,
            "{arch}.attention.head_count_kv": KV_HEADS,
            "{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            "{arch}.rope.freq_base": 50000.0,
            **(metadata or {}),
        }
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in values.items():
            if value is not None:
                _add(writer, key.replace("{arch}", architecture), value)
        for tensor_name, tensor in (tiny_tensors() if tensors is None else tensors).items():
            stored_type = (types or {}).get(tensor_name)
            if stored_type is None:
                writer.add_tensor(tensor_name, tensor)
            else:
                packed = gguf.quants.quantize(tensor, stored_type)
                writer.add_tensor(tensor_name, packed, raw_dtype=stored_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def make_tiny_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return tiny_tensors
