"""Throughput and latency of a model on this machine, beside transformers in the same run.

Closed loop: at concurrency C, C requests of `--input-tokens` random ids each start together and
answer `--output-tokens`; the next round starts when all are done. transformers' `generate` gets the
same ids as one batch. Rounds of the systems alternate, so that all see the same machine, and each
system lives in a process of its own, so that their threads do not get in each other's way.

    output tokens/s   all output tokens / wall time of the round
    TTFT              submission to a request's first token; the mean over requests and rounds
    TPOT              time between a request's tokens after its first; the mean likewise
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.errors import EngineError
from deepinfer.types import SamplingParams

Prompts = list[list[int]]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one system."""

    system: str
    concurrency: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    cpu_s: float  # of the whole process, all threads


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="deepinfer bench engine", description=__doc__)
    parser.add_argument("--model", default="", help="GGUF file or directory; default: embedded")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="measured one after the other")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--transformers",
        nargs="*",
        default=["float32"],
        metavar="DTYPE",
        help="dtypes to measure transformers in; none: leave it out",
    )
    parsed = parser.parse_args(arguments)
    names = [f"deepinfer {dtype}" for dtype in parsed.dtype]
    names += [f"transformers {dtype}" for dtype in parsed.transformers]
    with contextlib.ExitStack() as stack:
        rounds = _measure([stack.enter_context(_System(name, parsed)) for name in names], parsed)
    document = {
        "benchmark": "engine",
        "input_tokens": parsed.input_tokens,
        "output_tokens": parsed.output_tokens,
        "rounds": [msgspec.to_builtins(one) for one in rounds],
    }
    print(json.dumps(document))
    return 0


class _System:
    """A system under measurement in a process of its own: prompts go in, a Round comes out."""

    def __init__(self, name: str, parsed: argparse.Namespace) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, name, parsed), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        print(self._answer(), flush=True)
        return self

    def run(self, prompts: Prompts) -> Round:
        self._here.send(prompts)
        answer = self._answer()
        assert isinstance(answer, Round)
        return answer

    def _answer(self) -> Any:
        """Raises if the process died instead: its own error stands above, on stderr."""
        multiprocessing.connection.wait([self._here, self._process.sentinel])
        if not self._here.poll():
            raise EngineError(f"The process of {self.name} ended with {self._process.exitcode}.")
        return self._here.recv()

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._here.send(None)
        self._process.join()


def _serve(there: Connection, name: str, parsed: argparse.Namespace) -> None:
    """The other process: starts the system, then answers prompts until None comes."""
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        kind, dtype = name.split()
        if kind == "transformers":
            title, run = _theirs(dtype, parsed)
        else:
            title, run = _ours(runner, stack, dtype, parsed)
        there.send(title)
        while (prompts := there.recv()) is not None:
            there.send(_round(name, prompts, parsed, partial(run, prompts)))


def _measure(systems: list[_System], parsed: argparse.Namespace) -> list[Round]:
    random = np.random.default_rng(0)
    rounds: list[Round] = []

    def prompts(number: int) -> Prompts:
        drawn: Prompts = random.integers(100, 40_000, (number, parsed.input_tokens)).tolist()
        return drawn

    for system in systems:
        system.run(prompts(1))  # warm-up
    print(f"\n{parsed.input_tokens} tokens in, {parsed.output_tokens} out\n")
    heads = ("concurrency", "tokens/s", "TTFT ms", "TPOT ms", "CPU s")
    print(f"{'system':<24}" + "".join(f"{head:>12}" for head in heads))
    for concurrency in parsed.concurrency:
        here: dict[str, list[Round]] = {system.name: [] for system in systems}
        for _ in range(parsed.rounds):
            given = prompts(concurrency)
            for system in systems:
                here[system.name].append(system.run(given))
        for name, measured in here.items():
            rounds += measured
            _print_row(name, concurrency, measured)
    return rounds


def _print_row(name: str, concurrency: int, measured: list[Round]) -> None:
    def median(field: str) -> float:
        return float(statistics.median(getattr(one, field) for one in measured))

    print(
        f"{name:<24}{concurrency:>12}{median('output_tokens_per_s'):>12.1f}"
        f"{1000 * median('ttft_s'):>12.0f}{1000 * median('tpot_s'):>12.1f}{median('cpu_s'):>12.1f}",
        flush=True,
    )


def _round(name: str, prompts: Prompts, parsed: Any, run: Callable[[], list[list[float]]]) -> Round:
    """`run` returns, for each request, the times of its tokens (clock readings)."""
    begin, cpu = time.perf_counter(), time.process_time()
    times = run()
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    outputs = parsed.output_tokens
    assert all(len(one) == outputs for one in times), "a request ended early"
    return Round(
        system=name,
        concurrency=len(prompts),
        output_tokens_per_s=len(prompts) * outputs / wall_s,
        ttft_s=statistics.mean(one[0] - begin for one in times),
        tpot_s=statistics.mean((one[-1] - one[0]) / max(1, outputs - 1) for one in times),
        cpu_s=cpu_s,
    )


# --- ours ---

Run = Callable[[Prompts], list[list[float]]]


def _ours(
    runner: asyncio.Runner, stack: contextlib.ExitStack, dtype: str, parsed: argparse.Namespace
) -> tuple[str, Run]:
    from deepinfer.engine import Engine

    engine = Engine(EngineConfig(model=parsed.model, dtype=dtype))  # type: ignore[arg-type]
    runner.run(engine.start())
    stack.callback(lambda: runner.run(engine.aclose()))
    params = SamplingParams(temperature=0.0, max_tokens=parsed.output_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []
        async for delta in engine.generate(prompt, params):
            times += [time.perf_counter()] * len(delta.token_ids)
        return times

    async def every(prompts: Prompts) -> list[list[float]]:
        return list(await asyncio.gather(*map(one, prompts)))

    return "\n".join(engine.explain()), lambda prompts: runner.run(every(prompts))


# --- transformers ---


def _theirs(dtype: str, parsed: argparse.Namespace) -> tuple[str, Run]:
    import torch
    import transformers

    from deepinfer.runtime.weights import embedded_model_path

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    path = Path(parsed.model) if parsed.model else embedded_model_path()
    where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    # from_pretrained leaves the model in evaluation mode.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if path.is_file() else path, dtype=getattr(torch, dtype), **where
    )

    class Stamps(transformers.StoppingCriteria):
        """Is called after every token of the batch; notes the time and never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(prompts: Prompts) -> list[list[float]]:
        stamps = Stamps()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=parsed.output_tokens,
                min_new_tokens=parsed.output_tokens,
                stopping_criteria=[stamps],
                pad_token_id=0,
            )
        return [stamps.times] * len(prompts)

    return f"transformers {transformers.__version__}, {dtype}", generate
