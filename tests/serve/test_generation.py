"""Several streams as one flow, and requests of any shape: nothing is lost, nothing escapes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import DeviceError, DrainingError, RequestError
from deepinfer.serve import requests
from deepinfer.serve.body import decode_json
from deepinfer.serve.generation import IndexedDelta, Submission, follow, open_streams
from deepinfer.serve.protocol import ChatCompletionRequest, CompletionRequest
from deepinfer.types import Delta, FinishReason, SamplingParams


class Stream:
    """Steps through a script: a number is so many turns of the loop, then comes a delta."""

    def __init__(self, index: int, script: Sequence[int], failure: Exception | None) -> None:
        self.request_id = str(index)
        self.num_closed = 0
        self._script = iter(enumerate(script))
        self._failure = failure

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        for position, turns in self._script:
            for _ in range(turns):
                await asyncio.sleep(0)
            return Delta(request_id=self.request_id, text=str(position))
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.num_closed += 1


scripts = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(scripts, st.integers(0, 3))
def test_every_delta_arrives_once_and_in_order(script: list[list[int]], slowness: int) -> None:
    streams: Any = [Stream(index, turns, None) for index, turns in enumerate(script)]
    seen: list[list[str]] = [[] for _ in script]

    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        assert deltas
        for index, delta in deltas:
            seen[index].append(delta.text)
        for _ in range(slowness):
            await asyncio.sleep(0)

    asyncio.run(follow(streams, receive))
    assert seen == [[str(position) for position in range(len(turns))] for turns in script]


@settings(max_examples=60, deadline=None)
@given(scripts, st.data())
def test_a_failure_is_raised_bare(script: list[list[int]], data: st.DataObject) -> None:
    failing = data.draw(st.integers(0, len(script) - 1))
    failure = DeviceError("lost")
    streams: Any = [
        Stream(index, turns, failure if index == failing else None)
        for index, turns in enumerate(script)
    ]
    seen: list[str] = []

    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        seen.extend(delta.text for index, delta in deltas if index == failing)

    with pytest.raises(DeviceError) as caught:
        asyncio.run(follow(streams, receive))
    assert caught.value is failure
    assert len(seen) == len(script[failing])  # what came before it is delivered


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_a_receiver_that_fails_ends_it(num_streams: int) -> None:
    streams: Any = [Stream(index, [0] * 5, None) for index in range(num_streams)]

    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await follow(streams, receive)


@pytest.mark.parametrize("num_streams", [1, 2])
async def test_an_answer_that_the_server_cut_off_is_no_answer(num_streams: int) -> None:
    class CutOff(Stream):
        async def __anext__(self) -> Delta:
            return Delta(request_id="x", finish_reason=FinishReason.CANCELLED)

    async def receive(deltas: Sequence[IndexedDelta]) -> None:
        raise AssertionError

    with pytest.raises(DrainingError):
        await follow([CutOff(0, [], None) for _ in range(num_streams)], receive)


@pytest.mark.parametrize("num_streams", [0, 1, 3])
async def test_streams_are_closed_once(engine: Any, num_streams: int) -> None:
    submission = Submission(request_id="x", prompt_token_ids=[1], params=SamplingParams())

    async def leave_in_a_hurry() -> None:
        async with open_streams(engine, [submission] * num_streams) as streams:
            assert len(streams) == num_streams
            raise KeyError

    with pytest.raises(KeyError):
        await leave_in_a_hurry()
    assert all(stream.was_cancelled for stream in engine.streams)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def _bodies(struct: type[msgspec.Struct], needed: dict[str, Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(struct.__struct_fields__)
    return st.dictionaries(names, json_values, max_size=4).map(lambda given: needed | given)


def _mistake(work: Callable[[], None]) -> str | None:
    """The top-level field that a refusal names; any other exception fails the test."""
    try:
        work()
    except RequestError as error:
        return re.split(r"[.\[]", error.field or "")[0] or None
    return None


@settings(max_examples=200, deadline=None)
@given(_bodies(CompletionRequest, {"prompt": "x"}))
def test_any_completion_is_taken_or_refused(body: dict[str, Any]) -> None:
    def take() -> None:
        request = decode_json(msgspec.json.encode(body), msgspec.json.Decoder(CompletionRequest))
        n = requests.check_common(request, 8)
        assert requests.completion_prompts(request, 8)
        params = requests.sampling_params(
            request, SamplingParams(), max_tokens=request.max_tokens, logprobs=request.logprobs
        )
        requests.deadline(request, 0.0)
        params.validate()
        choices = requests.params_per_choice(params, n)
        assert len(choices) == n
        for choice in choices:
            choice.validate()

    assert _mistake(take) in {None, *body}


@settings(max_examples=200, deadline=None)
@given(_bodies(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}))
def test_any_chat_is_taken_or_refused(body: dict[str, Any]) -> None:
    def take() -> None:
        request = decode_json(
            msgspec.json.encode(body), msgspec.json.Decoder(ChatCompletionRequest)
        )
        requests.check_common(request, 8)
        requests.chat_max_tokens(request, None)
        requests.chat_logprobs(request)
        messages = requests.template_messages(request.messages, "system")
        assert len(messages) == len(request.messages)

    assert _mistake(take) in {None, *body}
