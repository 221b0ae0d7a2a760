"""OpenAI's own Python client against the front, over a listening socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

USER: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


def _client(front: Any, **options: Any) -> openai.AsyncOpenAI:
    options = {"api_key": "none", "max_retries": 0} | options
    return openai.AsyncOpenAI(base_url=f"{front.server.url}/v1", **options)


async def test_chat_and_completions(front: Any) -> None:
    async with _client(front) as client:
        chat = await client.chat.completions.create(
            model="scripted", messages=USER, logprobs=True, top_logprobs=2, max_completion_tokens=5
        )
        assert chat.choices[0].message.content == "Hello"
        assert chat.choices[0].finish_reason == "length"
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert chat.choices[0].logprobs.content[0].bytes == [ord("H")]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 2
        completion = await client.completions.create(model="scripted", prompt="x", logprobs=1)
        assert completion.choices[0].text == "Hello, world."
        models = await client.models.list()
        assert [model.id for model in models.data] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"


async def test_streams(front: Any) -> None:
    async with _client(front) as client:
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == "Hello, world."
        assert usage is not None
        assert usage.completion_tokens == 13
        parts = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(
                model="scripted", prompt="x", stream=True
            )
        ]
        assert "".join(parts) == "Hello, world."


async def test_synchronous_client(front: Any) -> None:
    def use() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{front.server.url}/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="scripted", messages=USER)
            stream = client.chat.completions.create(model="scripted", messages=USER, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return answer.choices[0].message.content, streamed

    assert await asyncio.to_thread(use) == ("Hello, world.", "Hello, world.")


async def test_leaving_a_stream_cancels(front: Any) -> None:
    front.engine.gate.hold()
    front.engine.gate.let(2)
    async with _client(front) as client:
        stream = await client.chat.completions.create(model="scripted", messages=USER, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(10):
            await front.engine.streams[0].closed.wait()
    assert front.engine.streams[0].was_cancelled


async def test_its_exceptions(serve: Any, engine: Any) -> None:
    async with serve(api_keys=("right",)) as front:
        async with _client(front, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with _client(front, api_key="right") as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="other", messages=USER)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(
                    model="scripted", messages=USER, temperature=-1
                )
            assert bad.value.param == "temperature"
            engine.failure, engine.fail_after = RuntimeError("secret"), 2
            stream = await client.chat.completions.create(
                model="scripted", messages=USER, stream=True
            )
            with pytest.raises(openai.APIError, match="Something broke"):
                async for _ in stream:
                    pass


async def test_64_at_once(front: Any) -> None:
    async with _client(front) as client, asyncio.TaskGroup() as group:

        async def ask(index: int) -> int:
            answer = await client.completions.create(
                model="scripted", prompt="x" * index, max_tokens=index % 13 + 1
            )
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        tasks = [group.create_task(ask(index)) for index in range(1, 65)]
    assert [task.result() for task in tasks] == list(range(1, 65))
