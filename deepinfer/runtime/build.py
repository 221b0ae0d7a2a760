"""From settings to a device that runs: open, plan the memory, load, allocate.

Called by the engine, in a thread of its own: everything here blocks. `deepinfer plan` calls
`plan_device` alone, which reads the checkpoint's headers and no weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer import models
from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.kernels.linear import DTYPE_CANDIDATES
from deepinfer.models.llama import DenseConfig
from deepinfer.runtime import host
from deepinfer.runtime.device import CpuDevice
from deepinfer.runtime.memory import MemoryDemand, MemoryPlan, plan_memory, show_bytes
from deepinfer.runtime.runner import Runner
from deepinfer.runtime.weights import Checkpoint, open_checkpoint
from deepinfer.step import CacheSpec


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What `build_device` will make of the settings."""

    checkpoint: Checkpoint
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class BuiltDevice:
    """A device and what the layers above need to know of the model behind it.

    `checkpoint` has config, name, generation_config, chat_template and the tokenizer's sources.
    """

    device: CpuDevice
    checkpoint: Checkpoint
    memory: MemoryPlan
    vocab_size: int
    max_model_len: int
    explanation: tuple[str, ...]  # lines for the start-up log: each derived value and why


def plan_device(config: EngineConfig) -> DevicePlan:
    """Raises what `open_checkpoint` and `plan_memory` raise."""
    if config.device != "cpu":
        raise ConfigError(f"device is {config.device!r}; served is: cpu.", "device")
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    models.model_class(str(checkpoint.config.get("model_type", "")))  # refuses by name
    weights_bytes, weights_note = _weights(checkpoint.config, config)
    demand = MemoryDemand(
        free_bytes=host.available_memory_bytes(),
        weights_bytes=weights_bytes,
        weights_note=weights_note,
        cache_spec=_cache_spec(checkpoint.config, config.block_tokens),
        model_max_positions=int(checkpoint.config["max_position_embeddings"]),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        memory_utilization=config.memory_utilization,
    )
    return DevicePlan(checkpoint, plan_memory(demand))


def build_device(config: EngineConfig, on_progress: Callable[[str], None]) -> BuiltDevice:
    """Blocks for seconds. `on_progress` gets a line before each long step, in another thread.

    All arithmetic, loading included, happens in the device's own thread: each thread that computes
    gets a set of OpenMP threads, and libgomp slows all of them down once there are more than cores.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-step")
    try:
        return thread.submit(_build, config, on_progress, thread).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise


def _build(
    config: EngineConfig, on_progress: Callable[[str], None], thread: ThreadPoolExecutor
) -> BuiltDevice:
    threads = _set_threads(config.num_threads)
    plan = plan_device(config)
    checkpoint, memory = plan.checkpoint, plan.memory
    on_progress(f"loading {checkpoint.describe()}")
    model = models.build(checkpoint.config, checkpoint.tensors, config)
    host.return_freed_memory()
    if model.cache_spec() != _cache_spec(checkpoint.config, config.block_tokens):
        raise AssertionError("the memory plan assumed another cache than the model has")
    num_slots = config.max_num_seqs + 1  # slot 0 may stay free, for padding
    on_progress(f"allocating {memory.num_blocks:,} KV blocks for {config.max_num_seqs} sequences")
    runner = Runner(
        model,
        model.allocate_cache(memory.num_blocks, num_slots),
        memory.num_blocks,
        num_slots,
        memory.max_model_len,
    )
    return BuiltDevice(
        device=CpuDevice(runner, thread=thread),
        checkpoint=checkpoint,
        memory=memory,
        vocab_size=model.vocab_size,
        max_model_len=memory.max_model_len,
        explanation=(
            f"model: {checkpoint.describe()}",
            f"dtype: {model.dtype_choice}",
            f"threads: {threads}",
            *memory.reasons,
        ),
    )


def _set_threads(num_threads: int) -> str:
    """Threads of torch's arithmetic, a setting of the whole process. Returns what and why.

    An embedding host is not surprised: unless `num_threads` asks for it, the number only ever goes
    down, and only to what this process may use at all: a container's share of a large machine.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
        return f"{num_threads} (num_threads)"
    present, cores = torch.get_num_threads(), host.usable_cores()
    if present <= cores or "OMP_NUM_THREADS" in os.environ:
        return f"{present} (torch's own choice)"
    torch.set_num_threads(cores)
    return f"{cores} (the cores that this process may use; torch had chosen {present})"


def _cache_spec(config: Mapping[str, Any], block_tokens: int) -> CacheSpec:
    """Of a dense model, before it is built: float32 keys and values of every layer."""
    dense = DenseConfig.parse(config)
    values = dense.num_layers * block_tokens * 2 * dense.kv_width
    return CacheSpec(block_tokens=block_tokens, block_bytes=values * 4)


def _weights(config: Mapping[str, Any], settings: EngineConfig) -> tuple[int, str]:
    """-> (bytes as loaded, and a remark); the larger candidate if a measurement will choose."""
    dense = DenseConfig.parse(config)
    if settings.dtype != "auto":
        return dense.weights_bytes(settings.dtype), ""
    if settings.batch_invariant:
        return dense.weights_bytes("float32"), ""
    candidates = {dtype: dense.weights_bytes(dtype) for dtype in DTYPE_CANDIDATES}
    shown = ", ".join(f"{show_bytes(size)} as {dtype}" for dtype, size in candidates.items())
    return max(candidates.values()), f" at most ({shown}; the faster is taken)"
