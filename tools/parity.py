"""Compares the engine's greedy tokens with those of transformers, one by one.

    python tools/parity.py                        # float32, 64 tokens; minutes
    python tools/parity.py --dtype float16        # how far the narrow weights agree
    python tools/parity.py --record FILE          # runs transformers and writes down what it gives
    python tools/parity.py --recorded FILE        # compares with that, without transformers

transformers reads the same GGUF file with its own loader and computes in float32. Both sides get
the same token ids, from our tokenizer: only the model is compared here. The engine answers in the
settings of `SETTINGS`, end-of-sequence ids ignored on both sides.

A difference is excused only where transformers itself hardly chose: the gap between its two best
logits is below `NEAR_TIE` there and our token is its second. What follows such a place has another
context and is not compared. Equal tokens forgive small errors, so two settings also compare the
gap itself with ours, at every token.

The last line of the output is one JSON document; the exit code is 1 if a difference is not excused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.runtime.weights import embedded_model_path, open_checkpoint
from deepinfer.text.chat import ChatTemplate
from deepinfer.text.tokenizer import Tokenizer

NEAR_TIE = 1e-4  # of logits
DATA = Path(__file__).parents[1] / "tests" / "data"
PROMPTS = DATA / "parity_prompts.json"
RECORD = DATA / "parity_tokens.json"
BLOCK_TOKENS = 32
ORACLE_LIBRARIES = ("transformers", "torch", "gguf")  # what its answers depend on


@dataclass(frozen=True)
class Prompt:
    name: str
    token_ids: list[int]


@dataclass(frozen=True)
class Expected:
    """What transformers does after one prompt. The lists have one entry for each new token."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    second_token_ids: list[int]  # the runner-up of each choice
    gaps: list[float]  # logit of the choice minus logit of the runner-up


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    cached_tokens: int
    preemptions: int
    gaps: list[float] = field(default_factory=list)  # as in `Expected`, if the setting asks for it


@dataclass(frozen=True)
class Mismatch:
    """The first token that differs. `got` is None where the engine gave too few tokens."""

    setting: str
    prompt: str
    position: int
    expected: int
    got: int | None
    gap: float
    excused: bool


@dataclass(frozen=True)
class Setting:
    """A way to run the prompts. Neighbours with equal `config` share an engine and its cache."""

    name: str
    together: bool
    salt: str  # prompts share cached prefixes only under the same salt
    gaps: bool = False  # log-probabilities are asked for, so that numbers can be compared too
    config: dict[str, Any] = field(default_factory=dict)


SMALL_STEPS = {
    "overlap": False,
    "block_tokens": 16,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 48,
    "max_prefill_tokens_beside_decode": 24,
    "min_prefill_tokens": 8,
}
# The longest request needs 33 of these 43 blocks: others must make room for it and come back.
FEW_BLOCKS = {"max_model_len": 1152, "kv_cache_memory_bytes": 44 * 1_474_560}

SETTINGS = (
    Setting("alone", together=False, salt="alone"),
    Setting("together", together=True, salt="together"),
    Setting("warm", together=True, salt="together", gaps=True),
    Setting("small steps", together=True, salt="", gaps=True, config=SMALL_STEPS),
    Setting("few blocks", together=True, salt="", config=FEW_BLOCKS),
)


def load_prompts(path: Path = PROMPTS) -> list[Prompt]:
    """Texts as they are, messages through the chat template of the embedded model."""
    checkpoint = open_checkpoint("")
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert checkpoint.chat_template is not None
    template = ChatTemplate(checkpoint.chat_template, tokenizer)
    prompts = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        if "messages" in entry:
            token_ids = tokenizer.encode_rendered(template.render(entry["messages"]))
        else:
            token_ids = tokenizer.encode(entry["text"])
        prompts.append(Prompt(entry["name"], token_ids))
    return prompts


# --- transformers ---


def load_transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM

    path = embedded_model_path()
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )


def expect(model: Any, prompt: Prompt, num_tokens: int) -> Expected:
    """Greedy decoding of one sequence: the whole prompt at once, then token by token."""
    import torch
    from transformers import DynamicCache

    # The parameter changed its name within transformers 5.
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    cache = {cache_name: DynamicCache()}
    token_ids: list[int] = []
    seconds: list[int] = []
    gaps: list[float] = []
    inputs = prompt.token_ids
    with torch.inference_mode():
        while len(token_ids) < num_tokens:
            logits = model(torch.tensor([inputs]), use_cache=True, **cache).logits[0, -1]
            values, best = logits.topk(2)
            token_ids.append(int(best[0]))
            seconds.append(int(best[1]))
            gaps.append(float(values[0] - values[1]))
            inputs = token_ids[-1:]
    return Expected(prompt.name, prompt.token_ids, token_ids, seconds, gaps)


def describe_oracle(attention: str, num_tokens: int) -> dict[str, Any]:
    """How the expected tokens came about, for the record and for the report."""
    model = embedded_model_path()
    return {
        "made_by": "tools/parity.py --record",
        "how": "AutoModelForCausalLM.from_pretrained(directory, gguf_file=..., dtype=float32); "
        "each prompt alone, its token ids in one forward, then one token at a time with a "
        f"DynamicCache; topk(2) of the logits; attention {attention}; no end of sequence",
        "versions": {name: importlib.metadata.version(name) for name in ORACLE_LIBRARIES},
        "model": model.name,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "num_tokens": num_tokens,
    }


def write_record(path: Path, head: dict[str, Any], expected: Sequence[Expected]) -> None:
    """A line for each prompt, so that a change shows as the lines that changed."""
    rows = []
    for entry in expected:
        row = asdict(entry)
        row["gaps"] = [float(f"{gap:.6g}") for gap in entry.gaps]
        rows.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
    text = json.dumps(head, indent=1)[:-2] + ',\n "prompts": [\n' + ",\n".join(rows) + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def read_record(path: Path = RECORD) -> tuple[dict[str, Any], list[Expected]]:
    """What was said about how it was made, and the tokens."""
    head = json.loads(path.read_text(encoding="utf-8"))
    return head, [Expected(**entry) for entry in head.pop("prompts")]


# --- the engine ---


async def answer(engine: Engine, entry: Expected, num_tokens: int, setting: Setting) -> Answer:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=2 if setting.gaps else None,
    )
    token_ids: list[int] = []
    gaps: list[float] = []
    async with engine.generate(entry.prompt_token_ids, params, cache_salt=setting.salt) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
            # Of the same position, log-probabilities differ as the logits do.
            gaps += [token.top[0][1] - token.top[1][1] for token in delta.logprobs or ()]
    assert delta.usage is not None
    assert delta.timeline is not None
    return Answer(token_ids, delta.usage.cached_tokens, delta.timeline.preemptions, gaps)


async def answer_all(
    engine: Engine, expected: Sequence[Expected], num_tokens: Sequence[int], setting: Setting
) -> list[Answer]:
    """The engine's own tokens after each prompt, as many as `num_tokens` says for it."""
    requests = [
        answer(engine, entry, count, setting)
        for entry, count in zip(expected, num_tokens, strict=True)
    ]
    if setting.together:
        return list(await asyncio.gather(*requests))
    return [await request for request in requests]


def compare(
    setting: str, expected: Expected, got: Sequence[int], num_tokens: int
) -> Mismatch | None:
    """The first of `num_tokens` tokens that differs, if any does."""
    for position, token_id in enumerate(expected.token_ids[:num_tokens]):
        ours = got[position] if position < len(got) else None
        if ours != token_id:
            gap = expected.gaps[position]
            near = gap < NEAR_TIE and ours == expected.second_token_ids[position]
            return Mismatch(setting, expected.name, position, token_id, ours, gap, near)
    return None


def badly_cached(expected: Sequence[Expected], answers: Sequence[Answer]) -> list[str]:
    """Prompts that took less from a warm cache than every full block before their last token."""
    return [
        entry.name
        for entry, given in zip(expected, answers, strict=True)
        if given.cached_tokens < (len(entry.prompt_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    ]


@dataclass(frozen=True)
class Outcome:
    """Of one setting: a mismatch or None for each prompt, and what else was seen."""

    setting: Setting
    mismatches: list[Mismatch | None]
    agreeing_tokens: int  # of all prompts, each up to its first difference
    cached_tokens: int
    preemptions: int
    badly_cached: list[str]  # of the warm setting: prompts that the cache served less than it could
    gap_error: float | None  # the largest difference from transformers' gaps, if gaps are known
    wall_s: float

    @property
    def failures(self) -> list[Mismatch]:
        return [m for m in self.mismatches if m is not None and not m.excused]


def judge(
    setting: Setting,
    expected: Sequence[Expected],
    answers: Sequence[Answer],
    num_tokens: Sequence[int],
    wall_s: float = 0.0,
) -> Outcome:
    mismatches = [
        compare(setting.name, entry, given.token_ids, count)
        for entry, given, count in zip(expected, answers, num_tokens, strict=True)
    ]
    agreeing = [
        count if mismatch is None else mismatch.position
        for mismatch, count in zip(mismatches, num_tokens, strict=True)
    ]
    gap_errors = [
        abs(ours - theirs)
        for entry, given, count in zip(expected, answers, agreeing, strict=True)
        for ours, theirs in zip(given.gaps[:count], entry.gaps[:count], strict=setting.gaps)
    ]
    return Outcome(
        setting,
        mismatches,
        agreeing_tokens=sum(agreeing),
        cached_tokens=sum(given.cached_tokens for given in answers),
        preemptions=sum(given.preemptions for given in answers),
        badly_cached=badly_cached(expected, answers) if setting.name == "warm" else [],
        gap_error=max(gap_errors, default=None),
        wall_s=wall_s,
    )


async def run_settings(expected: Sequence[Expected], dtype: Any, num_tokens: int) -> list[Outcome]:
    outcomes = []
    counts = [num_tokens] * len(expected)
    for overrides, group in itertools.groupby(SETTINGS, key=lambda setting: setting.config):
        config = EngineConfig(**{"dtype": dtype, "block_tokens": BLOCK_TOKENS, **overrides})
        async with Engine(config) as engine:
            for setting in group:
                begin = time.perf_counter()
                answers = await answer_all(engine, expected, counts, setting)
                wall_s = time.perf_counter() - begin
                engine.check()
                outcomes.append(judge(setting, expected, answers, counts, wall_s))
                print(f"{setting.name}: {wall_s:.0f} s", file=sys.stderr)
    return outcomes


# --- the report ---


def print_table(expected: Sequence[Expected], outcomes: Sequence[Outcome], num_tokens: int) -> None:
    """A row for each prompt: what transformers' closest choice was, and how each setting fared."""
    names = [outcome.setting.name for outcome in outcomes]
    widths = [max(len(name), 7) for name in names]
    columns = "  ".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))
    print(f"{'prompt':<33} {'tokens':>6}  {'smallest gap':>12}  {columns}")
    for index, entry in enumerate(expected):
        cells = [_cell(outcome.mismatches[index]) for outcome in outcomes]
        columns = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        smallest = min(entry.gaps[:num_tokens])
        length = len(entry.prompt_token_ids)
        print(f"{entry.name:<33} {length:>6}  {smallest:>12.2g}  {columns}".rstrip())
    total = num_tokens * len(expected)
    print()
    for outcome in outcomes:
        equal = outcome.mismatches.count(None)
        print(
            f"{outcome.setting.name + ':':<12} {equal} of {len(expected)} prompts equal, "
            f"{outcome.agreeing_tokens} of {total} tokens before a first difference; "
            f"{outcome.cached_tokens} tokens from the prefix cache, "
            f"{outcome.preemptions} preemptions; "
            + ("" if outcome.gap_error is None else f"gaps within {outcome.gap_error:.2g}; ")
            + f"{outcome.wall_s:.0f} s"
        )


def _cell(mismatch: Mismatch | None) -> str:
    if mismatch is None:
        return "equal"
    return f"{'tie' if mismatch.excused else 'NOT'} @{mismatch.position}"


def print_details(outcomes: Sequence[Outcome], tokenizer: Tokenizer) -> None:
    def quoted(token_id: int | None) -> str:
        return "nothing" if token_id is None else f"{token_id} {tokenizer.decode([token_id])!r}"

    for outcome in outcomes:
        for m in filter(None, outcome.mismatches):
            verdict = "near tie, excused; the rest is not compared" if m.excused else "NOT EXCUSED"
            print(
                f"{m.setting}, {m.prompt!r}, new token {m.position}: transformers "
                f"{quoted(m.expected)}, ours {quoted(m.got)}; its gap {m.gap:.3g}: {verdict}"
            )
        for name in outcome.badly_cached:
            print(f"{outcome.setting.name}, {name!r}: the prefix cache served less than it could")


def as_json(
    head: dict[str, Any], dtype: str, num_tokens: int, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    mismatches = [m for outcome in outcomes for m in outcome.mismatches if m is not None]
    return {
        "passed": not any(outcome.failures or outcome.badly_cached for outcome in outcomes),
        "dtype": dtype,
        "num_prompts": len(outcomes[0].mismatches),
        "num_tokens": num_tokens,
        "near_tie": NEAR_TIE,
        "oracle": {name: head[name] for name in ("versions", "model", "model_sha256")},
        "settings": {
            outcome.setting.name: {
                "equal_prompts": outcome.mismatches.count(None),
                "agreeing_tokens": outcome.agreeing_tokens,
                "cached_tokens": outcome.cached_tokens,
                "preemptions": outcome.preemptions,
                "badly_cached": outcome.badly_cached,
                "gap_error": outcome.gap_error,
                "wall_s": round(outcome.wall_s, 1),
            }
            for outcome in outcomes
        },
        "mismatches": [asdict(mismatch) for mismatch in mismatches],
    }


# --- the command ---


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare greedy tokens with those of transformers.",
        epilog="The last line of the output is JSON. The exit code is 1 if a difference is not a "
        f"near tie (a gap of transformers' two best logits below {NEAR_TIE}).",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "float16", "bfloat16", "auto"]
    )
    parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--record", type=Path, metavar="FILE", help="write what transformers gives")
    source.add_argument(
        "--recorded", type=Path, metavar="FILE", help="read it instead of running it"
    )
    return parser.parse_args()


def ask_transformers(num_tokens: int) -> tuple[dict[str, Any], list[Expected]]:
    prompts = load_prompts()
    print("transformers reads the GGUF file (tens of seconds)", file=sys.stderr)
    model = load_transformers()
    expected = []
    for prompt in prompts:
        expected.append(expect(model, prompt, num_tokens))
        print(f"transformers: {prompt.name}", file=sys.stderr)
    return describe_oracle(model.config._attn_implementation, num_tokens), expected


def main() -> int:
    arguments = parse_arguments()
    if arguments.recorded:
        head, expected = read_record(arguments.recorded)
        if head["num_tokens"] < arguments.tokens:
            sys.exit(
                f"{arguments.recorded} has {head['num_tokens']} tokens for each prompt, fewer than "
                f"the {arguments.tokens} to compare. Lower --tokens or record anew with --record."
            )
    else:
        head, expected = ask_transformers(arguments.tokens)
    if arguments.record:
        write_record(arguments.record, head, expected)
    outcomes = asyncio.run(run_settings(expected, arguments.dtype, arguments.tokens))
    print_table(expected, outcomes, arguments.tokens)
    print_details(outcomes, Tokenizer.from_checkpoint(open_checkpoint("")))
    document = as_json(head, arguments.dtype, arguments.tokens, outcomes)
    print(json.dumps(document, ensure_ascii=False))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
