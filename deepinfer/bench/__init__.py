"""`deepinfer bench`: measuring programs. Each prints a table, then a JSON document as last line.

scheduler   host cost of planning and committing a step, with a device that costs nothing
engine      throughput and latency of a model on this machine, beside transformers' generate
lag         how late the event loop gets while a long prompt is processed
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

_PROGRAMS = {
    "scheduler": "host cost of a step, without a device",
    "engine": "throughput and latency of a model, beside transformers",
    "lag": "delay of the event loop while a long prompt is processed",
}


def main(arguments: Sequence[str] | None = None) -> int:
    lines = "\n".join(f"  {name:<10} {text}" for name, text in _PROGRAMS.items())
    parser = argparse.ArgumentParser(
        prog="deepinfer bench",
        usage="deepinfer bench [PROGRAM] ...",
        epilog=f"programs:\n{lines}\n\nWithout one, all of them run, one after the other.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="?", choices=list(_PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    programs = [parsed.program] if parsed.program else list(_PROGRAMS)
    codes = [
        importlib.import_module(f"deepinfer.bench.{program}").main(parsed.arguments)
        for program in programs
    ]
    return int(max(codes))
