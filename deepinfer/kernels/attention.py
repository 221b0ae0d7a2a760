"""Paged attention for CPUs: gathers each row's blocks and calls torch's fused attention.

A step is planned once (`plan_attention`: which blocks, which mask) and the plan serves all layers
of the same window. Rows that compute one token are batched by similar length; rows that compute
more run one stretch of queries at a time. The query heads that share a KV head become query rows,
so that keys and values are never repeated.

        decode rows, sorted by length          prefill rows
        ├─ call A ─┤├── call B ──┤             a call per stretch of queries, each with
        padded to the longest of the call      the context that its last query sees

A call's gathered blocks should stay in the cores' caches until they are multiplied: that bounds
the rows of a call, and all calls share one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer.kernels.batch import Batch

# Rows share a call while the shortest has at least this share of the longest one's blocks.
_MIN_FILL = 0.75
# Positions gathered at once for decode rows, per thread: about the size of a core's own cache.
_GATHERED_POSITIONS = 2048
# Queries of a prefill row in one call. Smaller stretches skip more of what causality hides, larger
# ones gather less often.
_STRETCH = 128


@dataclass(frozen=True, slots=True)
class _Call:
    """One fused attention call: `rows` sequences of `count` query tokens each."""

    tokens: slice | torch.Tensor  # which tokens of the step; a tensor has int64 [rows]
    rows: int
    count: int
    blocks: torch.Tensor  # int64 [rows * columns]
    mask: torch.Tensor  # float32 [rows, 1, group * count, columns * block_tokens]; 0 or -inf


class AttentionPlan:
    """What every layer of one window shares in a step."""

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls
        self._most_blocks = max((call.blocks.shape[0] for call in calls), default=0)
        self._gathered: torch.Tensor | None = None

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """cache: [num_blocks, ...] -> [len(blocks), ...], valid until the next call."""
        if self._gathered is None:
            self._gathered = cache.new_empty(self._most_blocks, *cache.shape[1:])
        return torch.index_select(cache, 0, blocks, out=self._gathered[: blocks.shape[0]])


def plan_attention(
    batch: Batch, block_tokens: int, group: int, window: int | None
) -> AttentionPlan:
    """Chooses calls, blocks and masks. `group`: query heads per KV head."""
    planner = _Planner(batch, block_tokens, group, window)
    calls: list[_Call] = []
    decode: list[_Span] = []
    start = 0
    for row, (count, length) in enumerate(zip(batch.counts_list, batch.lengths_list, strict=True)):
        for begin in range(0, count, _STRETCH):
            taken = min(_STRETCH, count - begin)
            span = planner.span(row, start + begin, taken, length - count + begin + taken)
            if count == 1:
                decode.append(span)
            else:
                calls.append(planner.prefill_call(span))
        start += count
    threads = torch.get_num_threads()
    decode.sort(key=lambda span: span.num_blocks, reverse=True)
    while decode:
        longest = decode[0].num_blocks
        limit = max(threads, threads * _GATHERED_POSITIONS // (longest * block_tokens))
        members = [span for span in decode[:limit] if span.num_blocks >= _MIN_FILL * longest]
        del decode[: len(members)]
        calls.append(planner.decode_call(members))
    return AttentionPlan(calls)


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
        kv = plan.gather(cache, call.blocks).view(call.rows, -1, 2 * kv_heads, head_dim)
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


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive queries of one row and the blocks that any of them sees."""

    row: int
    start: int  # first token, within the step
    count: int
    first_block: int  # column of the block table
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Planner:
    """The parts of a step that all its calls refer to."""

    batch: Batch
    block_tokens: int
    group: int
    window: int | None

    def span(self, row: int, start: int, count: int, length: int) -> _Span:
        """`length`: tokens of context that the last query sees, itself included."""
        oldest = 0 if self.window is None else max(0, length - count - self.window + 1)
        first = oldest // self.block_tokens
        return _Span(row, start, count, first, -(-length // self.block_tokens) - first)

    def prefill_call(self, span: _Span) -> _Call:
        tokens = slice(span.start, span.start + span.count)
        first, end = span.first_block, span.first_block + span.num_blocks
        context = torch.arange(first * self.block_tokens, end * self.block_tokens)
        mask = self._mask(self.batch.positions[tokens, None], context[None, :])
        blocks = self.batch.block_tables[span.row, first:end]
        return _Call(tokens, 1, span.count, blocks, mask.repeat(self.group, 1)[None, None])

    def decode_call(self, spans: list[_Span]) -> _Call:
        table, num_blocks = self.batch.block_tables, max(span.num_blocks for span in spans)
        tokens = torch.tensor([span.start for span in spans])
        rows = torch.tensor([span.row for span in spans])
        first = torch.tensor([span.first_block for span in spans])
        columns = first[:, None] + torch.arange(num_blocks)
        # Columns beyond a row's own blocks are masked below; any block will do.
        blocks = table[rows[:, None], columns.clamp(max=table.shape[1] - 1)]
        offsets = torch.arange(self.block_tokens)
        context = (columns[:, :, None] * self.block_tokens + offsets).flatten(1)
        mask = self._mask(self.batch.positions[tokens, None], context)
        mask = mask[:, None, None, :].expand(-1, 1, self.group, -1)
        return _Call(tokens, len(spans), 1, blocks.flatten(), mask)

    def _mask(self, positions: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """positions: [n, 1] of queries, context: [.., m] of keys -> float32 [n, m]: 0 or -inf."""
        hidden = context > positions
        if self.window is not None:
            hidden |= context <= positions - self.window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
