"""The embedded model inside somebody's event loop: the whole engine, nothing scripted."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from deepinfer import Engine, EngineConfig, SamplingParams
from deepinfer.errors import DeadlineExceededError
from deepinfer.runtime.build import BuiltDevice, build_device
from deepinfer.types import Delta, TokenLogprob, Usage

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(
    dtype="float32", num_threads=1, max_model_len=128, max_num_seqs=8, block_tokens=16
)
STORY = (
    "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote one line "
    "about the weather into a book that nobody would ever read. One night he wrote:"
)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    STORY,
    "1, 2, 3, 4,",
    "Once upon a time, there was a fox who",
    "Die Hauptstadt von",
    "Q: Why is the sky blue?\nA:",
    "The three laws of",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class Answer(msgspec.Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    preemptions: int
    logprobs: tuple[TokenLogprob, ...]


async def answer(
    engine: Engine, prompt: str, params: SamplingParams = GREEDY, priority: int = 0
) -> Answer:
    stream = engine.generate(prompt, params, priority=priority)
    deltas: list[Delta] = [delta async for delta in stream]
    usage, timeline = deltas[-1].usage, deltas[-1].timeline
    assert usage is not None
    assert timeline is not None
    return Answer(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        usage,
        timeline.preemptions,
        tuple(entry for delta in deltas for entry in delta.logprobs or ()),
    )


class Embedded(Engine):
    """An engine on the embedded model, with its device at hand for those who hold it."""

    built: BuiltDevice

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        super().__init__(config, build=self._build_and_keep)

    def _build_and_keep(self, config: EngineConfig, tell: Callable[[str], None]) -> BuiltDevice:
        self.built = build_device(config, tell)
        return self.built

    async def settle(self) -> None:
        """Waits until the last step in flight has come back, then proves the books."""
        await answer(self, "one more", SamplingParams(max_tokens=1))
        assert self.stats().num_blocks_held == 0
        self.check()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Embedded]:
    async with Embedded() as engine:
        yield engine
        await engine.settle()


async def test_greedy_text_is_the_same_alone_and_among_seven_others(engine: Embedded) -> None:
    alone = [await answer(engine, prompt) for prompt in PROMPTS[:3]]
    assert alone[0].text.startswith(" Paris")
    sampled = SamplingParams(temperature=0.9, max_tokens=12, seed=3)
    together = await asyncio.gather(
        *(answer(engine, prompt) for prompt in PROMPTS[:3]),
        *(answer(engine, prompt, sampled) for prompt in PROMPTS[3:]),
    )
    assert [a.token_ids for a in together[:3]] == [a.token_ids for a in alone]
    assert [a.text for a in together[:3]] == [a.text for a in alone]
    assert engine.stats().num_running == 0


async def test_text_is_the_decoded_token_ids(engine: Embedded) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=24, seed=11, ignore_eos=True)
    wild = await answer(engine, PROMPTS[4], params)
    assert wild.text == engine.tokenizer.decode(wild.token_ids)
    assert len(wild.token_ids) == wild.usage.completion_tokens == 24


async def test_an_equal_prompt_is_found_in_the_prefix_cache(engine: Embedded) -> None:
    prompt = "Cached or not? " + STORY
    first = await answer(engine, prompt)
    second = await answer(engine, prompt)
    assert first.usage.cached_tokens == 0
    block_tokens = CONFIG.block_tokens
    assert second.usage.cached_tokens == (second.usage.prompt_tokens - 1) // block_tokens * 16 > 0
    assert second.token_ids == first.token_ids
    assert engine.stats().prefix_hits_tokens >= second.usage.cached_tokens


async def test_a_seed_repeats_and_without_one_answers_differ(engine: Embedded) -> None:
    seeded = SamplingParams(temperature=1.2, max_tokens=12, seed=42, ignore_eos=True)
    free = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True)
    one, two = [await answer(engine, PROMPTS[4], seeded) for _ in range(2)]
    assert one.token_ids == two.token_ids
    three, four = [await answer(engine, PROMPTS[4], free) for _ in range(2)]
    assert len({one.token_ids, three.token_ids, four.token_ids}) == 3


async def test_log_probabilities_are_those_of_a_distribution(engine: Embedded) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=5)
    greedy = await answer(engine, PROMPTS[0], params)
    assert [entry.token_id for entry in greedy.logprobs] == list(greedy.token_ids)
    for entry in greedy.logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        values = [logprob for _, logprob in entry.top]
        assert values == sorted(values, reverse=True)
        assert len({token_id for token_id, _ in entry.top}) == 5
        assert 0.0 < sum(map(math.exp, values)) <= 1.0 + 1e-5
    only_chosen = SamplingParams(temperature=1.0, seed=5, max_tokens=4, logprobs=0)
    for entry in (await answer(engine, PROMPTS[0], only_chosen)).logprobs:
        assert entry.logprob < 0.0
        assert entry.top == ()


async def test_the_event_loop_lives_while_a_step_is_held(engine: Embedded) -> None:
    entered, let_go = asyncio.Event(), threading.Event()
    event_loop = asyncio.get_running_loop()

    def hold(number: int) -> None:
        event_loop.call_soon_threadsafe(entered.set)
        assert let_go.wait(60)

    device: Any = engine.built.device
    running = asyncio.create_task(answer(engine, PROMPTS[0]))
    doomed = engine.generate(PROMPTS[2], GREEDY, timeout_s=0.2)
    device.before_step = hold
    try:
        async with asyncio.timeout(30):
            await entered.wait()
            late = engine.generate(PROMPTS[3], GREEDY, timeout_s=0.1)  # the loop cannot admit it
            left = engine.generate(PROMPTS[4], GREEDY)
            assert engine.stats().num_waiting == 2
            with pytest.raises(DeadlineExceededError):
                await anext(late)
            with pytest.raises(DeadlineExceededError):
                async for _ in doomed:
                    pass
            await left.aclose()
            assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 0)
            engine.check()
    finally:
        device.before_step = None
        let_go.set()
    assert (await running).text.startswith(" Paris")
    await engine.settle()


# --- batch-invariant mode: the same bits, whatever happens around ---

INVARIANT = msgspec.structs.replace(CONFIG, batch_invariant=True)
# Log-probabilities are compared too, bit for bit: token ids alone would forgive most differences.
SAMPLED = SamplingParams(temperature=0.8, max_tokens=20, seed=2024, ignore_eos=True, logprobs=2)
WATCHED = (STORY, PROMPTS[1])  # several blocks, and less than one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> list[Answer]:
    """The watched prompts, one after the other, in an engine of their own."""
    async with Embedded(INVARIANT) as engine:
        return [await answer(engine, prompt, SAMPLED) for prompt in WATCHED]


async def among_others(config: EngineConfig, num_others: int) -> tuple[list[Answer], Embedded]:
    """The watched prompts are the less important ones: where room is short, they give way."""
    others = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    async with Embedded(config) as engine:
        answers = await asyncio.gather(
            *(answer(engine, prompt, others) for prompt in PROMPTS[3 : 3 + num_others]),
            *(answer(engine, prompt, SAMPLED, priority=1) for prompt in WATCHED),
        )
        await engine.settle()
    return answers[num_others:], engine


def require_same_bits(answers: list[Answer], expected: list[Answer]) -> None:
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]


async def test_invariant_answers_do_not_depend_on_company(alone: list[Answer]) -> None:
    """Nor on the engine: it is another one, as after a restart."""
    together, engine = await among_others(INVARIANT, 5)
    require_same_bits(together, alone)
    assert together[0].text == alone[0].text
    assert engine.stats().num_preemptions == 0


async def test_invariant_answers_do_not_depend_on_preemption(alone: list[Answer]) -> None:
    block_bytes = 30 * 8 * 2 * 192 * 4  # layers, positions, keys and values, width, float32
    config = msgspec.structs.replace(
        INVARIANT, max_model_len=96, block_tokens=8, kv_cache_memory_bytes=15 * block_bytes
    )
    together, _ = await among_others(config, 3)
    assert all(answer.preemptions for answer in together), [a.preemptions for a in together]
    require_same_bits(together, alone)


async def test_invariant_answers_do_not_depend_on_chunks(alone: list[Answer]) -> None:
    config = msgspec.structs.replace(
        INVARIANT,
        max_num_batched_tokens=11,
        max_prefill_tokens_beside_decode=5,
        min_prefill_tokens=3,
        overlap=False,
    )
    together, engine = await among_others(config, 2)
    require_same_bits(together, alone)
    assert engine.stats().num_steps > 24 + len(STORY) // 50


async def test_invariant_answers_do_not_depend_on_the_prefix_cache(alone: list[Answer]) -> None:
    async with Embedded(INVARIANT) as engine:
        await answer(engine, STORY + " the", SamplingParams(max_tokens=1))
        cached = await answer(engine, STORY, SAMPLED)
    assert cached.usage.cached_tokens > 0
    require_same_bits([cached], alone[:1])
