"""Every operation of a dense decoder in plain torch: the oracle, and most of the CPU path.

Shapes are in the docstrings, and each function computes rows independently of one another. The
faster attention of the CPU path stands in `attention.py`, matrix products in `linear.py`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from deepinfer.kernels.batch import Batch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., width], weight: [width] -> x / rms(x) * weight, row by row."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary_embedding(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim], cosine: [tokens, 1, head_dim], sine: [.., head_dim / 2] -> x'.

    The pair (x[i], x[i + head_dim/2]) is turned by the token's angle i.
    """
    half = x.shape[-1] // 2
    turned = x * cosine
    turned[..., :half].addcmul_(x[..., half:], sine, value=-1.0)
    turned[..., half:].addcmul_(x[..., :half], sine)
    return turned


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [tokens, 2 * hidden], gate first -> silu(gate) * up: [tokens, hidden]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def write_cache(
    cache: torch.Tensor, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Stores the KV of a step's tokens in place.

    cache: [num_blocks, block_tokens, 2 * kv_heads, head_dim], keys before values;
    places: [tokens] block * block_tokens + offset; key, value: [tokens, kv_heads, head_dim].
    """
    kv_heads = key.shape[1]
    flat = cache.view(-1, 2 * kv_heads, key.shape[2])
    flat[:, :kv_heads].index_copy_(0, places, key)
    flat[:, kv_heads:].index_copy_(0, places, value)


def paged_attention(
    query: torch.Tensor, cache: torch.Tensor, batch: Batch, scale: float, window: int | None
) -> torch.Tensor:
    """Softmax attention by its definition, one row of the batch after the other.

    query: [tokens, heads, head_dim], cache: as in `write_cache` -> [tokens, heads * head_dim].
    A token at position p sees positions max(0, p - window + 1) .. p of its own sequence.
    """
    kv_heads = cache.shape[2] // 2
    group = query.shape[1] // kv_heads
    out = torch.empty_like(query)
    start = 0
    for row, (count, length) in enumerate(zip(batch.counts_list, batch.lengths_list, strict=True)):
        kv = cache[batch.block_tables[row]].flatten(0, 1)[:length]
        key = kv[:, :kv_heads].repeat_interleave(group, dim=1)  # [length, heads, head_dim]
        value = kv[:, kv_heads:].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count], key) * scale
        hidden_from_query = torch.arange(length) > batch.positions[start : start + count, None]
        if window is not None:
            oldest = batch.positions[start : start + count, None] - window + 1
            hidden_from_query |= torch.arange(length) < oldest
        scores.masked_fill_(hidden_from_query, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
        out[start : start + count] = attended
        start += count
    return out.flatten(1)
