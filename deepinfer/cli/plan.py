"""`deepinfer plan`: what fits in this machine's memory, and why, before anything is loaded.

It reads the checkpoint's headers and calls the same plan that `serve` will follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from deepinfer.cli import flags

if TYPE_CHECKING:
    from deepinfer.runtime.build import DevicePlan

_SHORTEST_TOKENS = 512


def parser() -> argparse.ArgumentParser:
    result = flags.command_parser(
        "plan", "Say what fits in memory and why, before loading anything.", positional="[MODEL]"
    )
    flags.add_model_argument(result)
    result.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_engine_flags(result)
    flags.add_log_flags(result, level="warning")
    return result


def main(arguments: Sequence[str]) -> int:
    parsed = flags.parse_and_configure_logging(parser(), arguments)
    config = flags.engine_config(parsed, parsed.model)
    from deepinfer.runtime.build import plan_device

    plan = plan_device(config)
    if parsed.json:
        fields = {
            "model": plan.checkpoint.name,
            "num_parameters": plan.checkpoint.num_parameters,
            "sequences_by_tokens": {
                str(tokens): count for tokens, count in _sequences(plan, config.block_tokens)
            },
            **msgspec.to_builtins(plan.memory),
        }
        print(msgspec.json.encode(fields).decode())
    else:
        print(_text(plan, config.block_tokens, config.max_num_seqs))
    return 0


def _text(plan: DevicePlan, block_tokens: int, max_num_seqs: int) -> str:
    lines = [plan.checkpoint.describe(), *plan.memory.reasons, ""]
    lines.append("tokens of a sequence   sequences that fit at once")
    for tokens, count in _sequences(plan, block_tokens):
        limited = f" (max_num_seqs runs {max_num_seqs})" if count > max_num_seqs else ""
        lines.append(f"{tokens:>20,}   {count:,}{limited}")
    return "\n".join(lines)


def _sequences(plan: DevicePlan, block_tokens: int) -> list[tuple[int, int]]:
    """(length, how many of that length the KV cache holds), doubling up to the longest."""
    most = plan.memory.max_model_len
    lengths = [most]
    while lengths[-1] >= 2 * _SHORTEST_TOKENS:
        lengths.append(lengths[-1] // 2)
    usable = plan.memory.num_blocks - 1  # block 0 is the one that padding writes to
    return [(tokens, usable // -(-tokens // block_tokens)) for tokens in reversed(lengths)]
