"""A miniature runner: pages sequences through a model with shuffled blocks and any chunk splits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from deepinfer.kernels.batch import Batch
from deepinfer.models import Model


@dataclass
class Sequence:
    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    dtype: str = "float32"
    batch_invariant: bool = False
    block_tokens: int = 4


class PagedDriver:
    """Owns block ids and the cache of one model; each `step` runs the rows it is given."""

    def __init__(self, model: Model, num_blocks: int = 256, seed: int = 0) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.free = list(range(1, num_blocks))
        self.random.shuffle(self.free)
        self.block_tokens = model.cache_spec().block_tokens
        self.cache = model.allocate_cache(num_blocks, 1)

    def step(self, rows: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Computes `count` more tokens of each sequence -> logits [count, vocab] of each."""
        for sequence, count in rows:
            assert 1 <= count <= len(sequence.token_ids) - sequence.computed
            while len(sequence.blocks) * self.block_tokens < sequence.computed + count:
                sequence.blocks.append(self.free.pop())
        token_ids = [t for s, count in rows for t in s.token_ids[s.computed : s.computed + count]]
        hidden = self.model.forward(torch.tensor(token_ids), self._batch(rows), self.cache)
        for sequence, count in rows:
            sequence.computed += count
        return list(self.model.logits(hidden).split([count for _, count in rows]))

    def finish(self, sequences: list[Sequence], max_chunk: int = 7) -> list[torch.Tensor]:
        """Closes every gap in steps of random chunks and random company -> all new logits."""
        parts: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(sequences))}
        while True:
            open_ = [i for i, s in enumerate(sequences) if s.computed < len(s.token_ids)]
            if not open_:
                return [torch.cat(parts[index]) for index in range(len(sequences))]
            chosen = self.random.sample(open_, self.random.randint(1, len(open_)))
            rows = []
            for index in chosen:
                gap = len(sequences[index].token_ids) - sequences[index].computed
                rows.append((sequences[index], self.random.randint(1, min(gap, max_chunk))))
            for index, logits in zip(chosen, self.step(rows), strict=True):
                parts[index].append(logits)

    def _batch(self, rows: list[tuple[Sequence, int]]) -> Batch:
        positions = [p for s, count in rows for p in range(s.computed, s.computed + count)]
        counts = [count for _, count in rows]
        lengths = [s.computed + count for s, count in rows]
        columns = max(len(s.blocks) for s, _ in rows) + self.random.randint(0, 2)
        tables = [s.blocks + [0] * (columns - len(s.blocks)) for s, _ in rows]
        write_blocks = [
            s.blocks[p // self.block_tokens]
            for s, count in rows
            for p in range(s.computed, s.computed + count)
        ]
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        return Batch(
            positions=torch.tensor(positions),
            slots=torch.zeros(len(rows), dtype=torch.int64),
            row_starts=torch.tensor(starts),
            lengths=torch.tensor(lengths),
            block_tables=torch.tensor(tables),
            write_blocks=torch.tensor(write_blocks),
            write_offsets=torch.tensor(positions) % self.block_tokens,
            counts_list=counts,
            lengths_list=lengths,
        )


class Paging:
    """What tests need from this file, in one fixture (test modules cannot import one another)."""

    Driver = PagedDriver
    Options = Options

    @staticmethod
    def sequence(token_ids: Any) -> Sequence:
        return Sequence(list(token_ids))


@pytest.fixture
def paging() -> type[Paging]:
    return Paging
