"""Directories as `transformers` writes them, whole, in shards and with parts missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights import open_checkpoint
from deepinfer.runtime.weights.huggingface import normalise
from deepinfer.runtime.weights.shapes import dense_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": 40,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_tensors(config: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = dense_shapes(config or CONFIG)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = list(tensors)
    weight_map = {}
    for number in (0, 1):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory `Tiny-Llama` with a configuration and nothing else."""
    place = tmp_path / "Tiny-Llama"
    place.mkdir()
    write_json(place / "config.json", CONFIG)
    return place


def test_one_file(directory: Path) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    save_file(tensors, directory / "model.safetensors")
    checkpoint = open_checkpoint(str(directory))
    assert checkpoint.name == "Tiny-Llama"
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.tensors[name]
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert "safetensors, llama, 0.0 M parameters" in checkpoint.describe()
    assert checkpoint.describe().endswith("(18 F32, 1 F16, 1 BF16 tensors)")


def test_shards(directory: Path) -> None:
    tensors = random_tensors()
    write_shards(directory, tensors)
    checkpoint = open_checkpoint(str(directory))
    loaded = checkpoint.tensors
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_what_transformers_saves_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        rope_parameters={"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0},
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config["rope_theta"] == 500000.0
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor)
    assert "generation_config.json" in {path.name for path in tmp_path.iterdir()}
    assert checkpoint.generation_config["eos_token_id"] == checkpoint.config["eos_token_id"]


ROPE: dict[str, tuple[dict[str, Any], float, Any]] = {
    "nothing": ({}, 10000.0, None),
    "before transformers 5": ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
    "oldest spelling": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        1e4,
        {"rope_type": "linear", "factor": 2.0},
    ),
    "both spellings of the type": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        1e4,
        {"rope_type": "yarn", "factor": 2.0},
    ),
    "default by name": ({"rope_scaling": {"rope_type": "default"}}, 1e4, None),
    "transformers 5": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
    "transformers 5, llama 3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        5e5,
        {"rope_type": "llama3", "factor": 8.0},
    ),
}


@pytest.mark.parametrize(("stored", "theta", "scaling"), ROPE.values(), ids=ROPE)
def test_rope_settings_have_one_spelling(
    stored: dict[str, Any], theta: float, scaling: Any
) -> None:
    config = normalise(stored, Path("somewhere"))
    assert config["rope_theta"] == theta
    assert config["rope_scaling"] == scaling
    assert "rope_parameters" not in config


def test_rope_settings_by_kind_of_layer_are_refused() -> None:
    settings = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="full_attention, sliding_attention"):
        normalise({"rope_parameters": settings}, Path("somewhere"))


def test_defaults_that_config_json_may_leave_out() -> None:
    config = normalise({"hidden_size": 64, "num_attention_heads": 4}, Path("somewhere"))
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is False
    assert config["sliding_window"] is None


def test_a_window_that_is_switched_off_is_none() -> None:
    stored = {"sliding_window": 4096, "use_sliding_window": False}
    assert normalise(stored, Path("somewhere"))["sliding_window"] is None
    assert normalise({"sliding_window": 4096}, Path("somewhere"))["sliding_window"] == 4096


def test_text_files(directory: Path) -> None:
    save_file(random_tensors(), directory / "model.safetensors")
    plain = open_checkpoint(str(directory))
    assert (plain.chat_template, plain.tokenizer_json) == (None, None)
    assert (plain.tokenizer_config, plain.generation_config) == ({}, {})
    write_json(directory / "tokenizer.json", {})
    write_json(directory / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": "one"})
    write_json(directory / "generation_config.json", {"eos_token_id": [7, 2], "temperature": 0.6})
    full = open_checkpoint(str(directory))
    assert full.tokenizer_json == directory / "tokenizer.json"
    assert full.tokenizer_config["eos_token"] == "</s>"
    assert full.generation_config["temperature"] == 0.6
    assert full.eos_token_ids == (7, 2)
    assert full.chat_template == "one"
    assert full.gguf_metadata is None


def test_chat_templates_in_every_form(directory: Path) -> None:
    save_file(random_tensors(), directory / "model.safetensors")
    named = [{"name": "rag", "template": "first"}, {"name": "default", "template": "second"}]
    write_json(directory / "tokenizer_config.json", {"chat_template": named})
    assert open_checkpoint(str(directory)).chat_template == "second"
    write_json(directory / "tokenizer_config.json", {"chat_template": named[:1]})
    assert open_checkpoint(str(directory)).chat_template == "first"
    (directory / "chat_template.jinja").write_text("third ☃", encoding="utf-8")
    assert open_checkpoint(str(directory)).chat_template == "third ☃"


def test_the_name_inside_the_hub_cache(tmp_path: Path) -> None:
    place = tmp_path / "models--Some-Org--Tiny-Llama" / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    write_json(place / "config.json", CONFIG)
    assert open_checkpoint(str(place), "dummy").name == "Tiny-Llama"


def test_quantised_directories_are_refused_by_name(directory: Path) -> None:
    write_json(
        directory / "config.json", {**CONFIG, "quantization_config": {"quant_method": "awq"}}
    )
    save_file(random_tensors(), directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="awq"):
        open_checkpoint(str(directory))


def test_the_directory_without_weights(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(directory))


def test_pickle_files_are_not_opened(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match="can run code"):
        open_checkpoint(str(directory))


def test_a_truncated_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file(random_tensors(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* is damaged"):
        open_checkpoint(str(directory))


def test_a_missing_shard(directory: Path) -> None:
    write_shards(directory, random_tensors())
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files.*model-00002-of-00002"):
        open_checkpoint(str(directory))


def test_an_index_that_lies(directory: Path) -> None:
    write_shards(directory, random_tensors())
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    write_json(path, index)
    with pytest.raises(CheckpointError, match=r"places the tensor 'model\.extra\.weight'"):
        open_checkpoint(str(directory))
    index["weight_map"] = {"model.norm.weight": "../../somewhere/model.safetensors"}
    write_json(path, index)
    with pytest.raises(CheckpointError, match="not a file of this directory"):
        open_checkpoint(str(directory))
    write_json(path, {})
    with pytest.raises(CheckpointError, match="no 'weight_map'"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "a JSON list, not an object")]
)
def test_a_broken_configuration(directory: Path, content: str, message: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(directory))


def test_sampling_settings_that_are_no_numbers(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"temperature": None, "top_p": "0.9"})
    with pytest.raises(CheckpointError, match=r"generation_config\.json has top_p = '0\.9'"):
        open_checkpoint(str(directory), "dummy")


def test_a_template_that_is_not_text(directory: Path) -> None:
    save_file(random_tensors(), directory / "model.safetensors")
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        open_checkpoint(str(directory))


def test_tensors_that_contradict_the_configuration(directory: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(31)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory))
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight [48, 32] is missing" in message
    assert "model.norm.weight is [31] and should be [32]" in message
    assert "model.layers.0.self_attn.q_proj.bias has no place in a llama model" in message


def test_redundant_tensors_do_no_harm(directory: Path) -> None:
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, directory / "model.safetensors")
    assert "model.norm.weight" in open_checkpoint(str(directory)).tensors


def test_a_missing_tensor_is_named_with_similar_ones(directory: Path) -> None:
    save_file(random_tensors(), directory / "model.safetensors")
    tensors = open_checkpoint(str(directory)).tensors
    wrong = "model.layers.0.self_attn.q_projection.weight"
    with pytest.raises(CheckpointError) as caught:
        tensors[wrong]
    message = str(caught.value)
    assert repr(wrong) in message
    assert "model.layers.0.self_attn.q_proj.weight" in message
    assert "among its 20" in message
    assert wrong not in tensors
    assert tensors.get(wrong) is None
    with pytest.raises(CheckpointError):
        tensors.info(wrong)
