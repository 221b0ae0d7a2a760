"""Paged attention for CPUs: gathers each row's blocks once and calls torch's fused attention.

A step is planned once (`plan_attention`: which blocks, which mask) and the plan serves all layers
of the same window. Rows that compute one token are batched by similar length; rows that compute
more run one by one. The query heads that share a KV head become query rows, so that keys and
values are never repeated.

        decode rows, sorted by length          prefill rows
        ├─ group A ─┤├── group B ──┤           one call each
        padded to the longest of the group     queries [kv_heads, group * count, head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer.kernels.batch import Batch

# Rows share a call while the shortest has at least this share of the longest one's blocks.
_MIN_FILL = 0.75


@dataclass(frozen=True, slots=True)
class _Call:
    """One fused attention call: `rows` sequences of `count` query tokens each."""

    tokens: slice | torch.Tensor  # which tokens of the step; int64 [rows] when rows > 1
    rows: int
    count: int
    blocks: torch.Tensor  # int64 [rows * columns]
    mask: torch.Tensor  # float32 [rows, 1, group * count, columns * block_tokens]; 0 or -inf


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of one window shares in a step."""

    calls: tuple[_Call, ...]


def plan_attention(
    batch: Batch, block_tokens: int, group: int, window: int | None
) -> AttentionPlan:
    """Chooses calls, blocks and masks. `group`: query heads per KV head."""
    starts = _row_starts(batch.counts_list)
    calls: list[_Call] = []
    decode: list[tuple[int, int, int]] = []  # (blocks in view, first block in view, row)
    for row, (count, length) in enumerate(zip(batch.counts_list, batch.lengths_list, strict=True)):
        oldest = 0 if window is None else max(0, length - count - window + 1)
        first = oldest // block_tokens
        num_blocks = -(-length // block_tokens) - first
        if count == 1:
            decode.append((num_blocks, first, row))
        else:
            calls.append(
                _plan_prefill(
                    batch, row, starts[row], first, num_blocks, block_tokens, group, window
                )
            )
    decode.sort()
    while decode:
        longest = decode[-1][0]
        members = [entry for entry in decode if entry[0] >= _MIN_FILL * longest]
        del decode[len(decode) - len(members) :]
        calls.append(_plan_decode(batch, members, starts, longest, block_tokens, group, window))
    return AttentionPlan(tuple(calls))


def paged_attention(
    query: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """query: [tokens, heads, head_dim], cache: [num_blocks, block_tokens, 2 * kv_heads, head_dim].

    Returns [tokens, heads * head_dim].
    """
    tokens, heads, head_dim = query.shape
    kv_heads = cache.shape[2] // 2
    out = query.new_empty(tokens, heads, head_dim)
    for call in plan.calls:
        kv = cache.index_select(0, call.blocks).view(call.rows, -1, 2 * kv_heads, head_dim)
        kv = kv.transpose(1, 2)  # [rows, 2 * kv_heads, context, head_dim]
        grouped = (
            query[call.tokens]
            .view(call.rows, call.count, kv_heads, -1, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(call.rows, kv_heads, -1, head_dim)
        )
        attended = functional.scaled_dot_product_attention(
            grouped, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=call.mask, scale=scale
        )
        out[call.tokens] = (
            attended.view(call.rows, kv_heads, -1, call.count, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(-1, heads, head_dim)
        )
    return out.flatten(1)


def _row_starts(counts: list[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _plan_prefill(
    batch: Batch,
    row: int,
    start: int,
    first: int,
    num_blocks: int,
    block_tokens: int,
    group: int,
    window: int | None,
) -> _Call:
    count = batch.counts_list[row]
    tokens = slice(start, start + count)
    context = torch.arange(num_blocks * block_tokens) + first * block_tokens
    mask = _mask(batch.positions[tokens, None], context[None, :], window)
    blocks = batch.block_tables[row, first : first + num_blocks]
    return _Call(tokens, 1, count, blocks, mask.repeat(group, 1)[None, None])


def _plan_decode(
    batch: Batch,
    members: list[tuple[int, int, int]],
    starts: list[int],
    num_blocks: int,
    block_tokens: int,
    group: int,
    window: int | None,
) -> _Call:
    rows = torch.tensor([row for _, _, row in members])
    first = torch.tensor([first for _, first, _ in members])
    tokens = torch.tensor([starts[row] for _, _, row in members])
    columns = first[:, None] + torch.arange(num_blocks)  # beyond a row's end: masked below
    columns_held = columns.clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[rows[:, None], columns_held]
    context = (columns[:, :, None] * block_tokens + torch.arange(block_tokens)).flatten(1)
    mask = _mask(batch.positions[tokens, None], context, window)
    mask = mask[:, None, None, :].expand(-1, 1, group, -1)
    return _Call(tokens, len(members), 1, blocks.flatten(), mask)


def _mask(positions: torch.Tensor, context: torch.Tensor, window: int | None) -> torch.Tensor:
    """positions: [n, 1] of queries, context: [.., m] of keys -> float32 [n, m]: 0 or -inf."""
    hidden = context > positions
    if window is not None:
        hidden |= context <= positions - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
