"""What a model is to the rest of the house, and which class serves which architecture.

A model is built from a hyper-parameter dictionary in the spelling of Hugging Face's `config.json`
(the GGUF reader translates into it) and a mapping of tensors under Hugging Face names. It computes;
it does not know requests, schedulers or where its cache memory comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.errors import UnsupportedModelError
from deepinfer.step import CacheSpec

if TYPE_CHECKING:
    import torch

    from deepinfer.kernels.batch import Batch


class ModelOptions(Protocol):
    """The settings that a model may look at (EngineConfig has them all)."""

    @property
    def dtype(self) -> str: ...

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def block_tokens(self) -> int: ...


class Model(Protocol):
    """A decoder. Weights are loaded when the constructor returns."""

    vocab_size: int
    max_positions: int
    dtype_choice: str  # dtype of the weights in matrix products, and why, for the start-up log

    def cache_spec(self) -> CacheSpec: ...

    def allocate_cache(self, num_blocks: int, num_slots: int) -> Any:
        """Returns the model's own cache object; block 0 and slot 0 are dummies for padding."""

    def forward(self, token_ids: torch.Tensor, batch: Batch, cache: Any) -> torch.Tensor:
        """token_ids: int64 [tokens] -> hidden float32 [tokens, width]; writes KV into `cache`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, width] -> float32 [rows, vocab_size]."""


def model_class(architecture: str) -> Any:
    """The class that serves a `model_type` of config.json. Raises `UnsupportedModelError`."""
    if architecture in ("llama", "mistral", "qwen2", "qwen3"):
        from deepinfer.models.llama import Llama

        return Llama
    raise UnsupportedModelError(
        f"No implementation for the architecture {architecture!r}. "
        "Served are: llama (SmolLM included), mistral, qwen2, qwen3."
    )


def build(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], options: ModelOptions
) -> Model:
    """Builds and loads the model that `config["model_type"]` names."""
    model: Model = model_class(str(config.get("model_type", "")))(config, tensors, options)
    return model
