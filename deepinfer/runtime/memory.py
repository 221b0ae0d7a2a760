"""The memory plan: how much KV cache, how long a context, and why. Pure arithmetic.

Knows no device and loads nothing: `deepinfer plan` calls it with numbers from a checkpoint's
headers, `build_device` with the same ones, so that the first tells what the second will do.

    free memory  ├─── memory_utilization ───────────────────────────────────┤ left alone ┤
                 ├ weights ┤ workspace ┤ state ┤ room for the KV cache       ┤
                                               ├ on a CPU: what the running sequences are likely
                                                 to need, at most a quarter of the free memory ┤

A GPU serves one engine and its memory has no other use: there the cache fills the room. A CPU's
memory belongs to everybody, so there it takes what `max_num_seqs` sequences of
`TYPICAL_TOKENS` need. Either way one sequence of `max_model_len` tokens must fit.
"""

from __future__ import annotations

import msgspec

from deepinfer.errors import ConfigError, MemoryPlanError
from deepinfer.step import CacheSpec

TYPICAL_TOKENS = 2048  # context of a sequence for which a CPU's cache is sized
WORKSPACE_BYTES = 256 * 1024 * 1024  # activations, logits, buffers of the runner
_CPU_SHARE = 4  # the CPU default takes at most one part in so many of the free memory


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to allocate. `num_blocks` includes block 0, the dummy that padding writes to."""

    num_blocks: int
    max_model_len: int
    kv_cache_bytes: int
    weights_bytes: int
    reasons: tuple[str, ...]

    def explain(self) -> str:
        return "\n".join(self.reasons)


class MemoryDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a plan. Zero means "derive it", as in `EngineConfig`."""

    free_bytes: int
    weights_bytes: int
    weights_note: str = ""  # follows the size where the plan shows it
    cache_spec: CacheSpec
    model_max_positions: int
    max_num_seqs: int
    max_model_len: int = 0
    kv_cache_memory_bytes: int = 0
    memory_utilization: float = 0.9
    fill: bool = False  # the cache takes all the room (GPU) or what is likely needed (CPU)


def plan_memory(demand: MemoryDemand) -> MemoryPlan:
    """Raises `MemoryPlanError` (it does not fit; says what would) or `ConfigError`."""
    _check_context(demand)
    block_bytes = demand.cache_spec.block_bytes
    room = _room(demand)
    limit, limit_reason = _cache_limit(demand, room)
    max_model_len, length_reason = _context(demand, room, limit)
    one_sequence = _blocks(demand, max_model_len) + 1
    num_blocks = max(limit // block_bytes, one_sequence)
    wanted = 1 + demand.max_num_seqs * _blocks(demand, min(max_model_len, TYPICAL_TOKENS))
    cache_reason = limit_reason
    if not demand.fill and not demand.kv_cache_memory_bytes and wanted <= num_blocks:
        num_blocks = max(wanted, one_sequence)
        typical = min(max_model_len, TYPICAL_TOKENS)
        cache_reason = (
            f"max_num_seqs = {demand.max_num_seqs} sequences of {typical:,} tokens"
            if num_blocks == wanted
            else f"one sequence of max_model_len = {max_model_len:,} tokens"
        )
    elif num_blocks == one_sequence and limit // block_bytes < one_sequence:
        cache_reason = f"one sequence of max_model_len = {max_model_len:,} tokens, no more"
    tokens = (num_blocks - 1) * demand.cache_spec.block_tokens
    return MemoryPlan(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        kv_cache_bytes=num_blocks * block_bytes,
        weights_bytes=demand.weights_bytes,
        reasons=(
            f"memory: {show_bytes(demand.free_bytes)} free, of which at most "
            f"{demand.memory_utilization:.0%} may be taken (memory_utilization)",
            f"weights: {show_bytes(demand.weights_bytes)}{demand.weights_note}, "
            f"workspace: {show_bytes(WORKSPACE_BYTES)}"
            + (f", sequence state: {show_bytes(_state(demand))}" if _state(demand) else "")
            + f"; this leaves room for {show_bytes(room)} of KV cache",
            f"context: {max_model_len:,} tokens ({length_reason})",
            f"KV cache: {show_bytes(num_blocks * block_bytes)} = {num_blocks:,} blocks of "
            f"{demand.cache_spec.block_tokens} tokens, {tokens:,} tokens in all ({cache_reason})",
        ),
    )


def _check_context(demand: MemoryDemand) -> None:
    if demand.max_model_len > demand.model_max_positions:
        raise ConfigError(
            f"max_model_len is {demand.max_model_len:,}, but the model has only "
            f"{demand.model_max_positions:,} positions. Set it to {demand.model_max_positions} or "
            "less; 0 takes what the model allows.",
            "max_model_len",
        )


def _room(demand: MemoryDemand) -> int:
    """Bytes that are left for the KV cache. Raises if not even two blocks fit."""
    usable = int(demand.free_bytes * demand.memory_utilization)
    room = usable - demand.weights_bytes - WORKSPACE_BYTES - _state(demand)
    least = 2 * demand.cache_spec.block_bytes
    if room < least:
        needed = usable - room + least
        raise MemoryPlanError(
            f"The model does not fit: it needs at least {show_bytes(needed)} (weights "
            f"{show_bytes(demand.weights_bytes)}, workspace {show_bytes(WORKSPACE_BYTES)}, state "
            f"of {demand.max_num_seqs} sequences {show_bytes(_state(demand))}, two KV blocks), but "
            f"{show_bytes(usable)} may be taken: {demand.memory_utilization:.0%} of the "
            f"{show_bytes(demand.free_bytes)} that are free. Free memory, choose --dtype float16 "
            "or a smaller model, or lower --max-num-seqs if the state is what is large."
        )
    return room


def _cache_limit(demand: MemoryDemand, room: int) -> tuple[int, str]:
    """Bytes that the cache may take, and what set the limit."""
    asked = demand.kv_cache_memory_bytes
    if asked:
        if asked > room or asked < 2 * demand.cache_spec.block_bytes:
            raise MemoryPlanError(
                f"kv_cache_memory_bytes is {asked:,} ({show_bytes(asked)}); it can be "
                f"{2 * demand.cache_spec.block_bytes:,} (two blocks) to {room:,} "
                f"({show_bytes(room)}, what weights and workspace leave). 0 derives it."
            )
        return asked, "kv_cache_memory_bytes"
    if demand.fill:
        return room, "all the room there is"
    share = demand.free_bytes // _CPU_SHARE
    if share < room:
        return share, "a quarter of the free memory, the most that is taken unasked on a CPU"
    return room, "all the room there is"


def _context(demand: MemoryDemand, room: int, limit: int) -> tuple[int, str]:
    """max_model_len and its reason. What was asked for may exceed the default share, not room."""
    block_tokens, block_bytes = demand.cache_spec.block_tokens, demand.cache_spec.block_bytes
    if not demand.max_model_len:
        holds = max(1, limit // block_bytes - 1) * block_tokens
        if holds < demand.model_max_positions:
            return holds, (
                f"what the KV cache holds; the model allows {demand.model_max_positions:,}: "
                "set max_model_len or kv_cache_memory_bytes for more"
            )
        return demand.model_max_positions, "the model's own limit"
    most_bytes = demand.kv_cache_memory_bytes or room
    holds = (most_bytes // block_bytes - 1) * block_tokens
    if demand.max_model_len > holds:
        needed = (_blocks(demand, demand.max_model_len) + 1) * block_bytes
        raise MemoryPlanError(
            f"A sequence of max_model_len = {demand.max_model_len:,} tokens needs "
            f"{show_bytes(needed)} of KV cache, but there is room for {show_bytes(most_bytes)}. "
            f"At most {holds:,} tokens fit: set --max-model-len {holds} or less, or free memory."
        )
    return demand.max_model_len, "max_model_len"


def _blocks(demand: MemoryDemand, tokens: int) -> int:
    return -(-tokens // demand.cache_spec.block_tokens)


def _state(demand: MemoryDemand) -> int:
    """Bytes of per-sequence state; one slot more than sequences, for padding."""
    return demand.cache_spec.state_bytes * (demand.max_num_seqs + 1)


def show_bytes(num_bytes: int) -> str:
    """For a person: "513.1 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
