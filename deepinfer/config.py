"""EngineConfig: every setting of an engine, in one frozen struct, documented where it is declared.

Settings of the HTTP front are in `serve/app.py` (ServerConfig). `tests/test_settings.py` freezes
the field list: adding one is a decision, not an accident.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from deepinfer.errors import ConfigError

DType = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is built from. `validate()` raises `ConfigError` naming the field."""

    # --- the model ---
    model: str = (
        ""  # GGUF file or Hugging Face directory; empty: the embedded SmolLM2-135M-Instruct
    )
    served_model_name: str = ""  # the name clients use; empty: derived from the checkpoint
    tokenizer: str = ""  # directory or tokenizer.json; empty: the checkpoint's own
    chat_template: str = ""  # file with a jinja template; empty: the checkpoint's own
    load_format: LoadFormat = "auto"  # "dummy": random weights of the right shapes, for measuring
    dtype: DType = "auto"  # of the weights in matrix products; auto: the fastest that was measured
    seed: int = 0  # of dummy weights and of requests that bring no seed

    # --- the device ---
    device: str = "cpu"
    num_threads: int = 0  # for a CPU device; 0: torch's own choice, at most one per usable core
    kv_cache_memory_bytes: int = 0  # 0: derived from the memory that is free
    memory_utilization: float = 0.9  # share of the free memory that weights and cache may take

    # --- sizes ---
    max_model_len: int = 0  # prompt + output, in tokens; 0: what the model allows and memory holds
    max_num_seqs: int = 64  # sequences running at once
    block_tokens: int = 32  # positions per KV block
    max_num_batched_tokens: int = 0  # token budget of a step; 0: derived

    # --- fairness inside a step: each side's bound on the other ---
    max_prefill_tokens_beside_decode: int = 128  # a step that decodes prefills at most this much
    min_prefill_tokens: int = 32  # a step leaves this much of its budget to waiting prefill

    # --- the waiting room ---
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4 * 1024 * 1024
    max_skips: int = 64  # how often later requests may pass one that does not fit
    enable_prefix_caching: bool = True

    # --- behaviour ---
    overlap: bool = True  # plan a step while the one before runs; off: the plain loop, same tokens
    batch_invariant: bool = False  # a sequence's bits do not depend on what shares its batch
    drain_timeout_s: float = 60.0  # how long `drain()` lets running requests finish

    def validate(self) -> None:
        positive = (
            "max_num_seqs",
            "block_tokens",
            "max_prefill_tokens_beside_decode",
            "min_prefill_tokens",
            "max_waiting_requests",
            "max_waiting_tokens",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.", name)
        not_negative = (
            "num_threads",
            "kv_cache_memory_bytes",
            "max_model_len",
            "max_num_batched_tokens",
            "max_skips",
            "drain_timeout_s",
        )
        for name in not_negative:
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must not be negative.", name
                )
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization is {self.memory_utilization}; it is a share in (0, 1].",
                "memory_utilization",
            )
        floor = self.max_num_seqs + self.min_prefill_tokens
        if 0 < self.max_num_batched_tokens < self.min_prefill_tokens + 1:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must exceed "
                f"min_prefill_tokens ({self.min_prefill_tokens}), and {floor} lets every running "
                "sequence decode in every step.",
                "max_num_batched_tokens",
            )
