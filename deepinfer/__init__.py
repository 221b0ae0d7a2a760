"""deepinfer: an LLM inference engine in pure Python and Triton.

The names below load on first use: importing the package imports neither torch nor a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig
    from deepinfer.engine import Engine
    from deepinfer.offline import LLM
    from deepinfer.types import Delta, FinishReason, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Engine": "deepinfer.engine",
    "EngineConfig": "deepinfer.config",
    "LLM": "deepinfer.offline",
    "SamplingParams": "deepinfer.types",
    "Delta": "deepinfer.types",
    "FinishReason": "deepinfer.types",
}

__all__ = ["LLM", "Delta", "Engine", "EngineConfig", "FinishReason", "SamplingParams"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
