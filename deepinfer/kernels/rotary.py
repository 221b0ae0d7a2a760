"""Rotary position embedding: inverse frequencies for every scaling, and the cosine/sine table.

The table is computed once per model, by position: a row's angles never depend on what else is in
the batch. `models/` builds the table, `kernels/reference.py` applies it. Nothing here knows a
configuration file beyond the two entries `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angles of every position, in half-rotation pairing: dimension i turns with i + head_dim/2."""

    cosine: torch.Tensor  # float32 [positions, head_dim]: both halves carry the same values
    sine: torch.Tensor  # float32 [positions, head_dim / 2]

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [tokens] -> cosine [tokens, 1, head_dim], sine [tokens, 1, head_dim / 2]."""
        cosine = self.cosine.index_select(0, positions).unsqueeze(1)
        return cosine, self.sine.index_select(0, positions).unsqueeze(1)


def rotary_table(
    theta: float, scaling: Mapping[str, Any] | None, head_dim: int, max_positions: int
) -> RotaryTable:
    """The table for `rope_theta` and `rope_scaling` as config.json spells them."""
    inverse, magnitude = inverse_frequencies(theta, scaling or {}, head_dim, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse[None, :]
    cosine = angles.cos() * magnitude
    return RotaryTable(torch.cat((cosine, cosine), dim=1), angles.sin() * magnitude)


def inverse_frequencies(
    theta: float, scaling: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """-> (radians per position float32 [head_dim / 2], factor on cosine and sine)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (theta**exponent)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / _number(scaling, "factor"), 1.0
    if kind == "factors":
        divisors = torch.tensor(list(scaling["factors"]), dtype=torch.float32)
        if divisors.numel() != inverse.numel():
            raise UnsupportedModelError(
                f"rope_scaling has {divisors.numel()} frequency factors for a head of {head_dim} "
                f"dimensions; it must have {inverse.numel()}. The checkpoint contradicts itself."
            )
        return inverse / divisors, 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if kind == "yarn":
        return _yarn(inverse, theta, scaling, head_dim, max_positions)
    raise UnsupportedModelError(
        f"rope_scaling of type {kind!r} is not implemented. "
        "Served are: default, linear, llama3, yarn, factors."
    )


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * inverse / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: fast enough to be left alone
    return (1 - kept) * inverse / factor + kept * inverse


def _yarn(
    inverse: torch.Tensor,
    theta: float,
    scaling: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
) -> tuple[torch.Tensor, float]:
    """YaRN: interpolates dimensions that turn rarely, keeps the others, sharpens the softmax."""
    original = float(scaling.get("original_max_position_embeddings") or max_positions)
    factor = _number(scaling, "factor")

    def dimension_turning(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_turning(float(scaling.get("beta_fast") or 32.0))
    high = dimension_turning(float(scaling.get("beta_slow") or 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolated = ((index - low) / width).clamp(0.0, 1.0)
    blended = inverse / factor * interpolated + inverse * (1 - interpolated)
    return blended, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(float(mscale)) / magnitude(float(mscale_all))
    return magnitude(1.0)


def _number(scaling: Mapping[str, Any], name: str) -> float:
    """An entry that this kind of scaling cannot do without."""
    value = scaling.get(name)
    if not isinstance(value, (int, float)):
        kind = scaling.get("rope_type", scaling.get("type"))
        raise CheckpointError(
            f"rope_scaling of type {kind!r} has {name} = {value!r} where a number is expected. "
            "The configuration is incomplete; fetch it again."
        )
    return float(value)
