"""The front over the real engine and scheduler; only the device's arithmetic is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepinfer.clock import RealClock
from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.runtime.scripted import ScriptedDevice, hashed_next_token
from deepinfer.serve.metrics import PrometheusObserver
from deepinfer.step import CacheSpec

MODEL_LENGTH = 256


@pytest.fixture
def pace() -> SimpleNamespace:
    return SimpleNamespace(step_s=0.0)


@pytest.fixture
def device(byte_backend: Any, pace: SimpleNamespace) -> ScriptedDevice:
    """Goes on with letters that depend on what stands before them."""
    letters = np.array([byte_backend.token_to_id(chr(97 + i)) for i in range(26)])
    choose = hashed_next_token(26)
    return ScriptedDevice(
        CacheSpec(block_tokens=8, block_bytes=64),
        num_blocks=200,
        num_slots=5,
        next_token=lambda token_ids: int(letters[choose(token_ids)]),
        clock=RealClock(),
        step_time=lambda plan: pace.step_s,
    )


@pytest.fixture
async def real_front(
    serve: Any,
    device: ScriptedDevice,
    byte_backend: Any,
    chat_template_source: str,
    tmp_path: Path,
) -> AsyncIterator[Any]:
    path = tmp_path / "tokenizer.json"
    byte_backend.save(str(path))
    checkpoint = SimpleNamespace(
        name="letters",
        config={},
        generation_config={"eos_token_id": byte_backend.token_to_id("<|im_end|>")},
        chat_template=chat_template_source,
        tokenizer_json=path,
        tokenizer_config={},
        gguf_metadata=None,
    )
    built: Any = SimpleNamespace(
        device=device,
        checkpoint=checkpoint,
        vocab_size=258,
        max_model_len=MODEL_LENGTH,
        explanation=(),
    )
    observer = PrometheusObserver()
    config = EngineConfig(block_tokens=8, max_num_seqs=4, max_waiting_requests=8)
    async with Engine(config, observer=observer, build=lambda *_: built) as engine:
        async with serve(other_engine=engine, observer=observer) as front:
            yield front
        engine.check()
        assert engine.stats().num_blocks_held == 0
    assert device.violations == []


async def test_streamed_and_at_once_are_the_same(real_front: Any) -> None:
    at_once = await real_front.chat("Tell me", max_tokens=40)
    streamed = await real_front.chat("Tell me", max_tokens=40, stream=True)
    text = at_once.json["choices"][0]["message"]["content"]
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed.events[:-1]]
    assert len(text) == 40
    assert "".join(parts) == text
    assert streamed.events[-2]["timings"]["cached_tokens"] > 0  # the first request's prompt


async def test_stop_strings_and_their_report(real_front: Any) -> None:
    text = (await real_front.complete("x", max_tokens=30)).json["choices"][0]["text"]
    stop = text[10:13]
    for include in (False, True):
        reply = await real_front.complete(
            "x", max_tokens=30, stop=stop, include_stop_str_in_output=include
        )
        choice = reply.json["choices"][0]
        assert choice["text"] == text[: text.index(stop)] + (stop if include else "")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_more_choices_than_slots(real_front: Any) -> None:
    reply = await real_front.chat(n=6, max_tokens=5, stream=True)
    lengths = [0] * 6
    for chunk in reply.events[:-1]:
        choice = chunk["choices"][0]
        lengths[choice["index"]] += len(choice["delta"].get("content", ""))
    assert lengths == [5] * 6


async def test_too_long_and_out_of_vocabulary(real_front: Any) -> None:
    reply = await real_front.complete([1] * MODEL_LENGTH)
    assert reply.status == 400
    assert str(MODEL_LENGTH) in reply.error["message"]
    assert str(MODEL_LENGTH - 1) in reply.error["message"]
    reply = await real_front.complete([258])
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    reply = await real_front.complete("x", stop_token_ids=[999])
    assert (reply.status, reply.error["param"]) == (400, "stop_token_ids")
    assert (await real_front.complete("")).status == 400


async def _leave_after_first_token(front: Any, body: dict[str, Any]) -> None:
    data = json.dumps(body | {"stream": True}).encode()
    reader, writer = await front.open_socket()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
    )
    await reader.readuntil(b'"text":')
    writer.transport.abort()


async def test_a_client_that_leaves_frees_its_blocks(
    real_front: Any, device: ScriptedDevice
) -> None:
    gone = asyncio.Event()
    real_front.observer.on_cancel = lambda cause: gone.set()
    await _leave_after_first_token(real_front, {"prompt": "x" * 50, "max_tokens": 200, "n": 1})
    async with asyncio.timeout(10):
        await gone.wait()
    assert real_front.engine.stats().num_running == 0
    assert real_front.engine.stats().num_blocks_held == 0


async def test_while_a_step_hangs_everything_else_is_served(
    real_front: Any, device: ScriptedDevice
) -> None:
    device.hold()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(real_front.chat(max_tokens=3))
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/"):
            assert (await real_front.get(path)).status == 200
        assert (await real_front.post("/tokenize", {"prompt": "x"})).status == 200
        device.release()
        assert (await waiting).status == 200


async def test_full_queue(real_front: Any, device: ScriptedDevice) -> None:
    device.hold()
    reply = await real_front.complete(["x"] * 20, max_tokens=5)
    assert (reply.status, reply.error["code"]) == (503, "queue_full")
    assert int(reply.headers["Retry-After"]) >= 1
    device.release()
    assert (await real_front.complete("x")).status == 200


async def test_a_failed_step_hurts_only_its_own(real_front: Any, device: ScriptedDevice) -> None:
    assert (await real_front.complete("x", max_tokens=3)).status == 200
    first = real_front.engine.stats().num_steps
    for number in range(first, first + 10):
        device.fail(number)
    reply = await real_front.complete("y", max_tokens=3)
    assert (reply.status, reply.error["code"]) == (500, "engine_error")
    while real_front.engine.stats().num_steps < first + 10:
        assert (await real_front.complete("y", max_tokens=1)).status in (200, 500)
    assert (await real_front.complete("y", max_tokens=3)).status == 200


async def test_deadline(real_front: Any, pace: SimpleNamespace) -> None:
    pace.step_s = 0.01  # 200 tokens would take 2 s
    fields = {"max_tokens": 200, "timeout": 0.5}
    reply = await real_front.complete("x", **fields)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
    *chunks, last = (await real_front.complete("x", stream=True, **fields)).events
    assert last["error"]["code"] == "deadline_exceeded"
    assert 0 < len(chunks) < 200


async def test_draining_finishes_what_runs(real_front: Any, device: ScriptedDevice) -> None:
    device.hold()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(real_front.chat(max_tokens=30, stream=True))
        while real_front.engine.stats().num_running + real_front.engine.stats().num_waiting == 0:
            assert (await real_front.get("/health")).status == 200
        draining = group.create_task(real_front.engine.drain())
        while (await real_front.get("/ready")).status == 200:
            pass
        refused = await real_front.chat()
        assert (refused.status, refused.error["code"]) == (503, "draining")
        device.release()
        assert (await running).events[-1] == "[DONE]"
        assert await draining


async def test_closing_the_engine_ends_its_streams(real_front: Any, device: ScriptedDevice) -> None:
    device.hold()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(real_front.chat(max_tokens=30))
        while real_front.engine.stats().num_running + real_front.engine.stats().num_waiting == 0:
            assert (await real_front.get("/health")).status == 200
        device.release()
        await real_front.engine.aclose()
        assert (await running).status in (200, 503)


async def test_the_metrics_count_what_was_generated(real_front: Any) -> None:
    await real_front.complete("x", max_tokens=7)
    text = (await real_front.get("/metrics")).text
    labels = 'model_name="letters"'
    assert f"deepinfer:generation_tokens_total{{{labels}}} 7.0" in text
    assert f'deepinfer:request_success_total{{finished_reason="length",{labels}}} 1.0' in text
    assert f"deepinfer:inter_token_latency_seconds_count{{{labels}}} 6.0" in text
    assert f"deepinfer:time_to_first_token_seconds_count{{{labels}}} 1.0" in text
