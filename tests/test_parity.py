"""Greedy tokens of the embedded model, one by one against those that transformers gives.

What transformers gives is recorded in data/parity_tokens.json (`tools/parity.py --record`), with
how it was made and the gap between its two best logits at every token. Only a gap below 1e-4
excuses another token; the record has none, so here everything must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepinfer import Engine, EngineConfig

ROOT = Path(__file__).parents[1]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity", ROOT / "tools" / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


parity: Any = load_tool()
HEAD, EXPECTED = parity.read_record()
ALONE, TOGETHER, WARM, SMALL_STEPS, FEW_BLOCKS = parity.SETTINGS
GAP_TOLERANCE = 3e-4  # of logits, in float32; docs/parity.md says what was seen
# Short answers keep this file within a minute; the slow tests ask for all 64 tokens.
NUM_TOKENS = [64 if index % 5 == 1 else 16 for index in range(len(EXPECTED))]


def config(**overrides: Any) -> EngineConfig:
    sizes = {"dtype": "float32", "block_tokens": parity.BLOCK_TOKENS, "max_model_len": 1152}
    return EngineConfig(**{**sizes, **overrides})


# --- the record itself ---


def test_the_record_covers_every_prompt_with_64_tokens() -> None:
    prompts = parity.load_prompts()
    assert [entry.name for entry in EXPECTED] == [prompt.name for prompt in prompts]
    assert len({entry.name for entry in EXPECTED}) == 20
    for entry in EXPECTED:
        assert len(entry.token_ids) == len(entry.second_token_ids) == len(entry.gaps) == 64
    lengths = sorted(len(entry.prompt_token_ids) for entry in EXPECTED)
    assert lengths[0] == 1
    assert lengths[-2] > 600


def test_the_prompts_still_have_the_token_ids_that_were_recorded() -> None:
    for entry, prompt in zip(EXPECTED, parity.load_prompts(), strict=True):
        assert prompt.token_ids == entry.prompt_token_ids, entry.name


def test_the_record_names_the_model_that_is_installed() -> None:
    assert parity.describe_oracle("sdpa", 64)["model_sha256"] == HEAD["model_sha256"]


def test_nothing_in_the_record_may_be_excused() -> None:
    assert min(gap for entry in EXPECTED for gap in entry.gaps) > parity.NEAR_TIE


# --- the engine against it ---


async def test_alone_then_together_cold_and_warm() -> None:
    """One engine. The last time it finds every full block of every prompt in its cache."""
    short = [entry for entry in EXPECTED if len(entry.prompt_token_ids) < 30]
    counts = [8] * len(short)
    async with Engine(config(max_num_seqs=32)) as engine:
        answers = await parity.answer_all(engine, short, counts, ALONE)
        assert parity.judge(ALONE, short, answers, counts).failures == []
        for setting in (TOGETHER, WARM):
            answers = await parity.answer_all(engine, EXPECTED, NUM_TOKENS, setting)
            outcome = parity.judge(setting, EXPECTED, answers, NUM_TOKENS)
            assert outcome.failures == [], setting.name
            assert outcome.badly_cached == []
            assert (outcome.gap_error or 0.0) < GAP_TOLERANCE
        engine.check()


async def test_small_steps_in_the_plain_loop() -> None:
    """Chunks of at most 48 tokens, decoding beside prefill, blocks of another size."""
    some = EXPECTED[2::5]
    counts = [16] * len(some)
    async with Engine(config(**SMALL_STEPS.config)) as engine:
        answers = await parity.answer_all(engine, some, counts, SMALL_STEPS)
        engine.check()
    outcome = parity.judge(SMALL_STEPS, some, answers, counts)
    assert outcome.failures == []
    assert outcome.gap_error < GAP_TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_setting_with_all_64_tokens() -> None:
    outcomes = await parity.run_settings(EXPECTED, "float32", 64)
    assert [outcome.setting for outcome in outcomes] == list(parity.SETTINGS)
    for outcome in outcomes:
        assert outcome.failures == [], outcome.setting.name
        assert outcome.agreeing_tokens == 20 * 64
        assert outcome.badly_cached == []
        assert (outcome.gap_error or 0.0) < GAP_TOLERANCE
    by_name = {outcome.setting.name: outcome for outcome in outcomes}
    assert by_name[FEW_BLOCKS.name].preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transformers_still_gives_what_was_recorded() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parity.load_transformers()
    for entry in EXPECTED[::4]:
        prompt = parity.Prompt(entry.name, entry.prompt_token_ids)
        again = parity.expect(model, prompt, 64)
        assert again.token_ids == entry.token_ids
        assert again.second_token_ids == entry.second_token_ids
        assert again.gaps == pytest.approx(entry.gaps, abs=1e-3)


# --- the judgement ---


def expected(**changes: Any) -> Any:
    fields = {
        "name": "p",
        "prompt_token_ids": list(range(70)),
        "token_ids": [5, 6, 7],
        "second_token_ids": [1, 2, 3],
        "gaps": [1.0, 9e-5, 1.0],
    }
    return parity.Expected(**{**fields, **changes})


def test_the_first_difference_counts_and_only_within_the_tokens_asked_for() -> None:
    assert parity.compare("s", expected(), [5, 6, 7], 3) is None
    assert parity.compare("s", expected(), [5, 6], 2) is None
    mismatch = parity.compare("s", expected(), [9, 6, 8], 3)
    assert (mismatch.position, mismatch.expected, mismatch.got) == (0, 5, 9)
    assert not mismatch.excused


def test_a_near_tie_excuses_the_runner_up_and_nothing_else() -> None:
    assert parity.compare("s", expected(), [5, 2, 0], 3).excused
    assert not parity.compare("s", expected(), [5, 4, 0], 3).excused
    assert not parity.compare("s", expected(gaps=[1.0, 1.1e-4, 1.0]), [5, 2, 0], 3).excused


def test_an_answer_that_ends_early_is_a_failure() -> None:
    mismatch = parity.compare("s", expected(), [5], 3)
    assert (mismatch.position, mismatch.got, mismatch.excused) == (1, None, False)


def test_tokens_after_an_excused_difference_do_not_count_as_agreeing() -> None:
    outcome = parity.judge(TOGETHER, [expected()], [parity.Answer([5, 2, 7], 0, 0)], [3])
    assert outcome.agreeing_tokens == 1
    assert outcome.failures == []


def test_gaps_are_compared_up_to_the_first_difference() -> None:
    given = parity.Answer([5, 6, 0], 64, 0, [1.5, 9e-5, 9.0])
    assert parity.judge(WARM, [expected()], [given], [3]).gap_error == 0.5


def test_a_warm_cache_must_serve_every_full_block_before_the_last_token() -> None:
    for cached, wanted in ((64, []), (32, ["p"])):
        given = parity.Answer([5, 6, 7], cached, 0, [1.0, 0.0, 1.0])
        outcome = parity.judge(WARM, [expected()], [given], [3])
        assert outcome.badly_cached == wanted


def test_the_document_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = parity.judge(TOGETHER, [expected()], [parity.Answer([5, 6, 0], 0, 0)], [3], 1.25)
    head = {"versions": {}, "model": "m", "model_sha256": "", "num_tokens": 3}
    document = json.loads(json.dumps(parity.as_json(head, "float32", 3, [wrong])))
    assert document["passed"] is False
    assert document["mismatches"][0]["position"] == 2
    assert document["settings"]["together"]["equal_prompts"] == 0
    parity.print_table([expected()], [wrong], 3)
    assert "NOT @2" in capsys.readouterr().out
