"""Random weights: the right shapes, and the same values for the same seed and name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.errors import CheckpointError, ModelError, UnsupportedModelError
from deepinfer.runtime.weights import open_checkpoint
from deepinfer.text.tokenizer import Tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def write_config(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps({**SIZES, **config}))
    return str(directory)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_names_and_shapes_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, tied: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        expected.pop("lm_head.weight")
    path = write_config(tmp_path, model_type=model_type, tie_word_embeddings=tied)
    tensors = open_checkpoint(path, "dummy").tensors
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


def test_biases_follow_the_configuration(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="llama", attention_bias=True, mlp_bias=True)
    tensors = open_checkpoint(path, "dummy").tensors
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
    assert len(biases) == 2 * 7
    assert biases["model.layers.1.self_attn.k_proj.bias"].shape == (32,)
    assert biases["model.layers.1.mlp.up_proj.bias"].shape == (48,)


def test_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="llama")
    one = open_checkpoint(path, "dummy", seed=1).tensors
    again = open_checkpoint(path, "dummy", seed=1).tensors
    other = open_checkpoint(path, "dummy", seed=2).tensors
    forwards = {name: one[name] for name in one}
    backwards = {name: again[name] for name in reversed(list(again))}
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)
    assert all(torch.equal(forwards[name], one[name]) for name in forwards)
    matrix = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(one[matrix], other[matrix])
    assert not torch.equal(one[matrix], one[matrix.replace("layers.0", "layers.1")])


def test_the_size_of_values(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="qwen2", vocab_size=2000)
    tensors = open_checkpoint(path, "dummy").tensors
    assert 0.019 < float(tensors["model.embed_tokens.weight"].std()) < 0.021
    assert torch.equal(tensors["model.norm.weight"], torch.ones(32))
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.bias"], torch.zeros(64))


def test_a_vocabulary_of_bytes_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="llama", vocab_size=300)
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path, "dummy"))
    text = "".join(map(chr, range(256))) + "€🙂"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*b"a ", 256, 299]) == "a <|256|><|299|>"
    assert tokenizer.vocab_size == 300


def test_the_configuration_of_a_gguf_serves_too(write_gguf: Callable[..., Path]) -> None:
    path = str(write_gguf())
    dummy, real = open_checkpoint(path, "dummy"), open_checkpoint(path)
    assert dummy.format == "dummy"
    assert dummy.config == real.config
    assert dummy.gguf_metadata is not None
    assert set(dummy.tensors) == set(real.tensors)
    assert not torch.equal(
        dummy.tensors["model.embed_tokens.weight"], real.tensors["model.embed_tokens.weight"]
    )


def test_what_has_no_table_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, model_type="mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        open_checkpoint(path, "dummy")


@pytest.mark.parametrize("value", [None, 0, -1, "many", 2.5, True])
def test_a_size_that_is_none(tmp_path: Path, value: Any) -> None:
    path = write_config(tmp_path, model_type="llama", num_hidden_layers=value)
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        open_checkpoint(path, "dummy")


def test_unknown_load_formats(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'bits'"):
        open_checkpoint(write_config(tmp_path, model_type="llama"), "bits")
