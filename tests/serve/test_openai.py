"""The OpenAI endpoints over real HTTP: answers, streams, and what the engine is asked for."""

from __future__ import annotations

from typing import Any

import pytest


async def test_chat_answers(front: Any) -> None:
    reply = await front.chat(max_tokens=5, seed=1)
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert front.engine.tokenizer.encode(prompt) == front.engine.streams[0].prompt_token_ids
    num_prompt = len(front.engine.streams[0].prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_completion_answers_and_tells_where_time_went(front: Any) -> None:
    reply = await front.complete("Say", max_tokens=100)
    assert reply.json["choices"][0]["text"] == "Hello, world."
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert reply.json["timings"] == {
        "queued_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
        "total_ms": 6.0,
        "cached_tokens": 2,
        "prefix_miss": "diverged",
        "preemptions": 1,
        "stalls_ms": {"preempted": 0.5},
    }
    header = reply.headers["x-deepinfer-timeline"]
    assert "prefill_ms=2.0" in header
    assert "stall_preempted_ms=0.5" in header


async def test_chat_stream(front: Any) -> None:
    reply = await front.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert text == ["", "H", "e", "l"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert chunks[-1]["timings"]["total_ms"] == 6.0
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["timings"]["total_ms"] == 6.0


async def test_completion_stream_without_usage_ends_with_timings(front: Any) -> None:
    reply = await front.complete("Hi", max_tokens=2, stream=True)
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "He"
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["timings"]["queued_ms"] == 1.0


async def test_plain_chunks_have_the_fields_of_encoded_ones(front: Any) -> None:
    """The fast path writes bytes by hand; a request for token ids takes the other path."""
    for call in (front.chat, front.complete):
        plain = (await call(max_tokens=3, stream=True)).events[:-1]
        encoded = (await call(max_tokens=3, stream=True, return_token_ids=True)).events[:-1]
        expected = [chunk["choices"][0] for chunk in encoded]
        for chunk in expected:
            chunk.pop("token_ids", None)
            chunk.pop("prompt_token_ids", None)
        texts = [choice for choice in expected if choice.get("text") != ""]
        assert [chunk["choices"][0] for chunk in plain] == texts


async def test_text_is_escaped_like_json(front: Any) -> None:
    front.engine.answer = 'a"b\\c\n\r\t\x00\u2028é漢😀'
    for stream in (True, False):
        reply = await front.complete("x", max_tokens=100, stream=stream)
        if stream:
            text = "".join(chunk["choices"][0]["text"] for chunk in reply.events[:-1])
        else:
            text = reply.json["choices"][0]["text"]
        assert text == front.engine.answer


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([65, 66], [[65, 66]]),
        ([[65, 66], [67]], [[65, 66], [67]]),
    ],
)
async def test_prompt_takes_four_forms(front: Any, prompt: Any, expected: list[Any]) -> None:
    reply = await front.complete(prompt, max_tokens=1)
    assert reply.status == 200
    encode = front.engine.tokenizer.encode
    asked = [stream.prompt_token_ids for stream in front.engine.streams]
    assert asked == [encode(entry) if isinstance(entry, str) else entry for entry in expected]
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(len(expected)))


async def test_prompts_times_n_choices_count_each_prompt_once(front: Any) -> None:
    reply = await front.complete(["abc", "de"], n=2, seed=2**64 - 1, max_tokens=2)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    assert [stream.params.seed for stream in front.engine.streams] == [2**64 - 1, 0] * 2
    assert reply.json["usage"]["prompt_tokens"] == 5
    assert reply.json["usage"]["completion_tokens"] == 8
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_choices_stream_side_by_side(front: Any) -> None:
    reply = await front.chat(n=3, max_tokens=4, stream=True, seed=5)
    texts = dict.fromkeys(range(3), "")
    finished = []
    for chunk in reply.events[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == dict.fromkeys(range(3), "Hell")
    assert sorted(finished) == [0, 1, 2]
    assert [stream.params.seed for stream in front.engine.streams] == [5, 6, 7]


async def test_every_parameter_reaches_the_engine(front: Any) -> None:
    reply = await front.complete(
        "x",
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=3,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=2,
        priority=-1,
        timeout=2.5,
        cache_salt="tenant",
    )
    assert reply.status == 200
    params = front.engine.streams[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (3, 9, 2)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (4,))
    assert (params.ignore_eos, params.include_stop, params.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert params.logprobs == 2
    call = front.engine.calls[0]
    assert (call["priority"], call["timeout_s"], call["cache_salt"]) == (-1, 2.5, "tenant")


async def test_what_is_not_given_is_the_checkpoints(front: Any) -> None:
    await front.chat()
    await front.complete()
    chat, completion = (stream.params for stream in front.engine.streams)
    assert (chat.temperature, chat.top_p, chat.max_tokens) == (0.6, 0.9, None)
    assert completion.max_tokens == 16


async def test_deadline_is_capped_by_the_servers(serve: Any) -> None:
    async with serve(request_timeout_s=5) as front:
        await front.chat()
        await front.chat(timeout=2)
        await front.chat(timeout=20)
        assert [call["timeout_s"] for call in front.engine.calls] == [5, 2, 5]


async def test_chat_logprobs_carry_bytes(front: Any) -> None:
    front.engine.answer = "é"
    body = {"logprobs": True, "top_logprobs": 1}
    content = (await front.chat(**body)).json["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["token"] == "\ufffd"
    assert content[0]["logprob"] == -0.25
    assert len(content[0]["top_logprobs"]) == 1
    chunks = (await front.chat(stream=True, **body)).events[:-1]
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_count_characters(front: Any, stream: bool) -> None:
    front.engine.answer = "aéb"
    reply = await front.complete("x", logprobs=1, max_tokens=9, stream=stream)
    bodies = reply.events[:-1] if stream else [reply.json]
    parts = [body["choices"][0]["logprobs"] for body in bodies]
    tokens, offsets, logprobs, tops = (
        [entry for part in parts for entry in part[field]]
        for field in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    )
    assert tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert offsets == [0, 1, 1, 2]
    assert logprobs == [-0.25] * 4
    assert len(tops) == 4
    assert tops[0]["a"] == -0.25


async def test_logprobs_zero_has_no_alternatives(front: Any) -> None:
    reply = await front.complete("x", logprobs=0)
    assert reply.json["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_prompt(front: Any, stream: bool) -> None:
    reply = await front.complete(["ab", "c"], echo=True, max_tokens=2, stream=stream)
    texts = ["", ""]
    for body in reply.events[:-1] if stream else [reply.json]:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abHe", "cHe"]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_on_demand(front: Any, stream: bool) -> None:
    ids = front.engine.tokenizer.encode("Hel")
    chat = await front.chat(max_tokens=3, return_token_ids=True, stream=stream)
    completion = await front.complete(
        [[65], [66]], max_tokens=3, return_token_ids=True, stream=stream
    )
    chat_bodies = chat.events[:-1] if stream else [chat.json]
    assert chat_bodies[0]["prompt_token_ids"] == front.engine.streams[0].prompt_token_ids
    seen = [token for body in chat_bodies for token in body["choices"][0].get("token_ids", [])]
    assert seen == ids
    prompts = [
        choice["prompt_token_ids"]
        for body in (completion.events[:-1] if stream else [completion.json])
        for choice in body["choices"]
        if "prompt_token_ids" in choice
    ]
    assert prompts == [[65], [66]]


async def test_special_tokens_in_a_message_stay_text(front: Any) -> None:
    await front.chat("<|im_end|>")
    special = front.engine.tokenizer.special_token_ids
    ids = front.engine.streams[0].prompt_token_ids
    assert sum(token in special for token in ids) == 3  # the template's own


async def test_content_parts_and_developer_role(front: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    reply = await front.post("/v1/chat/completions", {"messages": messages})
    assert reply.status == 200
    text = front.engine.tokenizer.decode(front.engine.streams[0].prompt_token_ids)
    assert text == "system\nBe brief.\nuser\na\nb\nassistant\n"


async def test_continuing_the_final_message(front: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure, "}]
    body = {"messages": messages, "continue_final_message": True}
    assert (await front.post("/v1/chat/completions", body)).status == 200
    text = front.engine.tokenizer.decode(front.engine.streams[0].prompt_token_ids)
    assert text.endswith("assistant\nSure, ")


async def test_models(serve: Any) -> None:
    async with serve(model_aliases=("org/alias",)) as front:
        reply = await front.get("/v1/models")
        assert [card["id"] for card in reply.json["data"]] == ["scripted", "org/alias"]
        card = (await front.get("/v1/models/org/alias")).json
        assert (card["id"], card["root"], card["max_model_len"]) == ("org/alias", "scripted", 512)
        assert (await front.chat(model="org/alias")).json["model"] == "scripted"
        for reply in (await front.get("/v1/models/nope"), await front.chat(model="nope")):
            assert reply.status == 404
            assert reply.error["code"] == "model_not_found"
            assert reply.error["param"] == "model"
            assert "scripted" in reply.error["message"]


async def test_unknown_fields_are_accepted(front: Any) -> None:
    reply = await front.chat(user="u", metadata={"a": 1}, store=False, something_new=[1])
    assert reply.status == 200
