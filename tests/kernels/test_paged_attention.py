"""Both paged attentions against softmax by its definition, over random mixes of rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kernels import attention, cpu_kernels, reference
from deepinfer.kernels.batch import Batch


@dataclass(frozen=True)
class Case:
    rows: list[tuple[int, int]]  # (tokens computed before, tokens in this step)
    block_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    window: int | None
    seed: int


row = st.tuples(st.integers(0, 150), st.just(1)) | st.tuples(st.integers(0, 80), st.integers(1, 40))
cases = st.builds(
    Case,
    rows=st.lists(row, min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 4, 16, 32, 48]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64]),
    window=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**16),
)


def make_batch(case: Case, generator: torch.Generator) -> tuple[Batch, int]:
    """-> (batch with shuffled block ids, number of blocks)."""
    lengths = [before + count for before, count in case.rows]
    needed = [-(-length // case.block_tokens) for length in lengths]
    num_blocks = sum(needed) + 1
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).split(needed)
    tables = torch.zeros(len(case.rows), max(needed), dtype=torch.int64)
    for index, blocks in enumerate(ids):
        tables[index, : len(blocks)] = blocks
    counts = [count for _, count in case.rows]
    positions = torch.cat([torch.arange(before, before + n) for before, n in case.rows])
    row_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    batch = Batch(
        positions=positions,
        slots=torch.arange(len(counts)),
        row_starts=torch.tensor([0, *counts]).cumsum(0),
        lengths=torch.tensor(lengths),
        block_tables=tables,
        write_blocks=tables[row_of, positions // case.block_tokens],
        write_offsets=positions % case.block_tokens,
        counts_list=counts,
        lengths_list=lengths,
    )
    return batch, num_blocks


def direct(case: Case, query: torch.Tensor, kv: list[torch.Tensor], scale: float) -> torch.Tensor:
    """One query and one head at a time, on contiguous keys: kv[row]: [2 * kv_heads, length, d]."""
    out = []
    token = 0
    for index, (before, count) in enumerate(case.rows):
        for position in range(before, before + count):
            oldest = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.kv_heads * case.group):
                keys = kv[index][head // case.group, oldest : position + 1]
                values = kv[index][case.kv_heads + head // case.group, oldest : position + 1]
                weights = ((keys @ query[token, head]) * scale).exp()
                out.append((weights / weights.sum()) @ values)
            token += 1
    return torch.stack(out).view(token, -1)


def arrange(case: Case) -> tuple[Batch, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """-> (batch, query, cache with every row's KV written through `write_cache`, the same KV)."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, num_blocks = make_batch(case, generator)
    query = torch.randn(
        batch.num_tokens, case.kv_heads * case.group, case.head_dim, generator=generator
    )
    cache = torch.full(
        (num_blocks, case.block_tokens, 2 * case.kv_heads, case.head_dim), 1e3
    )  # what is not written is large, so that reading it shows
    kv = []
    for index, (before, count) in enumerate(case.rows):
        length = before + count
        whole = torch.randn(2 * case.kv_heads, length, case.head_dim, generator=generator)
        at = torch.arange(length)
        places = batch.block_tables[index, at // case.block_tokens] * case.block_tokens
        tokens = whole.transpose(0, 1)
        reference.write_cache(
            cache,
            places + at % case.block_tokens,
            tokens[:, : case.kv_heads],
            tokens[:, case.kv_heads :],
        )
        kv.append(whole)
    return batch, query, cache, kv


@pytest.mark.parametrize("kind", ["oracle", "fast", "invariant"])
@given(case=cases)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_paged_attention_is_softmax_attention(kind: str, case: Case) -> None:
    batch, query, cache, kv = arrange(case)
    scale = case.head_dim**-0.5
    if kind == "oracle":
        out = reference.paged_attention(query, cache, batch, scale, case.window)
    else:
        kernels = cpu_kernels(batch_invariant=kind == "invariant")
        plan = kernels.plan_attention(batch, case.block_tokens, case.group, case.window)
        out = kernels.paged_attention(query, cache, plan, scale)
    torch.testing.assert_close(out, direct(case, query, kv, scale), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["fast", "invariant"])
def test_long_rows_span_several_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of a long prompt, and more decode rows than one call takes."""
    case = Case([(0, 300), (100, 150), *[(n, 1) for n in range(900, 980, 8)]], 16, 1, 2, 8, None, 3)
    batch, query, cache, _ = arrange(case)
    kernels = cpu_kernels(batch_invariant=kind == "invariant")
    plan = kernels.plan_attention(batch, case.block_tokens, case.group, case.window)
    assert len(plan.calls) > 5
    out = kernels.paged_attention(query, cache, plan, 0.3)
    expected = reference.paged_attention(query, cache, batch, 0.3, case.window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_a_window_gathers_only_the_blocks_it_sees() -> None:
    case = Case([(900, 1), (500, 8)], 16, 1, 1, 8, 20, 0)
    batch, *_ = arrange(case)
    plan = attention.plan_attention(batch, case.block_tokens, 1, case.window)
    assert sorted(call.blocks.numel() for call in plan.calls) == [2, 2]


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    case = Case([(2000, 1), *[(40, 1)] * 10], 32, 1, 1, 8, None, 0)
    batch, *_ = arrange(case)
    plan = attention.plan_attention(batch, case.block_tokens, 1, None)
    assert sum(call.blocks.numel() for call in plan.calls) == 63 + 10 * 2
