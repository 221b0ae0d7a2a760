"""How late the event loop gets while the device is busy with a long prompt.

A server's other connections live on the same event loop. A heart beats every few milliseconds while
a prompt of `--prompt-tokens` is prefilled beside sequences that decode; each beat's lateness is the
delay that any other callback would have seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.types import SamplingParams

BEAT_S = 0.005


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="deepinfer bench lag", description=__doc__)
    parser.add_argument("--model", default="", help="GGUF file or directory; default: embedded")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--decoding", type=int, default=4, help="sequences that decode beside it")
    parsed = parser.parse_args(arguments)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(_measure(parsed))
    print(json.dumps(document))
    return 0


async def _measure(parsed: Any) -> dict[str, Any]:
    from deepinfer.engine import Engine

    random = np.random.default_rng(0)
    async with Engine(EngineConfig(model=parsed.model)) as engine:

        async def consume(num_tokens: int, params: SamplingParams) -> None:
            async for _ in engine.generate(
                random.integers(100, 40_000, num_tokens).tolist(), params
            ):
                pass

        long = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
        short = SamplingParams(temperature=0.0, max_tokens=1)
        await consume(64, short)  # warm-up
        idle = await _beats_during(asyncio.sleep(1.0))
        others = [asyncio.create_task(consume(32, long)) for _ in range(parsed.decoding)]
        await asyncio.sleep(0.5)
        begin = time.perf_counter()
        busy = await _beats_during(consume(parsed.prompt_tokens, short))
        spent_s = time.perf_counter() - begin
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    print(
        f"Event loop delay while {parsed.prompt_tokens} tokens are prefilled beside "
        f"{parsed.decoding} decoding sequences ({spent_s:.1f} s)\n"
    )
    print(f"{'':<8}{'beats':>8}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    rows = {"idle": idle, "busy": busy}
    for name, late in rows.items():
        print(f"{name:<8}{len(late):>8}" + "".join(f"{value:>10.2f}" for value in _summary(late)))
    return {
        "benchmark": "lag",
        "prompt_tokens": parsed.prompt_tokens,
        "decoding": parsed.decoding,
        "seconds": spent_s,
    } | {
        name: dict(zip(("p50_ms", "p99_ms", "max_ms"), _summary(late), strict=True))
        for name, late in rows.items()
    }


def _summary(late: list[float]) -> tuple[float, float, float]:
    p50, p99, most = np.percentile(late, [50, 99, 100]) * 1000
    return float(p50), float(p99), float(most)


async def _beats_during(work: Any) -> list[float]:
    """Seconds by which each beat was late while `work` ran."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            due = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            late.append(max(0.0, time.perf_counter() - due))

    heart = asyncio.create_task(beat())
    try:
        await work
    finally:
        heart.cancel()
        await asyncio.gather(heart, return_exceptions=True)
    return late
