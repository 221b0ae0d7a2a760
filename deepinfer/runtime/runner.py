"""The runner: a StepPlan becomes tensors, a forward pass and sampled ids.

Owns everything the device remembers between steps, by slot: token ids, block tables and sampling
parameters. Sampled ids are appended to the token ids here, so the rows of the next step find them
although the host has not seen them yet: that is what lets the scheduler plan one step ahead.

    token_ids[slot]   0 ....... prompt ....... | sampled ....... | free ....... | margin
                      └── a row reads [first, first + count) ──┘└ sample writes first + count

Knows no requests, no threads and no event loop: a device calls `forward` and `sample` in turn.
A row whose sequence turned out to be finished, or whose earlier step failed, is computed like any
other and ignored by the scheduler; what it writes beyond `max_model_len` goes to the margin and
to the dummy block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels.batch import Batch
from deepinfer.models import Model
from deepinfer.runtime import sampler
from deepinfer.step import Int32Array, StepLogprobs, StepPlan, StepResult

Int64Array = NDArray[np.int64]


class Runner:
    """Runs the steps of one model on one cache. Arrays by slot have a fixed place for life."""

    def __init__(
        self, model: Model, cache: Any, num_blocks: int, num_slots: int, max_model_len: int
    ) -> None:
        self.model = model
        self.cache = cache
        self.cache_spec = model.cache_spec()
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        num_columns = -(-max_model_len // self.cache_spec.block_tokens)
        self._token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)  # one of margin
        self._block_tables = np.zeros((num_slots, num_columns), np.int64)
        self._sampling = sampler.SamplingState(num_slots)
        self._sampling_hidden: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Takes in starts and table changes, then computes the rows.

        The changes are in place even if the computation fails.
        """
        self._sampling_hidden = None
        self._apply_changes(plan)
        token_ids, batch = self.batch(plan)
        hidden = self.model.forward(token_ids, batch, self.cache)
        if plan.samples.any():
            last = batch.row_starts[1:] - 1
            self._sampling_hidden = hidden[last[torch.from_numpy(plan.samples)]]

    @torch.inference_mode()
    def sample(self, plan: StepPlan, mask: Any | None = None) -> StepResult:
        """Draws the tokens of the rows of the last `forward` and appends them to their sequences.

        mask: int32 [rows, ceil(vocab_size / 32)] of allowed ids, torch or numpy; `None`: all are.
        """
        token_ids = np.zeros((len(plan.slots), 1), np.int32)
        hidden, self._sampling_hidden = self._sampling_hidden, None
        logprobs = None
        if hidden is not None:
            rows = np.flatnonzero(plan.samples)
            slots = plan.slots[rows].astype(np.int64)
            positions = (plan.first[rows] + plan.count[rows]).astype(np.int64)
            if mask is not None:
                mask = torch.as_tensor(mask)[torch.from_numpy(rows)]
            chosen, logprobs = sampler.sample(
                self.model.logits(hidden), slots, positions, self._sampling, mask
            )
            self._token_ids[slots, np.minimum(positions, self.max_model_len)] = chosen
            token_ids[rows, 0] = chosen
        return StepResult(
            number=plan.number,
            token_ids=token_ids,
            num_tokens=plan.samples.astype(np.int32),
            logprobs=None if logprobs is None else _by_plan_row(logprobs, rows),
        )

    def batch(self, plan: StepPlan) -> tuple[torch.Tensor, Batch]:
        """The tokens of the step, int64 [tokens], and their layout, from what the slots hold."""
        block_tokens = self.cache_spec.block_tokens
        slots = plan.slots.astype(np.int64)
        first = plan.first.astype(np.int64)
        count = plan.count.astype(np.int64)
        row_starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(count, out=row_starts[1:])
        if row_starts[-1] == len(slots):  # every row has one token: the usual step
            token_slots, positions, write_from = slots, first, plan.write_from
        else:
            token_slots = np.repeat(slots, count)
            positions = np.arange(row_starts[-1]) + np.repeat(first - row_starts[:-1], count)
            write_from = np.repeat(plan.write_from, count)
        dropped = (positions < write_from) | (positions >= self.max_model_len)
        positions = np.minimum(positions, self.max_model_len - 1)
        lengths = np.minimum(first + count, self.max_model_len)
        columns = positions // block_tokens
        write_blocks = np.where(dropped, 0, self._block_tables[token_slots, columns])
        num_columns = -(-int(lengths.max()) // block_tokens)
        token_ids = self._token_ids[token_slots, positions].astype(np.int64)
        return torch.from_numpy(token_ids), Batch(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            row_starts=torch.from_numpy(row_starts),
            lengths=torch.from_numpy(lengths),
            block_tables=torch.from_numpy(self._block_tables[slots, :num_columns]),
            write_blocks=torch.from_numpy(write_blocks),
            write_offsets=torch.from_numpy(positions - columns * block_tokens),
            counts_list=count.tolist(),
            lengths_list=lengths.tolist(),
        )

    def known_token_ids(self, slot: int, num_tokens: int) -> Int32Array:
        """A copy of the first `num_tokens` ids in `slot`, sampled ones included."""
        return self._token_ids[slot, :num_tokens].copy()

    def _apply_changes(self, plan: StepPlan) -> None:
        """Starts, which empty the slot's block table, then table entries in their order."""
        for start in plan.starts:
            num_known = len(start.token_ids)
            if num_known > self.max_model_len:
                raise ValueError(
                    f"slot {start.slot} starts with {num_known} token ids, but the buffers were "
                    f"sized for max_model_len = {self.max_model_len}"
                )
            self._token_ids[start.slot, :num_known] = start.token_ids
            self._block_tables[start.slot] = 0
            self._sampling.load(start)
        self._block_tables[plan.table_slots, plan.table_columns] = plan.table_blocks


def _by_plan_row(logprobs: sampler.Logprobs, rows: Int64Array) -> StepLogprobs:
    """The sampler counts sampling rows, the plan all rows; one token a row, so width is 1."""
    return StepLogprobs(
        rows=rows[logprobs.rows].astype(np.int32),
        chosen=logprobs.chosen[:, None],
        top_token_ids=logprobs.top_token_ids[:, None].astype(np.int32),
        top=logprobs.top[:, None],
    )
