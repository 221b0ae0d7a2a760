"""The dense decoder family, top to bottom: Llama (SmolLM), Mistral, Qwen2 and Qwen3.

They differ in a handful of options, which `DenseConfig.parse` reads from the checkpoint's
configuration; what it does not know how to honour it refuses by name.

    token ids ─ embedding ─┬─ norm ─ qkv ─ [q/k norm] ─ rotary ─ attention ─ output ─┬─(+)─┐
                           └────────────────────── residual ────────────────────────┘     │
    logits ─ head ─ norm ─ ... × layers ... ─(+)─ down ─ silu(gate)·up ─ norm ─────────────┘

The model owns its weights and knows where KV lies in its cache; which block belongs to whom comes
in with each `Batch`. The runner is the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.kernels import cpu_kernels, reference
from deepinfer.kernels.batch import Batch
from deepinfer.kernels.linear import Linear, choose_dtype, linear_bytes, make_linear
from deepinfer.kernels.rotary import rotary_table
from deepinfer.step import CacheSpec

if TYPE_CHECKING:
    from deepinfer.models import ModelOptions

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of the embedding


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """The options of the family, resolved."""

    model_type: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_width: int  # of the gated MLP
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer; None: sees everything before it

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DenseConfig:
        """Reads config.json's spelling. Raises `UnsupportedModelError` naming the option."""
        _refuse_unknown(config)
        model_type = str(config["model_type"])
        num_heads = int(config["num_attention_heads"])
        num_layers = int(config["num_hidden_layers"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            width=int(config["hidden_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
            hidden_width=int(config["intermediate_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=int(config["max_position_embeddings"]),
            rope_theta=float(config.get("rope_theta") or 10000.0),
            rope_scaling=config.get("rope_scaling"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            windows=tuple(_windows(config, model_type, num_layers)),
        )

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def weights_bytes(self, dtype: str) -> int:
        """What the weights take in memory once they are loaded; `dtype` is resolved."""
        width, hidden_width, value_bytes = self.width, self.hidden_width, _VALUE_BYTES[dtype]
        layer = sum(
            linear_bytes(dtype, out_features, in_features)
            for out_features, in_features in (
                (self.query_width + 2 * self.kv_width, width),
                (width, self.query_width),
                (2 * hidden_width, width),
                (width, hidden_width),
            )
        )
        head = linear_bytes(dtype, self.vocab_size, width)
        if self.tied_embeddings and dtype == "float32":
            head = 0  # shares the embedding's memory
        norms = 4 * (2 * self.num_layers + 1) * width
        return self.num_layers * layer + self.vocab_size * width * value_bytes + head + norms


@dataclass(frozen=True, slots=True)
class _Layer:
    window: int | None
    attention_norm: torch.Tensor  # [width]
    qkv: Linear  # width -> query_width + 2 * kv_width
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: Linear  # query_width -> width
    mlp_norm: torch.Tensor
    gate_up: Linear  # width -> 2 * hidden_width
    down: Linear  # hidden_width -> width


class Llama:
    """Implements the `Model` protocol. Loaded when the constructor returns."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        options: ModelOptions,
    ) -> None:
        self.config = DenseConfig.parse(config)
        self.vocab_size = self.config.vocab_size
        self.max_positions = self.config.max_positions
        self._block_tokens = options.block_tokens
        self._scale = self.config.head_dim**-0.5
        self._kernels = cpu_kernels(batch_invariant=options.batch_invariant)
        source = _Tensors(tensors)
        self.dtype, self.dtype_choice = _resolve_dtype(
            options.dtype, options.batch_invariant, self.config, source
        )
        self._load(source)
        source.refuse_leftovers(self.config.tied_embeddings)

    def _load(self, source: _Tensors) -> None:
        config = self.config
        self._load_embedding(source)
        self._rotary = rotary_table(
            config.rope_theta, config.rope_scaling, config.head_dim, config.max_positions
        )
        self._layers = [self._load_layer(source, index) for index in range(config.num_layers)]
        self._final_norm = source.take("model.norm.weight", config.width)

    def _load_embedding(self, source: _Tensors) -> None:
        """The largest tensors come first: their float32 copies are gone before the layers come."""
        shape = self.config.vocab_size, self.config.width
        embedding = source.take("model.embed_tokens.weight", *shape)
        self._embedding = embedding.to(getattr(torch, self.dtype))
        head = embedding if self.config.tied_embeddings else source.take("lm_head.weight", *shape)
        self._head = make_linear(self.dtype, head)

    def _load_layer(self, source: _Tensors, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        width, query_width, kv_width = config.width, config.query_width, config.kv_width

        def linear(names: dict[str, int], inputs: int, bias: bool) -> Linear:
            """One product for several named projections, stacked in the order given."""
            weights = [source.take(f"{prefix}{n}.weight", o, inputs) for n, o in names.items()]
            biases = [source.take(f"{prefix}{n}.bias", o) for n, o in names.items() if bias]
            return make_linear(
                self.dtype, torch.cat(weights), torch.cat(biases) if biases else None
            )

        def norm(name: str, size: int) -> torch.Tensor:
            return source.take(f"{prefix}{name}.weight", size)

        attention, mlp = "self_attn.", "mlp."
        qkv = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
        gate_up = {"gate_proj": config.hidden_width, "up_proj": config.hidden_width}
        return _Layer(
            window=config.windows[index],
            attention_norm=norm("input_layernorm", width),
            qkv=linear({attention + n: o for n, o in qkv.items()}, width, config.qkv_bias),
            query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            output=linear({"self_attn.o_proj": width}, query_width, config.output_bias),
            mlp_norm=norm("post_attention_layernorm", width),
            gate_up=linear({mlp + n: o for n, o in gate_up.items()}, width, config.mlp_bias),
            down=linear({"mlp.down_proj": width}, config.hidden_width, config.mlp_bias),
        )

    def cache_spec(self) -> CacheSpec:
        config = self.config
        values = config.num_layers * self._block_tokens * 2 * config.kv_width
        return CacheSpec(block_tokens=self._block_tokens, block_bytes=values * 4)

    def allocate_cache(self, num_blocks: int, num_slots: int) -> list[torch.Tensor]:
        """One tensor a layer: float32 [num_blocks, block_tokens, 2 * kv_heads, head_dim].

        Zeros, not garbage: masked places are multiplied by 0, and 0 * NaN would not be 0. numpy's
        zeros are pages that the kernel hands out on first use, so a large cache costs no start-up.
        """
        config = self.config
        shape = (num_blocks, self._block_tokens, 2 * config.num_kv_heads, config.head_dim)
        return [torch.from_numpy(np.zeros(shape, np.float32)) for _ in range(config.num_layers)]

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, batch: Batch, cache: list[torch.Tensor]
    ) -> torch.Tensor:
        """token_ids: int64 [tokens] -> hidden float32 [tokens, width], before the final norm."""
        with self._kernels.threads():
            return self._forward(token_ids, batch, cache)

    def _forward(
        self, token_ids: torch.Tensor, batch: Batch, cache: list[torch.Tensor]
    ) -> torch.Tensor:
        config, kernels = self.config, self._kernels
        cosine, sine = self._rotary.at(batch.positions)
        places = batch.write_blocks * self._block_tokens + batch.write_offsets
        group = config.num_heads // config.num_kv_heads
        plans = {
            window: kernels.plan_attention(batch, self._block_tokens, group, window)
            for window in set(config.windows)
        }
        hidden = functional.embedding(token_ids, self._embedding).to(torch.float32)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            query, key, value = kernels.by_rows(partial(self._project, layer), hidden, cosine, sine)
            reference.write_cache(layer_cache, places, key, value)
            attended = kernels.paged_attention(query, layer_cache, plans[layer.window], self._scale)
            (hidden,) = kernels.by_rows(partial(self._finish, layer), hidden, attended)
        return hidden

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden: [tokens, width] -> query, key, value: [tokens, heads or kv_heads, head_dim]."""
        config = self.config
        heads, both = config.num_heads, config.num_heads + config.num_kv_heads
        x = reference.rms_norm(hidden, layer.attention_norm, config.norm_eps)
        qkv = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        query_key, value = qkv[:, :both], qkv[:, both:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = reference.rms_norm(query_key[:, :heads], layer.query_norm, config.norm_eps)
            key = reference.rms_norm(query_key[:, heads:], layer.key_norm, config.norm_eps)
            query_key = torch.cat((query, key), dim=1)
        query_key = reference.rotary_embedding(query_key, cosine, sine)
        return query_key[:, :heads], query_key[:, heads:], value

    def _finish(
        self, layer: _Layer, hidden: torch.Tensor, attended: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """hidden: [tokens, width], attended: [tokens, query_width] -> the layer's output."""
        hidden = hidden + layer.output(attended)
        x = reference.rms_norm(hidden, layer.mlp_norm, self.config.norm_eps)
        hidden += layer.down(reference.silu_and_multiply(layer.gate_up(x)))
        return (hidden,)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, width] as `forward` gives it -> float32 [rows, vocab_size]."""

        def head(rows: torch.Tensor) -> tuple[torch.Tensor]:
            return (self._head(reference.rms_norm(rows, self._final_norm, self.config.norm_eps)),)

        with self._kernels.threads():
            (logits,) = self._kernels.by_rows(head, hidden)
        return logits


class _Tensors:
    """A checkpoint's tensors, taken one by one by name, with their shapes checked."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """float32, of exactly this shape. Raises `CheckpointError` otherwise."""
        if name not in self._tensors:
            raise CheckpointError(
                f"The checkpoint has no tensor {name!r}, which its configuration asks for. "
                "It is incomplete or belongs to another architecture."
            )
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"Tensor {name!r} has the shape {tuple(tensor.shape)}, but by the configuration "
                f"it must be {shape}. Configuration and weights do not belong together."
            )
        self._taken.add(name)
        return tensor.to(torch.float32)

    def refuse_leftovers(self, tied_embeddings: bool) -> None:
        """Raises `UnsupportedModelError` if a weight would silently have no effect."""
        for name in self._tensors:
            harmless = name.endswith("rotary_emb.inv_freq") or (
                tied_embeddings and name == "lm_head.weight"
            )
            if name not in self._taken and not harmless:
                raise UnsupportedModelError(
                    f"The checkpoint has a tensor {name!r} for which this architecture has no "
                    "use: ignoring it would change the model's answers."
                )


def _resolve_dtype(
    dtype: str, batch_invariant: bool, config: DenseConfig, source: _Tensors
) -> tuple[str, str]:
    """-> (dtype of the weights in matrix products, why in a sentence for the start-up log)."""
    if dtype != "auto":
        return dtype, f"{dtype}: as asked for"
    if batch_invariant:
        return "float32", "float32: not measured, so that every start gives the same bits"
    return choose_dtype(
        source.take("model.layers.0.mlp.up_proj.weight", config.hidden_width, config.width)
    )


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    """Options that change the arithmetic and are not implemented must have their neutral value."""
    neutral: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "attention_multiplier": (None,),
        "no_rope_layers": (None,),
    }
    for option, allowed in neutral.items():
        value = config.get(option, allowed[0])
        if value not in allowed:
            raise UnsupportedModelError(
                f"{option} = {value!r} is not implemented; served is {option} = {allowed[0]!r}."
            )


def _windows(config: Mapping[str, Any], model_type: str, num_layers: int) -> Iterable[int | None]:
    """The sliding window of each layer."""
    window = config.get("sliding_window")
    if model_type == "llama" or (model_type != "mistral" and not config.get("use_sliding_window")):
        window = None
    types = config.get("layer_types")
    if types is None:
        first = 0 if model_type == "mistral" else int(config.get("max_window_layers", 0))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer_types has {kind!r}; served are full_attention and sliding_attention."
            )
        yield int(window) if window and kind == "sliding_attention" else None
