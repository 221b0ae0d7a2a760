"""Every mistake gets its status, names the field at fault, and hurts nobody else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from deepinfer.client import EngineState
from deepinfer.errors import (
    DeadlineExceededError,
    DeviceError,
    EngineClosedError,
    QueueFullError,
)

USER = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

BAD_CHATS = [
    # fields of the body, param of the error
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "pope", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"priority": "high"}, "priority"),
    ({"model": 5}, "model"),
]
NOT_SERVED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "best_of": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_grammar": "a",
    "guided_choice": ["a"],
    "prompt_logprobs": 1,
    "use_beam_search": True,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "truncate_prompt_tokens": 5,
}
CHAT_NOT_SERVED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "chat_template": "{{ 1 }}",
}
NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "best_of": 1,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "suffix": None,
    "n": 1,
}
BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt[1]"),
    ({"prompt": [[5], "a"]}, "prompt[1]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
async def test_bad_chat_names_the_field(front: Any, fields: dict[str, Any], param: str) -> None:
    reply = await front.post(CHAT, {"messages": USER} | fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.text
    assert reply.error["type"] == "invalid_request_error"
    assert front.engine.streams == []


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
async def test_bad_completion_names_the_field(
    front: Any, fields: dict[str, Any], param: str
) -> None:
    reply = await front.post(COMPLETIONS, {"prompt": "x"} | fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.text


async def test_a_number_out_of_range_is_not_a_wrong_type(front: Any) -> None:
    body = b'{"prompt": "x", "temperature": 1e999}'
    headers = {"Content-Type": "application/json"}
    reply = await front.call("POST", "/v1/completions", data=body, headers=headers)
    assert (reply.status, reply.error["param"]) == (400, "temperature")
    assert "type" not in reply.error["message"]


async def test_prompts_times_answers_are_bounded(serve: Any) -> None:
    async with serve(max_prompts=4) as front:
        assert (await front.post("/v1/completions", {"prompt": ["x"] * 2, "n": 2})).status == 200
        reply = await front.post("/v1/completions", {"prompt": ["x"] * 2, "n": 3})
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert "2 prompts, times n = 3" in reply.error["message"]


async def test_missing_fields_are_named(front: Any) -> None:
    for path, param in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        reply = await front.post(path, {"model": "scripted"})
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "missing" in reply.error["message"]


@pytest.mark.parametrize("field", NOT_SERVED | CHAT_NOT_SERVED)
async def test_what_is_not_served_is_refused_by_name(front: Any, field: str) -> None:
    value = (NOT_SERVED | CHAT_NOT_SERVED)[field]
    reply = await front.post(CHAT, {"messages": USER, field: value})
    assert (reply.status, reply.error["param"]) == (400, field)
    assert "not supported yet" in reply.error["message"]
    if field in NOT_SERVED:
        reply = await front.post(COMPLETIONS, {"prompt": "x", field: value})
        assert (reply.status, reply.error["param"]) == (400, field)


async def test_neutral_values_of_unserved_fields_pass(front: Any) -> None:
    assert (await front.chat(**NEUTRAL)).status == 200
    assert (await front.complete(**NEUTRAL)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
)
async def test_broken_json_is_the_clients_mistake(front: Any, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = await front.call("POST", COMPLETIONS, data=body, headers=headers)
    assert reply.status == 400, reply.text
    assert reply.error["type"] == "invalid_request_error"
    assert (await front.complete()).status == 200


async def test_prompt_too_long_gives_both_numbers(front: Any) -> None:
    reply = await front.complete([1] * 600)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "600" in reply.error["message"]
    assert "511" in reply.error["message"]
    assert reply.error["code"] == "context_length_exceeded"
    reply = await front.chat("x" * 600)
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFullError("1024 requests wait.", 3.2), 503, "queue_full"),
        (DeviceError("The device is gone."), 500, "engine_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
        (ConnectionResetError("secret"), 500, "internal_error"),  # the engine's, not the client's
    ],
)
async def test_refused_at_once(
    front: Any, stream: bool, refusal: Exception, status: int, code: str
) -> None:
    front.engine.refusal = refusal
    reply = await front.chat(stream=stream)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert "secret" not in reply.text
    if status == 503:
        assert reply.headers["Retry-After"] == "4"


async def test_one_refusal_of_several_cancels_the_others(front: Any) -> None:
    front.engine.refusal, front.engine.refuse_from = QueueFullError("Full.", 1.0), 2
    reply = await front.chat(n=4)
    assert reply.status == 503
    assert [stream.was_cancelled for stream in front.engine.streams] == [True, True]


FAILURES = [
    (DeadlineExceededError("2 s have passed."), 504, "deadline_exceeded"),
    (DeviceError("Step 7 failed."), 500, "engine_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
async def test_failing_before_the_first_token_has_a_status(
    front: Any, failure: Exception, status: int, code: str, n: int, stream: bool
) -> None:
    front.engine.failure = failure
    reply = await front.chat(stream=stream, n=n)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.error["message"] == str(failure)
    assert all(stream.closed.is_set() for stream in front.engine.streams)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
async def test_failing_in_the_middle(
    front: Any, failure: Exception, status: int, code: str, n: int
) -> None:
    front.engine.failure, front.engine.fail_after = failure, 3
    assert (await front.complete(n=n)).status == status
    reply = await front.complete(stream=True, n=n)
    assert reply.status == 200
    *chunks, error = reply.events
    assert error["error"]["code"] == code
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith("H")
    assert all(stream.closed.is_set() for stream in front.engine.streams)


@pytest.mark.parametrize("n", [1, 3])
async def test_an_engine_closed_meanwhile_is_a_server_that_stops(
    front: Any, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    front.engine.failure = EngineClosedError("The engine was closed.")
    for stream in (False, True):
        reply = await front.chat(n=n, stream=stream)
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert "Retry-After" in reply.headers
    front.engine.fail_after = 3
    reply = await front.chat(n=n, stream=True)
    assert (reply.status, reply.events[-1]["error"]["code"]) == (200, "draining")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("state", [EngineState.NEW, EngineState.LOADING])
async def test_loading(front: Any, state: EngineState) -> None:
    front.engine.state = state
    assert (await front.get("/health")).status == 200
    for reply in (
        await front.get("/ready"),
        await front.chat(),
        await front.complete(),
        await front.get("/v1/models"),
        await front.post("/tokenize", {"prompt": "x"}),
        await front.post("/detokenize", {"tokens": [1]}),
    ):
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1


async def test_draining(front: Any) -> None:
    front.engine.gate.hold()
    running = asyncio.create_task(front.chat())
    await front.engine.gate.waiting.wait()
    await front.engine.drain()
    assert (await front.get("/ready")).status == 503
    assert (await front.get("/health")).status == 200
    refused = await front.chat()
    assert (refused.status, refused.error["code"]) == (503, "draining")
    assert refused.headers["Retry-After"] == "8"
    front.engine.gate.let(100)
    assert (await running).status == 200


async def test_failed_for_good(front: Any) -> None:
    front.engine.state = EngineState.FAILED
    assert (await front.get("/health")).status == 503
    assert (await front.get("/ready")).status == 503
    assert (await front.chat()).status == 500


async def test_without_a_chat_template(front: Any) -> None:
    front.engine.chat_template = None
    reply = await front.chat()
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "/v1/completions" in reply.error["message"]
