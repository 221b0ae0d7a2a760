"""The layout of one step's tokens, as the kernels need it: plain tensors, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` are the concatenated rows of a step; row r is tokens row_starts[r]:row_starts[r+1].

    The same numbers exist twice where host code needs them to choose shapes: `*_list` are Python
    lists on the host, so that no kernel launch has to read back from the device.
    """

    positions: torch.Tensor  # int64 [tokens] position of each token in its sequence
    slots: torch.Tensor  # int64 [rows] slot of each row's sequence
    row_starts: torch.Tensor  # int64 [rows + 1]
    lengths: torch.Tensor  # int64 [rows] first + count: tokens of context after this step
    block_tables: torch.Tensor  # int64 [rows, columns] block of each KV stretch; 0 beyond the end
    write_blocks: torch.Tensor  # int64 [tokens] block that receives each token's KV
    write_offsets: torch.Tensor  # int64 [tokens] position inside that block
    counts_list: list[int]  # [rows]
    lengths_list: list[int]  # [rows]

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])
