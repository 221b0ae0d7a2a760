"""What the dense family refuses, reports and reserves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.models import build, model_class
from deepinfer.models.llama import DenseConfig

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tensors() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens.weight": (31, 16), "model.norm.weight": (16,)}
    for index in range(2):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (16,),
            prefix + "post_attention_layernorm.weight": (16,),
            prefix + "self_attn.q_proj.weight": (16, 16),
            prefix + "self_attn.k_proj.weight": (8, 16),
            prefix + "self_attn.v_proj.weight": (8, 16),
            prefix + "self_attn.o_proj.weight": (16, 16),
            prefix + "mlp.gate_proj.weight": (24, 16),
            prefix + "mlp.up_proj.weight": (24, 16),
            prefix + "mlp.down_proj.weight": (16, 24),
        }
    return {name: torch.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "awq"}),
        ("final_logit_softcapping", 30.0),
        ("layer_types", ["full_attention", "chunked_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_options_without_implementation_are_refused_by_name(
    option: str, value: Any, paging: Any
) -> None:
    named = value["rope_type"] if option == "rope_scaling" else option
    with pytest.raises(UnsupportedModelError, match=named):
        build({**CONFIG, option: value}, tensors(), paging.Options())


def test_rope_scaling_without_its_numbers_is_refused(paging: Any) -> None:
    for rope_type in ("linear", "yarn", "llama3"):
        scaling = {"rope_type": rope_type, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        with pytest.raises(CheckpointError, match=f"'{rope_type}' has factor = None"):
            build({**CONFIG, "rope_scaling": scaling}, tensors(), paging.Options())


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_all_weights(tied: bool) -> None:
    config = DenseConfig.parse({**CONFIG, "tie_word_embeddings": tied})
    num_values = sum(tensor.numel() for tensor in tensors().values()) + (not tied) * 31 * 16
    assert config.weights_bytes("float32") == 4 * num_values
    copy = 2 * 31 * 16 if tied else -2 * 31 * 16  # a table of bfloat16 and a head of float32
    assert config.weights_bytes("bfloat16") == 4 * num_values + copy


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="mamba"):
        model_class("mamba")


def test_a_missing_tensor_is_named(paging: Any) -> None:
    incomplete = tensors()
    del incomplete["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        build(CONFIG, incomplete, paging.Options())


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(paging: Any) -> None:
    wrong = {**tensors(), "model.norm.weight": torch.ones(17)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(17,\).*\(16,\)"):
        build(CONFIG, wrong, paging.Options())


def test_a_tensor_without_use_is_refused_unless_harmless(paging: Any) -> None:
    harmless = {"lm_head.weight": torch.ones(31, 16), "model.rotary_emb.inv_freq": torch.ones(2)}
    build(CONFIG, {**tensors(), **harmless}, paging.Options())
    surplus = {**tensors(), "model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias"):
        build(CONFIG, surplus, paging.Options())


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, (None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_which_layers_have_a_window(options: dict[str, Any], windows: tuple[Any, ...]) -> None:
    assert DenseConfig.parse({**CONFIG, **options}).windows == windows


def test_cache_spec_counts_the_bytes_that_are_allocated(paging: Any) -> None:
    model = build(CONFIG, tensors(), paging.Options(block_tokens=8))
    spec = model.cache_spec()
    cache = model.allocate_cache(5, 1)
    assert spec.block_tokens == 8
    assert sum(layer.numel() * layer.element_size() for layer in cache) == 5 * spec.block_bytes


def test_auto_dtype_is_explained(paging: Any) -> None:
    model: Any = build(CONFIG, tensors(), paging.Options(dtype="auto"))
    assert model.dtype in ("float32", "float16")
    assert model.dtype_choice.startswith(f"{model.dtype}: fastest")
    named: Any = build(CONFIG, tensors(), paging.Options(dtype="bfloat16"))
    assert named.dtype_choice == "bfloat16: as asked for"
