"""Tokens, states, the document and the page."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

import deepinfer
from deepinfer.client import EngineState


async def test_tokenize_and_back(front: Any) -> None:
    encode = front.engine.tokenizer.encode
    reply = (await front.post("/tokenize", {"prompt": "aé", "return_token_strs": True})).json
    assert reply["tokens"] == encode("aé")
    assert (reply["count"], reply["max_model_len"]) == (3, 512)
    assert reply["token_strs"][0] == "a"
    assert (await front.post("/tokenize", {"prompt": "a"})).json["token_strs"] is None
    back = await front.post("/detokenize", {"tokens": reply["tokens"]})
    assert back.json == {"prompt": "aé"}


async def test_tokenize_messages(front: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    reply = await front.post("/tokenize", body)
    text = front.engine.tokenizer.decode(reply.json["tokens"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nx<|im_end|>\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_bad_tokens(front: Any, path: str, body: dict[str, Any], param: str) -> None:
    reply = await front.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_long_texts_are_encoded_beside_the_loop(serve: Any, engine: Any) -> None:
    """While the encoder stands still, the server answers."""
    standing, go_on = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text: str, **options: Any) -> list[int]:
        if len(text) > 100:
            standing.set()
            assert go_on.wait(10)
        return encode(text, **options)  # type: ignore[no-any-return]

    engine.tokenizer.encode = slow_encode
    async with serve(encode_in_thread_characters=100) as front, asyncio.TaskGroup() as group:
        asking = group.create_task(front.complete("x" * 101))
        await asyncio.to_thread(standing.wait, 10)
        assert (await front.get("/health")).status == 200
        assert (await front.complete("short")).status == 200
        go_on.set()
        assert (await asking).status == 200


@pytest.mark.parametrize("state", list(EngineState))
async def test_states(front: Any, state: EngineState) -> None:
    front.engine.state = state
    health, ready = await front.get("/health"), await front.get("/ready")
    assert health.status == (503 if state is EngineState.FAILED else 200)
    assert ready.status == (200 if state is EngineState.READY else 503)
    assert health.json["state"] == ready.json["state"] == state
    assert ("Retry-After" in ready.headers) == (ready.status == 503)
    for path in ("/", "/metrics", "/version", "/openapi.json"):
        assert (await front.get(path)).status == 200


async def test_version(front: Any) -> None:
    assert (await front.get("/version")).json == {"version": deepinfer.__version__}


async def test_page_tells_what_runs(front: Any) -> None:
    front.engine.model_name = "<b>odd</b>"
    reply = await front.get("/")
    assert reply.headers["Content-Type"].startswith("text/html")
    assert "&lt;b&gt;odd&lt;/b&gt;" in reply.text
    assert "curl" in reply.text
    assert "/v1/chat/completions" in reply.text


async def test_document_lists_every_route(front: Any) -> None:
    document = (await front.get("/openapi.json")).json
    listed = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert ("POST", "/v1/chat/completions") in listed
    assert ("GET", "/v1/models/{model}") in listed
    page = (await front.get("/")).text
    on_page = re.findall(r"<td>(\w+)</td><td><code>([^<]+)</code>", page)
    assert set(on_page) == listed
    for method, path in listed:  # every one is there: not "nothing at this path"
        reply = await front.call(method, path.replace("{model}", "scripted"), json={})
        assert reply.status in (200, 400), (method, path)


async def test_document_has_no_dangling_references(front: Any) -> None:
    text = (await front.get("/openapi.json")).text
    schemas = json.loads(text)["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert {"ChatCompletionRequest", "ErrorResponse", "ChatCompletionChunk"} <= names
    assert names <= set(schemas)


async def test_document_says_what_is_not_served(front: Any) -> None:
    schemas = (await front.get("/openapi.json")).json["components"]["schemas"]
    tools = schemas["ChatCompletionRequest"]["properties"]["tools"]
    assert tools["description"] == "Not supported yet: refused unless it is null or []."
    assert "description" not in schemas["ChatCompletionRequest"]["properties"]["n"]
    assert "Not supported" in schemas["CompletionRequest"]["properties"]["suffix"]["description"]


async def test_documented_ranges_are_the_enforced_ones(front: Any) -> None:
    schemas = (await front.get("/openapi.json")).json["components"]["schemas"]
    checked = 0
    for name, path, base in (
        (
            "ChatCompletionRequest",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
        ),
        ("CompletionRequest", "/v1/completions", {"prompt": "x"}),
    ):
        for field, schema in schemas[name]["properties"].items():
            for option in schema.get("anyOf", [schema]):
                for bound, inside, outside in (
                    ("minimum", 0, -1),
                    ("maximum", 0, 1),
                    ("exclusiveMinimum", 0.5, 0),
                ):
                    if bound not in option:
                        continue
                    limit = option[bound]
                    extra = {"logprobs": True} if field == "top_logprobs" else {}
                    good = await front.post(path, base | extra | {field: limit + inside})
                    bad = await front.post(path, base | extra | {field: limit + outside})
                    assert good.status == 200, (field, bound, good.text)
                    assert (bad.status, bad.error["param"]) == (400, field), (field, bound)
                    checked += 1
    assert checked >= 20


async def test_documented_events_are_the_sent_ones(front: Any) -> None:
    document = (await front.get("/openapi.json")).json
    for path, kind in (
        ("/v1/completions", "CompletionResponse"),
        ("/v1/chat/completions", "ChatCompletionChunk"),
    ):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        done, chunk = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
        assert done == {"const": (await front.chat(stream=True)).events[-1]}
        assert chunk["contentMediaType"] == "application/json"
        kinds = [option["$ref"].rsplit("/", 1)[-1] for option in chunk["contentSchema"]["oneOf"]]
        assert kinds == [kind, "ErrorResponse"]


async def test_documented_minima_of_lists_are_enforced(front: Any) -> None:
    schemas = (await front.get("/openapi.json")).json["components"]["schemas"]
    messages = schemas["ChatCompletionRequest"]["properties"]["messages"]
    prompts = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1]
    assert (messages["minItems"], prompts["minItems"]) == (1, 1)
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["minimum"] == 0
    for path, body in (
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": []}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert (await front.post(path, body)).status == 400
