"""The tensors that a dense Llama-family model has, computed from its configuration.

Owns that table and the comparison of a checkpoint with it. `dummy.py` makes tensors from it;
`open_checkpoint` uses it to report a damaged or mismatched checkpoint before anything is loaded.
Other families bring their own table with their model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights.checkpoint import LazyTensors

DENSE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Derived from the configuration, or a copy of the embedding where the two are tied.
_REDUNDANT = ("rotary_emb.inv_freq", "lm_head.weight")
_SHOWN = 4  # differences that an error lists


def dense_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape, for a `model_type` in `DENSE_MODEL_TYPES`."""
    _require(config)
    vocabulary, width = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, width)
    return shapes


def check_dense(source: object, config: Mapping[str, Any], tensors: LazyTensors) -> None:
    """Raises `CheckpointError` that lists what is missing, has another shape, or would be ignored.

    A tensor that the model does not know (a norm, a bias) is part of the arithmetic that made the
    checkpoint: serving without it would answer nonsense.
    """
    shapes = dense_shapes(config)
    differences = []
    for name, shape in shapes.items():
        if name not in tensors:
            differences.append(f"{name} {list(shape)} is missing")
        elif tensors.info(name).shape != shape:
            stored = list(tensors.info(name).shape)
            differences.append(f"{name} is {stored} and should be {list(shape)}")
    differences += [
        f"{name} has no place in a {config['model_type']} model"
        for name in tensors
        if name not in shapes and not name.endswith(_REDUNDANT)
    ]
    if differences:
        rest = len(differences) - _SHOWN
        more = f"; and {rest} more" if rest > 0 else ""
        raise CheckpointError(
            f"The tensors of {source} do not fit its configuration: "
            f"{'; '.join(differences[:_SHOWN])}{more}. "
            "Fetch the model again, or correct its configuration."
        )


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    with_bias: list[str] = []
    if config["model_type"] == "qwen2":
        with_bias += ["q_proj", "k_proj", "v_proj"]
    elif config.get("attention_bias"):
        with_bias += ["q_proj", "k_proj", "v_proj", "o_proj"]
    for name in with_bias:
        shapes[f"self_attn.{name}.bias"] = shapes[f"self_attn.{name}.weight"][:1]
    if config.get("mlp_bias"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"mlp.{name}.bias"] = shapes[f"mlp.{name}.weight"][:1]
    if config["model_type"] == "qwen3":
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _require(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in DENSE_MODEL_TYPES:
        raise UnsupportedModelError(
            f"No table of tensors for the model_type {model_type!r}. "
            f"Known are: {', '.join(DENSE_MODEL_TYPES)}."
        )
    for key in _REQUIRED_KEYS:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"The configuration of this {model_type} model has {key} = {value!r}; "
                "a positive integer is expected."
            )
