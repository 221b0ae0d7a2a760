"""Plans for the runner and the device, written down row by row, and the config of a tiny model.

The fixtures give functions. They live as long as the session, so that hypothesis may use them too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.step import SequenceStart, StepPlan
from deepinfer.types import SamplingParams

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def write_config() -> Callable[..., None]:
    """write_config(directory, **changes): the config.json of a tiny Llama."""

    def write(directory: Path, **changes: Any) -> None:
        (directory / "config.json").write_text(json.dumps(TINY_LLAMA | changes))

    return write


@pytest.fixture(scope="session")
def make_start() -> Callable[..., SequenceStart]:
    """make_start(slot, token_ids, ..., **params): greedy, unless `params` has a temperature."""

    def make(
        slot: int,
        token_ids: Sequence[int],
        prompt_tokens: int | None = None,
        seed: int = 0,
        stop_token_ids: Iterable[int] = (),
        **params: Any,
    ) -> SequenceStart:
        params.setdefault("temperature", 0.0)
        return SequenceStart(
            slot=slot,
            token_ids=np.array(token_ids, np.int32),
            prompt_tokens=prompt_tokens or len(token_ids),
            params=SamplingParams(**params),
            seed=seed,
            stop_token_ids=tuple(stop_token_ids),
        )

    return make


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., StepPlan]:
    """make_plan(number, rows, starts, table): one step.

    rows: (slot, first, count, samples); table: (slot, column, block).
    """

    def make(
        number: int,
        rows: Sequence[tuple[int, int, int, bool]],
        starts: Iterable[SequenceStart] = (),
        table: Sequence[tuple[int, int, int]] = (),
        write_from: Sequence[int] | None = None,
    ) -> StepPlan:
        slots, first, count, samples = zip(*rows, strict=True)
        changes = np.array(table, np.int32).reshape(-1, 3)
        return StepPlan(
            number=number,
            slots=np.array(slots, np.int32),
            first=np.array(first, np.int32),
            count=np.array(count, np.int32),
            samples=np.array(samples, np.bool_),
            write_from=np.array(first if write_from is None else write_from, np.int32),
            tail_start=np.zeros(len(rows), np.int32),
            num_tokens=sum(count),
            starts=tuple(starts),
            table_slots=changes[:, 0],
            table_columns=changes[:, 1],
            table_blocks=changes[:, 2],
        )

    return make
