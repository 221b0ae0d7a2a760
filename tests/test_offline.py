"""The engine for scripts: order, batches, errors, threads, and the way out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, EngineClosedError, ModelError, RequestError
from deepinfer.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=256, num_threads=1, batch_invariant=True) as llm:
        yield llm


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [5, 1, 3, 2, 4, 1, 2, 5, 3, 1]  # more prompts than sequences at once
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [f"Number {index} is" for index in range(len(lengths))]
    completions = llm.generate(prompts, params)
    assert [completion.prompt for completion in completions] == prompts
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    for completion in completions:
        assert completion.usage.completion_tokens == len(completion.token_ids)
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids)


def test_one_prompt_as_text_or_as_token_ids_gives_one_completion(llm: LLM) -> None:
    text = "The capital of France is"
    (from_text,) = llm.generate(text, GREEDY)
    (from_ids,) = llm.generate(llm.engine.tokenizer.encode(text), GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert "Paris" in from_text.text


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Name three colours."}]
    (alone,) = llm.chat(conversation, GREEDY)
    among = llm.chat([conversation, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert among[0].token_ids == alone.token_ids
    assert len(among) == 2


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_log_probabilities_come_one_a_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    (completion,) = llm.generate("One, two,", params)
    assert completion.logprobs is not None
    assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids
    assert all(len(entry.top) == 2 for entry in completion.logprobs)


def test_a_wrong_request_is_raised_bare_with_the_number_of_its_prompt(llm: LLM) -> None:
    wrong = SamplingParams(temperature=-1.0)
    with pytest.raises(RequestError, match="temperature") as caught:
        llm.generate(["fine", "not fine"], [GREEDY, wrong])
    assert any("prompt number 1" in note for note in caught.value.__notes__)
    assert llm.generate("still works", GREEDY)


def test_parameters_must_be_one_or_one_for_each(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_calls_from_several_threads_share_the_engine(llm: LLM) -> None:
    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(llm.generate, f"Word {n}", GREEDY) for n in range(3)]
        together = [future.result()[0].token_ids for future in futures]
    assert together == [llm.generate(f"Word {n}", GREEDY)[0].token_ids for n in range(3)]


async def test_inside_a_running_loop_it_refuses_and_says_what_to_do(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="async with Engine"):
        llm.generate("blocks", GREEDY)
    with pytest.raises(RuntimeError, match="async with Engine"):
        LLM()
    (completion,) = await asyncio.to_thread(llm.generate, "does not block", GREEDY)
    assert completion.token_ids


def test_a_model_that_cannot_be_opened_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(ModelError, match="nosuch"):
        LLM("nosuch")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seqs=0)
    assert threading.active_count() == before


def test_closing_is_final_and_may_be_repeated() -> None:
    llm = LLM(max_num_seqs=2, max_model_len=64, num_threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("late", GREEDY)
