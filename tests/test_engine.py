"""The engine as an embedding program meets it: admission, refusals, seeds, reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from deepinfer.errors import (
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from deepinfer.types import FinishReason, SamplingParams

StartEngine = Callable[..., Awaitable[Any]]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


async def ids_of(stream: Any) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (np.zeros(0, np.int32), "empty"),
        ([5, -1], r"token id -1; .* 0 to 259"),
        ([5, 260], r"token id 260; .* 0 to 259"),
        ([2**40], "token id 1099511627776"),
        ([1.5], "neither a text nor a list of token ids"),
        (["a", "b"], "neither"),
        ([True], "neither"),
        ([[1, 2]], "neither"),
        ([[1], [2, 3]], "neither"),
        (b"bytes", "neither"),
        (7, "neither"),
        (None, "neither"),
    ],
)
async def test_a_prompt_that_is_none_is_refused(
    start_engine: StartEngine, prompt: Any, message: str
) -> None:
    engine = await start_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.generate(prompt)
    assert caught.value.field == "prompt"
    assert engine.stats().num_waiting == 0


async def test_a_prompt_may_be_any_sequence_of_integers(start_engine: StartEngine) -> None:
    engine = await start_engine()
    expected = engine.alone("Hi", 4)
    changing = np.array([72, 105], np.int32)
    stream = engine.generate(changing, SHORT)
    changing[0] = 0
    assert await ids_of(stream) == expected, "it was copied"
    for prompt in ("Hi", (72, 105), np.array([72, 105], np.int64), np.array([72, 105], np.uint8)):
        assert await ids_of(engine.generate(prompt, SHORT)) == expected


async def test_a_prompt_that_is_too_long_is_told_both_numbers(start_engine: StartEngine) -> None:
    engine = await start_engine(max_model_len=32)
    with pytest.raises(PromptTooLongError, match=r"32 tokens, but at most 31") as caught:
        engine.generate([1] * 32)
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (32, 31)
    assert len(await ids_of(engine.generate([1] * 31, SHORT))) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -1.0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", (260,)),
        ("stop_token_ids", (-1,)),
    ],
)
async def test_a_parameter_out_of_range_is_refused_by_name(
    start_engine: StartEngine, field: str, value: Any
) -> None:
    engine = await start_engine()
    with pytest.raises(RequestError) as caught:
        engine.generate("Hi", SamplingParams(**{field: value}))
    assert caught.value.field == field
    assert engine.stats().num_waiting == 0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
async def test_a_deadline_in_the_past_is_refused(
    start_engine: StartEngine, timeout_s: float
) -> None:
    engine = await start_engine()
    with pytest.raises(RequestError, match="positive"):
        engine.generate("Hi", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ({"max_waiting_requests": 2}, "2 of 2 requests and 4 of"),
        ({"max_waiting_tokens": 5}, r"2 of 1024 requests and 4 of 5 tokens"),
    ],
)
async def test_a_full_queue_refuses_and_says_when_to_come_back(
    start_engine: StartEngine, bound: dict[str, int], message: str
) -> None:
    engine = await start_engine(max_num_seqs=1, **bound)
    engine.device.hold()
    running = engine.generate("run", SHORT)
    await engine.turn(10)
    waiting = [engine.generate("wa", SHORT), engine.generate("it", SHORT)]
    with pytest.raises(QueueFullError, match=message) as caught:
        engine.generate("no", SHORT)
    assert caught.value.retry_after_s > 0
    engine.device.release()
    results = await asyncio.gather(*map(ids_of, [running, *waiting]))
    assert results == [engine.alone(prompt, 4) for prompt in ("run", "wa", "it")]
    assert await ids_of(engine.generate("no", SHORT)) == engine.alone("no", 4), "room again"


async def test_the_time_to_come_back_follows_from_the_speed(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1, max_waiting_requests=1)
    engine.device.hold()
    stream = engine.generate("sixteen tokens..", SHORT)
    await engine.turn(10)
    engine.clock.advance(10.0)
    engine.device.release()
    await ids_of(stream)  # 20 tokens in 10 s
    engine.device.hold()
    streams = [engine.generate("run", SHORT)]
    await engine.turn(10)
    streams.append(engine.generate("x" * 50, SHORT))
    with pytest.raises(QueueFullError, match="about 25 s") as caught:
        engine.generate("no", SHORT)
    assert caught.value.retry_after_s == pytest.approx(25.0)


async def test_one_request_alone_may_exceed_the_queue_of_tokens(start_engine: StartEngine) -> None:
    engine = await start_engine(max_waiting_tokens=5)
    assert len(await ids_of(engine.generate("longer than five", SHORT))) == 4


# --- lengths, priorities, defaults ---


@pytest.mark.parametrize("max_tokens", [None, 1000])
async def test_an_answer_ends_where_the_context_does(
    start_engine: StartEngine, max_tokens: int | None
) -> None:
    engine = await start_engine(max_model_len=20)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    deltas = [delta async for delta in engine.generate("prompt", params)]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].usage.completion_tokens == 20 - len("prompt")


async def test_the_more_important_request_goes_first(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1)
    streams = [
        engine.generate("a", SHORT, priority=5, request_id="late"),
        engine.generate("b", SHORT, priority=-5, request_id="early"),
    ]
    await asyncio.gather(*map(ids_of, streams))
    assert list(engine.witness.finished) == ["early", "late"]


async def test_cached_prefixes_are_shared_unless_the_salts_differ(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()

    async def cached(salt: str) -> int:
        stream = engine.generate("a prompt of some length", SHORT, cache_salt=salt)
        return [delta async for delta in stream][-1].usage.cached_tokens

    assert [await cached(salt) for salt in ("", "", "mine", "mine")] == [0, 20, 0, 20]


async def test_defaults_are_what_the_checkpoint_recommends(start_engine: StartEngine) -> None:
    stored = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": 1}
    engine = await start_engine(checkpoint={"generation_config": stored})
    assert engine.default_params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    stream = engine.generate("Hi")
    await anext(stream)
    assert engine.device.starts[0].params == engine.default_params()
    await stream.aclose()
    for says_nothing in ({}, {"temperature": None}):
        engine = await start_engine(checkpoint={"generation_config": says_nothing})
        assert engine.default_params() == SamplingParams()
    for greedy in ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}):
        engine = await start_engine(checkpoint={"generation_config": greedy})
        assert engine.default_params() == SamplingParams(temperature=0.0)


# --- seeds ---


async def seeds(start_engine: StartEngine, seed: int) -> list[int]:
    engine = await start_engine(seed=seed)
    for params in (SHORT, SHORT, SamplingParams(max_tokens=1, seed=7)):
        await ids_of(engine.generate("same", params))
    return [start.seed for start in engine.device.starts]


async def test_requests_get_their_own_seeds_and_an_engine_repeats_them(
    start_engine: StartEngine,
) -> None:
    first, again, other = [await seeds(start_engine, seed) for seed in (1, 1, 2)]
    assert first == again
    assert len({*first[:2], *other[:2]}) == 4, "all drawn ones differ"
    assert first[2] == other[2] == 7, "the request's own one counts"


# --- what the observer is told ---


async def test_reports_add_up(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=3, enable_prefix_caching=False)
    prompts = [f"{number} prompt" for number in range(7)]
    params = [SamplingParams(max_tokens=n + 1, ignore_eos=True) for n in range(7)]
    await asyncio.gather(*map(ids_of, map(engine.generate, prompts, params)))
    await engine.settle()
    seen = engine.witness
    reports = list(seen.finished.values())
    completion_tokens = sum(report.usage.completion_tokens for report in reports)
    assert completion_tokens == sum(range(1, 8)) == sum(s.num_sampled_tokens for s in seen.steps)
    assert seen.num_intervals == completion_tokens - len(reports)
    assert sum(report.usage.prompt_tokens for report in reports) == 7 * len(prompts[0])
    # A prompt's last token is computed once, and each token but the last of an answer.
    computed = sum(step.num_prefill_tokens + step.num_decode_tokens for step in seen.steps)
    assert computed >= 7 * len(prompts[0]) + completion_tokens - 7
    assert [step.number for step in seen.steps] == list(range(1, engine.stats().num_steps + 1))
    assert seen.cancels == []


async def test_a_request_tells_where_its_time_went(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1, overlap=False)
    engine.device.hold()
    first = asyncio.create_task(ids_of(engine.generate("first", SHORT)))
    second = asyncio.create_task(ids_of(engine.generate("second", SHORT, request_id="second")))
    await engine.turn(10)
    engine.clock.advance(1.0)
    engine.device.release(4)
    await first
    engine.clock.advance(2.0)
    engine.device.release(1)
    await engine.until(lambda: engine.witness.steps[-1].number == 5)
    engine.clock.advance(4.0)
    engine.device.release()
    await second
    report = engine.witness.finished["second"]
    timeline = report.timeline
    assert (timeline.queued_s, timeline.prefill_s, timeline.decode_s) == (1.0, 2.0, 4.0)
    assert (timeline.total_s, report.time_to_first_token_s) == (7.0, 3.0)
    assert timeline.stalls_s == {"queue": 0.0, "slot": 1.0}


async def test_the_event_loops_delay_is_measured(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await engine.turn(2)
    engine.clock.advance(0.3)  # nobody could run for 0.3 s
    await engine.turn(2)
    assert engine.witness.lags_s == [pytest.approx(0.25)]
    assert engine.stats().loop_lag_s == pytest.approx(0.25)
