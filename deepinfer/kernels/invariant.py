"""Batch-invariant arithmetic: a token's bits do not depend on what else shares its step.

Libraries choose kernels, and with them the order of a sum, by the shape of a call; so here every
call has a shape that the batch cannot change.

* Row-wise work (`in_row_tiles`) runs on tiles of exactly `ROW_TILE` tokens, the last one padded.
* Attention is one operation for prompts and single tokens alike. Queries are cut into tiles at
  multiples of `QUERY_TILE` positions and keys at multiples of `KEY_TILE` positions of their own
  sequence, so that a token always takes the same place in products of the same shape:

        position     0       64      128     192
        keys         ├─tile 0─┼─tile 1─┼─tile 2─┤     products of every tile pair are independent
        queries                    ├─┤                4 positions × the heads of a group

  The tiles of one query are then combined from left to right. Tiles that it may not see count
  with weight exactly 0, so how many of them there are does not matter, nor where blocks lie.
* `fixed_threads` keeps the number of threads a divisor of the tile: a thread's share of an
  element-wise operation then ends between rows, never inside one (where vector code would give
  way to scalar code, which rounds differently).

What stays an assumption, tests check: a product of a fixed shape treats its rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer.kernels.batch import Batch

ROW_TILE = 8
QUERY_TILE = 4
KEY_TILE = 64
# Weight of a hidden position: far below every real score, yet finite, so that a tile with nothing
# to see yields zeros instead of NaN.
_HIDDEN = -1.0e30
# Gathered keys and values of one call, in positions: bounds the memory that a long prompt takes.
_MAX_GATHERED = 32768

RowFunction = Callable[..., tuple[torch.Tensor, ...]]


@contextmanager
def fixed_threads() -> Iterator[None]:
    """Runs the body with 1, 2, 4 or 8 threads: the most that were allowed and divide ROW_TILE."""
    allowed = torch.get_num_threads()
    fixed = min(ROW_TILE, 1 << (allowed.bit_length() - 1))
    if fixed == allowed:
        yield
        return
    torch.set_num_threads(fixed)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)


def in_row_tiles(function: RowFunction, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Applies a row-wise function to tiles of ROW_TILE rows. All tensors: [tokens, ...]."""
    rows = inputs[0].shape[0]
    padding = -rows % ROW_TILE
    if padding:
        inputs = tuple(torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in inputs)
    tiles = [
        function(*(x[start : start + ROW_TILE] for x in inputs))
        for start in range(0, rows, ROW_TILE)
    ]
    return tuple(torch.cat(parts)[:rows] for parts in zip(*tiles, strict=True))


@dataclass(frozen=True, slots=True)
class _Call:
    """Query tiles that see the same number of key tiles, computed together.

    `items` query tiles of QUERY_TILE places each; `num_tiles` key tiles for each of them.
    """

    num_tiles: int
    queries: torch.Tensor  # int64 [items * QUERY_TILE] token in each place; `tokens` if empty
    places: torch.Tensor  # int64 [items, num_tiles, 1, KEY_TILE] where the cache has the KV
    bias: torch.Tensor  # float32 [items, num_tiles, 1, 1, QUERY_TILE, KEY_TILE]: 0 or _HIDDEN


@dataclass(frozen=True, slots=True)
class InvariantPlan:
    """What every layer of one window shares in a step."""

    calls: tuple[_Call, ...]


def plan_attention(
    batch: Batch, block_tokens: int, group: int, window: int | None
) -> InvariantPlan:
    """Cuts every row into query tiles and groups those with equally many key tiles."""
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    start = 0
    for row, (count, length) in enumerate(zip(batch.counts_list, batch.lengths_list, strict=True)):
        first = length - count
        for tile in range(first // QUERY_TILE, (length - 1) // QUERY_TILE + 1):
            begin = tile * QUERY_TILE
            oldest = 0 if window is None else max(0, begin - window + 1) // KEY_TILE
            num_tiles = (min(begin + QUERY_TILE, length) - 1) // KEY_TILE + 1 - oldest
            entry = (row, begin, oldest, start - first)
            by_size.setdefault(num_tiles, []).append(entry)
        start += count
    calls = []
    for num_tiles, entries in sorted(by_size.items()):
        limit = max(1, _MAX_GATHERED // (num_tiles * KEY_TILE))
        for at in range(0, len(entries), limit):
            part = torch.tensor(entries[at : at + limit])
            calls.append(_plan_call(batch, block_tokens, window, num_tiles, part))
    return InvariantPlan(tuple(calls))


def _plan_call(
    batch: Batch, block_tokens: int, window: int | None, num_tiles: int, entries: torch.Tensor
) -> _Call:
    """entries: int64 [items, 4]: row, first position, first key tile, token minus position."""
    row, begin, oldest, shift = entries.unbind(1)
    positions = begin[:, None] + torch.arange(QUERY_TILE)  # [items, QUERY_TILE]
    lengths = batch.lengths[row, None]
    counts = (batch.row_starts[1:] - batch.row_starts[:-1])[row, None]
    present = (positions < lengths) & (positions >= lengths - counts)
    queries = torch.where(present, positions + shift[:, None], batch.num_tokens)

    context = oldest[:, None] * KEY_TILE + torch.arange(num_tiles * KEY_TILE)  # [items, keys]
    column = (context // block_tokens).clamp(max=batch.block_tables.shape[1] - 1)
    blocks = batch.block_tables[row[:, None], column]
    places = blocks * block_tokens + context % block_tokens
    hidden = context[:, None, :] > positions[:, :, None]
    if window is not None:
        hidden |= context[:, None, :] <= positions[:, :, None] - window
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, _HIDDEN)
    bias = bias.view(-1, QUERY_TILE, num_tiles, KEY_TILE).transpose(1, 2)
    return _Call(
        num_tiles,
        queries.flatten(),
        places.view(-1, num_tiles, 1, KEY_TILE),
        bias.contiguous()[:, :, None, None],
    )


def paged_attention(
    query: torch.Tensor, cache: torch.Tensor, plan: InvariantPlan, scale: float
) -> torch.Tensor:
    """query: [tokens, heads, head_dim], cache: [num_blocks, block_tokens, 2 * kv_heads, head_dim].

    Returns [tokens, heads * head_dim].
    """
    tokens = query.shape[0]
    padded = functional.pad(query * scale, (0, 0, 0, 0, 0, 1))  # one more: places without a token
    out = torch.empty_like(padded)
    for call in plan.calls:
        out[call.queries] = _attend(padded[call.queries], cache, call)
    return out[:tokens].flatten(1)


def _attend(query: torch.Tensor, cache: torch.Tensor, call: _Call) -> torch.Tensor:
    """query: [items * QUERY_TILE, heads, head_dim] -> the same shape."""
    heads, head_dim = query.shape[1:]
    kv_heads = cache.shape[2] // 2
    group, num_tiles = heads // kv_heads, call.num_tiles
    flat = cache.view(-1, head_dim)
    head = torch.arange(kv_heads).view(-1, 1)
    index = call.places * (2 * kv_heads) + head  # [items, num_tiles, kv_heads, KEY_TILE]
    key = flat.index_select(0, index.flatten()).view(-1, KEY_TILE, head_dim)
    value = flat.index_select(0, index.add_(kv_heads).flatten()).view(-1, KEY_TILE, head_dim)

    grouped = query.view(-1, 1, QUERY_TILE, kv_heads, group, head_dim).permute(0, 1, 3, 4, 2, 5)
    grouped = grouped.expand(-1, num_tiles, -1, -1, -1, -1).reshape(
        -1, group * QUERY_TILE, head_dim
    )  # [items * num_tiles * kv_heads, group * QUERY_TILE, head_dim]
    scores = torch.bmm(grouped, key.transpose(1, 2))
    scores = scores.view(-1, num_tiles, kv_heads, group, QUERY_TILE, KEY_TILE).add_(call.bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    partial = torch.bmm(weights.view(-1, group * QUERY_TILE, KEY_TILE), value)
    partial = partial.view(*scores.shape[:-1], head_dim)

    attended = _combine(peak, total, partial)  # [items, kv_heads, group, QUERY_TILE, head_dim]
    return attended.permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)


def _combine(peak: torch.Tensor, total: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
    """Adds up the key tiles (dimension 1) from left to right, each rescaled to the common peak."""
    scale = (peak - peak.amax(dim=1, keepdim=True)).exp_()
    total, partial = total * scale, partial * scale
    total_sum, partial_sum = total[:, 0], partial[:, 0]
    for tile in range(1, partial.shape[1]):
        total_sum = total_sum + total[:, tile]
        partial_sum = partial_sum + partial[:, tile]
    return partial_sum / total_sum
