"""What the metadata and tensor names of a GGUF file mean, in Hugging Face's spelling.

Owns the two vocabularies and what lies between them: `translate` turns an open `GgufFile` into a
`Checkpoint`. Files converted for the `llama` architecture store the rows of the query and key
projections in another order (pairs of rotary dimensions next to each other instead of half a head
apart); that is undone when such a tensor is read.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights.checkpoint import Checkpoint, LazyTensors, TensorInfo
from deepinfer.runtime.weights.gguf import GgufFile, GgufMetadata

# GGUF architecture -> model_type. Mistral models are converted as `llama`.
_MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_INTERLEAVED_ARCHITECTURES = ("llama", "mistral")

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # becomes rope_scaling, not a tensor of the model

_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}
_QUANTISATION_SUFFIX = re.compile(
    r"[.-](I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE
)


def translate(file: GgufFile) -> Checkpoint:
    """Raises `UnsupportedModelError` for what no model here computes."""
    architecture = _architecture(file)
    names = {_hugging_face_name(file, stored): stored for stored in file.tensors}
    names.pop("", None)
    config = _Settings(file, architecture).config(names)
    heads = _interleaved_heads(config) if architecture in _INTERLEAVED_ARCHITECTURES else {}

    def read(name: str) -> torch.Tensor:
        num_heads = heads.get(name.split(".")[-2], 0)
        return file.read(names[name], interleaved_heads=num_heads)

    infos = {
        name: TensorInfo(tensor.shape, tensor.format.name, tensor.num_bytes)
        for name, stored in names.items()
        for tensor in (file.tensors[stored],)
    }
    return Checkpoint(
        name=model_name(file.path),
        path=file.path,
        format=f"GGUF v{file.version}",
        config=config,
        tensors=LazyTensors(file.path, infos, read),
        generation_config=_generation_config(file.metadata, config),
        tokenizer_config=_tokenizer_config(file.metadata),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        gguf_metadata=file.metadata,
    )


def model_name(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`. The file's name is better than
    `general.name`, which often is a training run's."""
    return _QUANTISATION_SUFFIX.sub("", path.stem) or path.stem


def _architecture(file: GgufFile) -> str:
    metadata = file.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{file.path} holds a {kind!r}, not a model. Give the GGUF file of the language model."
        )
    num_parts = metadata.get("split.count", 1)
    if isinstance(num_parts, int) and num_parts > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {num_parts} parts. Merge them first: "
            f"llama-gguf-split --merge {file.path} merged.gguf"
        )
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise CheckpointError(f"{file.path} lacks the metadata key 'general.architecture'.")
    if architecture not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {architecture!r}, which has no implementation. "
            f"Served from GGUF are: {', '.join(_MODEL_TYPES)}."
        )
    return str(architecture)


def _hugging_face_name(file: GgufFile, stored: str) -> str:
    """Empty for a tensor that is not one of the model's. Raises for one nobody would use."""
    if stored == _ROPE_FACTORS:
        return ""
    top, _, kind = stored.rpartition(".")
    if top in _TOP_NAMES and kind == "weight":
        return f"{_TOP_NAMES[top]}.{kind}"
    match = _LAYER_PATTERN.fullmatch(stored)
    if match and match[2] in _LAYER_NAMES and (match[3] == "weight" or "norm" not in match[2]):
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    raise UnsupportedModelError(
        f"{file.path} has a tensor {stored!r}, which no served architecture uses. "
        "The model computes something that is not implemented here."
    )


def _interleaved_heads(config: dict[str, Any]) -> dict[str, int]:
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


class _Settings:
    """Reads `<architecture>.*` keys and composes config.json's dictionary from them."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._metadata = file.metadata
        self._architecture = architecture

    def config(self, names: dict[str, str]) -> dict[str, Any]:
        """names: Hugging Face name -> name in the file."""
        self._refuse_experts()
        num_heads = self._integer("attention.head_count")
        hidden_size = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        self._require_plain_heads(head_dim)
        config: dict[str, Any] = {
            "model_type": _MODEL_TYPES[self._architecture],
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": float(self._number("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self._number("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "max_position_embeddings": self._integer("context_length"),
            "vocab_size": self._vocab_size(names),
            "tie_word_embeddings": "lm_head.weight" not in names,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
            "sliding_window": self._integer("attention.sliding_window", 0) or None,
            **_special_token_ids(self._metadata),
        }
        if self._architecture != "qwen2":  # whose q, k and v always have one; o never
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in names
        if self._architecture == "llama" and config["sliding_window"]:
            config["model_type"] = "mistral"
        return config

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}")

    def _number(self, key: str, default: float | None = None) -> float:
        """A scalar, or an array that has one value for all layers."""
        value = self._get(key)
        full_key = f"'{self._architecture}.{key}'"
        if isinstance(value, np.ndarray):
            different = np.unique(value)
            if len(different) != 1:
                raise UnsupportedModelError(
                    f"{self._file.path}: {full_key} differs between layers "
                    f"({len(different)} values), which no served architecture allows."
                )
            value = different[0].item()
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._file.path} lacks the metadata key {full_key}.")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CheckpointError(f"{self._file.path}: {full_key} is {value!r}, not a number.")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        optional_zero = default == 0
        if value != int(value) or value < (0 if optional_zero else 1):
            raise CheckpointError(
                f"{self._file.path}: '{self._architecture}.{key}' is {value}; "
                "a positive integer is expected."
            )
        return int(value)

    def _refuse_experts(self) -> None:
        num_experts = self._integer("expert_count", 0)
        if num_experts:
            raise UnsupportedModelError(
                f"{self._file.path} is a mixture of {num_experts} experts; "
                f"of {self._architecture!r} only dense models are served."
            )

    def _require_plain_heads(self, head_dim: int) -> None:
        for key in ("attention.value_length", "rope.dimension_count"):
            size = self._integer(key, head_dim)
            if size != head_dim:
                raise UnsupportedModelError(
                    f"{self._file.path}: '{self._architecture}.{key}' is {size} while heads have "
                    f"{head_dim} dimensions; only equal sizes are implemented."
                )

    def _vocab_size(self, names: dict[str, str]) -> int:
        stored = names.get("model.embed_tokens.weight")
        if stored is None:
            raise CheckpointError(f"{self._file.path} has no tensor 'token_embd.weight'.")
        return self._file.tensors[stored].shape[0]

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type") or "none"
        if _ROPE_FACTORS in self._file.tensors:
            return self._rope_factors(head_dim, kind)
        if kind == "none" and self._get("rope.scale_linear") is not None:
            kind = "linear"  # the spelling of early files
        if kind == "none":
            return None
        factor = float(self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0)))
        if factor <= 0.0:
            raise CheckpointError(f"{self._file.path}: the RoPE scaling factor is {factor}.")
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        if kind == "yarn":
            return self._yarn(factor)
        raise UnsupportedModelError(
            f"{self._file.path}: RoPE scaling {kind!r} is not implemented; "
            "none, linear, yarn and the factors of Llama 3 are."
        )

    def _rope_factors(self, head_dim: int, kind: str) -> dict[str, Any] | None:
        if kind != "none":
            raise UnsupportedModelError(
                f"{self._file.path} has both RoPE scaling {kind!r} and a tensor "
                f"{_ROPE_FACTORS!r}; the combination is not implemented."
            )
        factors: list[float] = self._file.read(_ROPE_FACTORS).float().flatten().tolist()
        if len(factors) != head_dim // 2:
            raise CheckpointError(
                f"{self._file.path}: {_ROPE_FACTORS!r} has {len(factors)} factors for "
                f"{head_dim // 2} frequencies."
            )
        if all(factor == 1.0 for factor in factors):
            return None
        return {"rope_type": "factors", "factors": factors}

    def _yarn(self, factor: float) -> dict[str, Any]:
        context = self._integer("context_length")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._integer(
                "rope.scaling.original_context_length", context
            ),
        }
        for key in ("beta_fast", "beta_slow"):
            if self._get(f"rope.scaling.yarn_{key}") is not None:
                scaling[key] = float(self._number(f"rope.scaling.yarn_{key}"))
        multiplier = self._number(
            "rope.scaling.attn_factor", self._number("rope.scaling.yarn_attn_factor", 1.0)
        )
        if multiplier != 1.0:
            # GGUF's factor multiplies YaRN's own attention scale; Hugging Face's replaces it.
            scaling["attention_factor"] = float(multiplier) * (0.1 * math.log(factor) + 1.0)
        return scaling


def _token_id(metadata: GgufMetadata, kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise CheckpointError(f"The metadata key {key!r} is {value!r}, not a token id.")
    return value


def _special_token_ids(metadata: GgufMetadata) -> dict[str, Any]:
    """eos_token_id is a list when the file knows more than one way to end an answer."""
    ids: dict[str, Any] = {}
    for key, kind in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = _token_id(metadata, kind)
        if value is not None:
            ids[key] = value
    endings = [_token_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(ending for ending in endings if ending is not None))
    if known:
        ids["eos_token_id"] = known[0] if len(known) == 1 else known
    return ids


def _generation_config(metadata: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    settings = {key: config[key] for key in keys if key in config}
    for stored, name in _SAMPLING_KEYS.items():
        if stored in metadata:
            settings[name] = metadata[stored]
    return settings


def _tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """The part of tokenizer_config.json that templates and encoders ask for."""
    settings: dict[str, Any] = {}
    for key in ("add_bos_token", "add_eos_token"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            settings[key] = value
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    for name, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, kind)
        if token_id is not None and token_id < len(tokens):
            settings[f"{name}_token"] = tokens[token_id]
    return settings
