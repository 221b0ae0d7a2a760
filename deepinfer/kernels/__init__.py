"""The arithmetic, one implementation per way of running: models ask here and name no device.

batch.py      the layout of a step's tokens
reference.py  every operation in plain torch
rotary.py     position angles
linear.py     matrix products with weights, and the choice between their formats
attention.py  paged attention for CPUs
invariant.py  row-wise work and attention whose bits do not depend on the batch
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations whose implementation depends on how a model runs.

    `by_rows(function, *tensors)` applies a function that treats the leading dimension row by row.
    `plan_attention(batch, block_tokens, group, window)` prepares a step once for all layers of a
    window, `paged_attention(query, cache, plan, scale)` runs it. All happen inside `threads()`.
    """

    by_rows: Callable[..., tuple[torch.Tensor, ...]]
    plan_attention: Callable[..., Any]
    paged_attention: Callable[..., torch.Tensor]
    threads: Callable[[], AbstractContextManager[None]]


def cpu_kernels(*, batch_invariant: bool) -> Kernels:
    """The plain-torch set: fast, or with bits that do not depend on the batch."""
    from contextlib import nullcontext

    from deepinfer.kernels import attention, invariant

    if batch_invariant:
        return Kernels(
            invariant.in_row_tiles,
            invariant.plan_attention,
            invariant.paged_attention,
            invariant.fixed_threads,
        )
    return Kernels(
        lambda function, *tensors: function(*tensors),
        attention.plan_attention,
        attention.paged_attention,
        nullcontext,
    )
