"""The contract between the scheduler, which plans steps, and a device, which runs them.

Both sides import this file and neither imports the other: the scheduler knows no tensor, the
runtime knows no request. Everything that crosses is a frozen struct of numpy arrays.

Vocabulary: a *slot* is a place for one running sequence (its token ids, block table, sampling
parameters and per-sequence state live there on the device); a *row* is one sequence's share of one
step; a *block* holds the KV of `block_tokens` consecutive positions.

    row r of a plan computes positions [first[r], first[r] + count[r]) of slots[r]:

        0          first            first+count          known
        ├──computed──┼──── this row ────┼──── later ────────┤
                                        └─ samples[r] is True iff the row reaches `known`
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.types import SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
Float32Array = NDArray[np.float32]


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a model tells the scheduler about its cache."""

    block_tokens: int  # positions per block
    block_bytes: int  # bytes of one block, over all layers
    state_bytes: int = 0  # bytes of per-sequence state beside the blocks (a slot's rings)
    rollback_margin_tokens: int = 0  # positions a sequence may be set back without recomputing
    replay_tokens: int = 0  # rows that rebuild per-sequence state after a prefix hit
    hit_alignment_tokens: int = 1  # a prefix hit's length is a multiple of this


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a slot: what the device must load before it runs the step's rows."""

    slot: int
    token_ids: Int32Array  # [known] prompt, and output so far when it resumes
    prompt_tokens: int
    params: SamplingParams
    seed: int  # of the random stream, keyed further by position and purpose
    stop_token_ids: tuple[int, ...]  # masked until min_tokens are out


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the device, as data. Arrays have one entry a row unless said otherwise."""

    number: int
    slots: Int32Array  # [rows]
    first: Int32Array  # [rows] first position to compute
    count: Int32Array  # [rows] number of positions to compute, >= 1
    samples: BoolArray  # [rows] draw a token after the last position
    write_from: Int32Array  # [rows] positions before it only rebuild state, their KV stands already
    tail_start: Int32Array  # [rows] positions before it skip the decoder half (0: none do)
    num_tokens: int  # sum of count
    starts: tuple[SequenceStart, ...] = ()
    # Changes to the block tables since the last plan, to be applied in order before the step:
    table_slots: Int32Array  # [changes]
    table_columns: Int32Array  # [changes]
    table_blocks: Int32Array  # [changes]


class StepLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Raw log-probabilities, for the rows of `rows` only (indices into the plan's rows)."""

    rows: Int32Array  # [wanted]
    chosen: Float32Array  # [wanted, width]
    top_token_ids: Int32Array  # [wanted, width, k]
    top: Float32Array  # [wanted, width, k], best first


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced. Row r holds `num_tokens[r]` new token ids, left-aligned."""

    number: int
    token_ids: Int32Array  # [rows, width]
    num_tokens: Int32Array  # [rows]; 0 where the row did not sample
    logprobs: StepLogprobs | None = None
    device_s: float = 0.0  # time the device was busy with this step


class Device(Protocol):
    """Runs plans in the order given. `forward` and `sample` only enqueue and return at once.

    For each step the caller calls `forward(plan)`, then `sample(plan)`, and awaits `collect()`.
    Step n + 1 may be enqueued before step n was collected, and takes the ids that step n samples
    from the device's own memory. `collect` gives results oldest first and raises `DeviceError` if
    that step failed; the device stays usable for later steps.
    """

    cache_spec: CacheSpec
    num_blocks: (
        int  # usable block ids are 1 .. num_blocks - 1; 0 is the dummy that padding writes to
    )
    num_slots: int

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, plan: StepPlan, mask: Any | None = None) -> None: ...

    async def collect(self) -> StepResult: ...

    async def close(self) -> None: ...
