"""GGUF's vocabulary in Hugging Face's spelling, on small files and on the embedded model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights import Checkpoint, open_checkpoint
from deepinfer.runtime.weights.gguf_names import model_name

Tensors = dict[str, np.ndarray]
Write = Callable[..., Path]
Make = Callable[..., Tensors]
HEADS, KV_HEADS = 4, 2


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What converters do to query and key rows of the llama architecture: halves become pairs."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def as_converted(tensors: Tensors) -> Tensors:
    converted = dict(tensors)
    for name in tensors:
        for kind, num_heads in (("attn_q.", HEADS), ("attn_k.", KV_HEADS)):
            if kind in name:
                converted[name] = interleave(tensors[name], num_heads)
    return converted


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_llama_rows_come_back_in_order(write_gguf: Write, make_tiny_tensors: Make) -> None:
    original = make_tiny_tensors()
    checkpoint = open_checkpoint(str(write_gguf(tensors=as_converted(original))))
    for ours, theirs in {
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert np.array_equal(checkpoint.tensors[ours].numpy(), original[theirs]), ours
    assert len(checkpoint.tensors) == len(original)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_packed_llama_rows_come_back_in_order(
    write_gguf: Write, make_tiny_tensors: Make, kind: gguf.GGMLQuantizationType
) -> None:
    original = make_tiny_tensors()
    types = dict.fromkeys(("blk.0.attn_q.weight", "blk.0.attn_k.weight"), kind)
    checkpoint = open_checkpoint(str(write_gguf(tensors=as_converted(original), types=types)))
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        packed = gguf.quants.quantize(original[f"blk.0.{theirs}.weight"], kind)
        expected = gguf.quants.dequantize(packed, kind)
        read = checkpoint.tensors[f"model.layers.0.self_attn.{ours}.weight"]
        assert np.array_equal(read.numpy(), expected)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_are_left_alone(
    write_gguf: Write, make_tiny_tensors: Make, architecture: str
) -> None:
    tensors = make_tiny_tensors()
    for layer in range(2):
        if architecture == "qwen2":
            for name, size in (("q", 32), ("k", 16), ("v", 16)):
                tensors[f"blk.{layer}.attn_{name}.bias"] = np.arange(size, dtype=np.float32)
        else:
            for name in ("q", "k"):
                tensors[f"blk.{layer}.attn_{name}_norm.weight"] = np.ones(8, np.float32)
    path = write_gguf(architecture=architecture, tensors=tensors)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["model_type"] == architecture
    read = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(read.numpy(), tensors["blk.0.attn_q.weight"])
    if architecture == "qwen2":
        bias = checkpoint.tensors["model.layers.1.self_attn.k_proj.bias"]
        assert bias.tolist() == list(range(16))
        assert "attention_bias" not in checkpoint.config
    else:
        assert "model.layers.1.self_attn.k_norm.weight" in checkpoint.tensors
        assert checkpoint.config["attention_bias"] is False


def test_llama_biases_are_reordered_too(write_gguf: Write, make_tiny_tensors: Make) -> None:
    original = make_tiny_tensors()
    for layer in range(2):
        for name, size in (("q", 32), ("k", 16), ("v", 16), ("output", 32)):
            original[f"blk.{layer}.attn_{name}.bias"] = np.arange(size, dtype=np.float32)
    checkpoint = open_checkpoint(str(write_gguf(tensors=as_converted(original))))
    assert checkpoint.config["attention_bias"] is True
    for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
        bias = checkpoint.tensors[f"model.layers.1.self_attn.{name}_proj.bias"]
        assert bias.tolist() == list(range(size))


def test_configuration(write_gguf: Write) -> None:
    config = open_checkpoint(str(write_gguf())).config
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    expected = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": 24,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": None,
    }
    assert {key: config[key] for key in expected} == expected


def test_an_output_matrix_of_its_own_unties(write_gguf: Write, make_tiny_tensors: Make) -> None:
    output = np.ones((24, 32), np.float32)
    tensors = {**make_tiny_tensors(), "output.weight": output}
    checkpoint = open_checkpoint(str(write_gguf(tensors=tensors)))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert np.array_equal(checkpoint.tensors["lm_head.weight"].numpy(), output)


def test_a_window_makes_it_mistral(write_gguf: Write) -> None:
    path = write_gguf(metadata={"{arch}.attention.sliding_window": 64})
    config = open_checkpoint(str(path)).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_one_value_for_every_layer_may_be_an_array(write_gguf: Write) -> None:
    path = write_gguf(metadata={"{arch}.attention.head_count_kv": [2, 2]})
    assert open_checkpoint(str(path)).config["num_key_value_heads"] == 2


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "none": ({"type": "none"}, None),
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "linear by one": ({"type": "linear", "factor": 1.0}, None),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "yarn in full": (
        {
            "type": "yarn",
            "factor": 2.0,
            "original_context_length": 64,
            "attn_factor": 0.5,
            "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0,
        },
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": pytest.approx(0.5 * (0.1 * np.log(2.0) + 1.0)),
        },
    ),
}


@pytest.mark.parametrize(("stored", "expected"), SCALINGS.values(), ids=SCALINGS)
def test_rope_scaling(write_gguf: Write, stored: dict[str, Any], expected: Any) -> None:
    metadata = {f"{{arch}}.rope.scaling.{key}": value for key, value in stored.items()}
    assert open_checkpoint(str(write_gguf(metadata=metadata))).config["rope_scaling"] == expected


def test_the_early_spelling_of_linear_scaling(write_gguf: Write) -> None:
    path = write_gguf(metadata={"{arch}.rope.scale_linear": 8.0})
    expected = {"rope_type": "linear", "factor": 8.0}
    assert open_checkpoint(str(path)).config["rope_scaling"] == expected


def test_llama_3_factors(write_gguf: Write, make_tiny_tensors: Make) -> None:
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    tensors = {**make_tiny_tensors(), "rope_freqs.weight": factors}
    checkpoint = open_checkpoint(str(write_gguf(tensors=tensors)))
    expected = {"rope_type": "factors", "factors": factors.tolist()}
    assert checkpoint.config["rope_scaling"] == expected
    assert len(checkpoint.tensors) == len(tensors) - 1
    tensors["rope_freqs.weight"] = np.ones(4, np.float32)
    plain = open_checkpoint(str(write_gguf(tensors=tensors, name="ones.gguf")))
    assert plain.config["rope_scaling"] is None


def test_text_settings(write_gguf: Write) -> None:
    checkpoint = open_checkpoint(
        str(
            write_gguf(
                metadata={
                    "tokenizer.ggml.tokens": [f"<{index}>" for index in range(24)],
                    "tokenizer.ggml.bos_token_id": 1,
                    "tokenizer.ggml.eos_token_id": 2,
                    "tokenizer.ggml.eot_token_id": 3,
                    "tokenizer.ggml.unknown_token_id": 0,
                    "tokenizer.ggml.add_bos_token": False,
                    "tokenizer.chat_template": "{{ messages }}",
                    "general.sampling.temp": 0.5,
                    "general.sampling.top_k": 20,
                }
            )
        )
    )
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.tokenizer_config == {
        "add_bos_token": False,
        "bos_token": "<1>",
        "eos_token": "<2>",
        "unk_token": "<0>",
    }
    assert checkpoint.config["eos_token_id"] == [2, 3]
    assert checkpoint.eos_token_ids == (2, 3)
    assert checkpoint.generation_config["temperature"] == 0.5
    assert checkpoint.generation_config["top_k"] == 20
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.tokenizer_json is None


REFUSED_METADATA: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "experts": ({"{arch}.expert_count": 8}, UnsupportedModelError, "mixture of 8 experts"),
    "layers that differ": (
        {"{arch}.attention.head_count": [4, 2]},
        UnsupportedModelError,
        "differs between layers (2 values)",
    ),
    "values of another size": (
        {"{arch}.attention.value_length": 16},
        UnsupportedModelError,
        "'llama.attention.value_length' is 16 while heads have 8",
    ),
    "half rotary": (
        {"{arch}.rope.dimension_count": 4},
        UnsupportedModelError,
        "'llama.rope.dimension_count' is 4",
    ),
    "longrope": (
        {"{arch}.rope.scaling.type": "longrope"},
        UnsupportedModelError,
        "RoPE scaling 'longrope' is not implemented",
    ),
    "a part of a split file": ({"split.count": 3}, UnsupportedModelError, "one of 3 parts"),
    "an adapter": ({"general.type": "adapter"}, UnsupportedModelError, "holds a 'adapter'"),
    "no context length": (
        {"{arch}.context_length": None},
        CheckpointError,
        "lacks the metadata key 'llama.context_length'",
    ),
    "a word for a number": (
        {"{arch}.block_count": "two"},
        CheckpointError,
        "'llama.block_count' is 'two', not a number",
    ),
    "no heads": ({"{arch}.attention.head_count": 0}, CheckpointError, "positive integer"),
    "not finite": ({"{arch}.rope.freq_base": float("nan")}, CheckpointError, "is nan"),
    "scaling by nothing": (
        {"{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.factor": 0.0},
        CheckpointError,
        "RoPE scaling factor is 0.0",
    ),
    "an id that is a word": (
        {"tokenizer.ggml.eos_token_id": "end"},
        CheckpointError,
        "'tokenizer.ggml.eos_token_id' is 'end', not a token id",
    ),
    "more layers than tensors": (
        {"{arch}.block_count": 3},
        CheckpointError,
        "model.layers.2.input_layernorm.weight [32] is missing",
    ),
    "another width": (
        {"{arch}.feed_forward_length": 96},
        CheckpointError,
        "model.layers.0.mlp.gate_proj.weight is [64, 32] and should be [96, 32]",
    ),
}


@pytest.mark.parametrize(
    ("metadata", "error", "message"), REFUSED_METADATA.values(), ids=REFUSED_METADATA
)
def test_what_is_not_served_is_refused_by_name(
    write_gguf: Write, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write_gguf(metadata=metadata)
    with pytest.raises(error, match=re.escape(message)):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", "output.bias", "blk.0.attn_norm.bias", "something.weight"]
)
def test_a_tensor_that_nobody_uses_is_refused(
    write_gguf: Write, make_tiny_tensors: Make, name: str
) -> None:
    tensors = {**make_tiny_tensors(), name: np.ones(32, np.float32)}
    with pytest.raises(UnsupportedModelError, match=re.escape(repr(name))):
        open_checkpoint(str(write_gguf(tensors=tensors)))


def test_a_norm_that_this_family_lacks_is_refused(
    write_gguf: Write, make_tiny_tensors: Make
) -> None:
    tensors = {**make_tiny_tensors(), "blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(CheckpointError, match=r"q_norm\.weight has no place in a llama model"):
        open_checkpoint(str(write_gguf(tensors=tensors)))


def test_a_lost_embedding_is_missed(write_gguf: Write, make_tiny_tensors: Make) -> None:
    tensors = without(make_tiny_tensors(), "token_embd.weight")
    with pytest.raises(CheckpointError, match=r"no tensor 'token_embd\.weight'"):
        open_checkpoint(str(write_gguf(tensors=tensors)))


def test_other_architectures_are_refused_by_name(write_gguf: Write) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'gemma3'.*llama, mistral, qwen2, qwen3"):
        open_checkpoint(str(write_gguf(architecture="gemma3")))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "qwen2.5-0.5b-instruct"),
        ("model-f16.gguf", "model"),
        ("Q4_0.gguf", "Q4_0"),
        ("Qwen3-4B.gguf", "Qwen3-4B"),
    ],
)
def test_model_names(file: str, name: str) -> None:
    assert model_name(Path("/models") / file) == name


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return open_checkpoint("")


def test_the_embedded_model(embedded: Checkpoint) -> None:
    assert embedded.name == "SmolLM2-135M-Instruct"
    assert len(embedded.tensors) == 272
    assert embedded.num_parameters == 134_515_008
    assert embedded.describe() == (
        "SmolLM2-135M-Instruct: GGUF v3, llama, 134.5 M parameters, 96.6 MB "
        "(210 Q4_1, 61 F32, 1 Q8_0 tensors)"
    )
    assert embedded.config["tie_word_embeddings"] is True
    assert embedded.config["max_position_embeddings"] == 8192
    assert embedded.eos_token_ids == (2,)
    assert embedded.tokenizer_config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (embedded.chat_template or "")
    assert embedded.gguf_metadata is not None
    assert len(embedded.gguf_metadata["tokenizer.ggml.tokens"]) == 49152
    assert embedded.gguf_metadata["tokenizer.ggml.merges"][8] == "Ġt he"
    assert embedded.gguf_metadata["tokenizer.ggml.token_type"].dtype == np.int32


# Start of the SHA-256 of float32 tensors as transformers 5.24.0 loads this very file with its own
# GGUF loader (which takes half a minute, so it is not repeated here).
RECORDED = {
    "model.embed_tokens.weight": "3fd491c8066dd9dc1a2bf6796701526c",
    "model.norm.weight": "3b87f8e27335e67fc08f159cabfd2d18",
    "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab945dfdba7fb59e0ca",
    "model.layers.0.self_attn.k_proj.weight": "814d239237d0643a10d9468d42e617b6",
    "model.layers.17.self_attn.v_proj.weight": "80c1811748f6e49876bdcdba6ecf78c5",
    "model.layers.29.mlp.down_proj.weight": "c19605745425a11e704e305ce3d27b63",
}


@pytest.mark.parametrize(("name", "digest"), RECORDED.items(), ids=RECORDED)
def test_embedded_tensors_are_those_that_transformers_loads(
    embedded: Checkpoint, name: str, digest: str
) -> None:
    tensor = embedded.tensors[name]
    assert tensor.dtype == torch.float32
    assert hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:32] == digest
