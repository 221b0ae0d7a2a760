"""A live request as its caller sees it: what the deltas say, and every way to leave it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from deepinfer.errors import DeadlineExceededError, DeviceError, EngineError
from deepinfer.types import Delta, FinishReason, SamplingParams

StartEngine = Callable[..., Awaitable[Any]]
SOON = 4  # turns of the event loop


async def read(stream: Any) -> list[Delta]:
    return [delta async for delta in stream]


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


# --- deltas ---


async def test_the_texts_joined_are_the_decoded_ids_and_the_last_delta_says_why(
    start_engine: StartEngine,
) -> None:
    answer = "Grüße, 世界! 👋🏽"
    engine = await start_engine(answers={"What?": answer})
    deltas = await read(engine.generate("What?", request_id="mine"))
    *earlier, last = deltas
    assert text_of(deltas) == answer == engine.tokenizer.decode(ids_of(deltas))
    assert len(earlier) > 10, "it came piece by piece"
    assert all(delta.finish_reason is delta.usage is delta.timeline is None for delta in earlier)
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert (last.finish_reason, last.stop_match) == (FinishReason.STOP, 256)
    assert last.usage is not None
    assert last.usage.prompt_tokens == 5
    assert last.usage.completion_tokens == len(ids_of(deltas)) == len(answer.encode()) + 1
    assert last.timeline is not None
    assert last.timeline.prefix_miss == "cold"
    assert not any("\ufffd" in delta.text for delta in deltas)


async def test_bytes_that_no_token_completes_are_shown_at_the_end(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(answers={"?": "日"})
    deltas = await read(engine.generate("?", SamplingParams(max_tokens=2)))
    assert text_of(deltas) == deltas[-1].text == "\ufffd"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_slow_consumer_gets_fewer_and_larger_deltas(start_engine: StartEngine) -> None:
    engine = await start_engine()
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    fast = await read(engine.generate("hello", params))
    slow = []
    async for delta in engine.generate("hello", params):
        slow.append(delta)
        await engine.turn(100)
    assert ids_of(slow) == ids_of(fast) == engine.alone("hello", 40)
    assert text_of(slow) == text_of(fast)
    assert len(slow) <= 3 < 20 < len(fast)
    chosen = [entry.token_id for delta in slow for entry in delta.logprobs or ()]
    assert chosen == ids_of(slow)


async def test_a_request_that_nobody_reads_waits_complete_for_its_reader(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(answers={"a": "done"})
    stream = engine.generate("a")
    await engine.until(lambda: engine.witness.finished)
    assert engine.stats().num_blocks_held == 0
    (only,) = await read(stream)
    assert (only.text, only.finish_reason) == ("done", FinishReason.STOP)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


# --- stops ---


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_tokens_cuts_the_text(
    start_engine: StartEngine, include: bool, slow: bool
) -> None:
    engine = await start_engine(answers={"Q": "one two STEP STOP three"})
    params = SamplingParams(stop=("never", "STOP"), include_stop=include, max_tokens=30)
    stream = engine.generate("Q", params)
    if slow:
        await engine.until(lambda: engine.witness.finished)
    deltas = await read(stream)
    assert text_of(deltas) == "one two STEP " + ("STOP" if include else "")
    assert (deltas[-1].finish_reason, deltas[-1].stop_match) == (FinishReason.STOP, "STOP")
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == len(ids_of(deltas)) == len("one two STEP STOP")
    await engine.settle()


async def test_what_began_like_a_stop_string_is_shown_in_the_end(start_engine: StartEngine) -> None:
    engine = await start_engine(answers={"Q": "so STO"})
    deltas = await read(engine.generate("Q", SamplingParams(stop=("STOP",))))
    assert (text_of(deltas), deltas[-1].stop_match) == ("so STO", 256)


async def test_stop_strings_count_only_after_min_tokens(start_engine: StartEngine) -> None:
    engine = await start_engine(answers={"Q": "x.y.z.w"})
    deltas = await read(engine.generate("Q", SamplingParams(stop=(".",), min_tokens=3)))
    assert (text_of(deltas), deltas[-1].stop_match) == ("x.y", ".")


async def test_stop_token_ids_end_the_answer_and_stay_in_it(start_engine: StartEngine) -> None:
    engine = await start_engine(answers={"Q": "abcdef"})
    many = tuple(range(10)) + (ord("d"),)  # more than the scheduler compares in its arrays
    for stop_token_ids in ((ord("d"),), many):
        deltas = await read(engine.generate("Q", SamplingParams(stop_token_ids=stop_token_ids)))
        assert (text_of(deltas), deltas[-1].stop_match) == ("abcd", ord("d"))
        assert deltas[-1].finish_reason is FinishReason.STOP
    params = SamplingParams(stop_token_ids=(ord("a"), ord("d")), min_tokens=1)
    masked = await read(engine.generate("Q", params))
    assert ids_of(masked)[0] == ord("b"), "masked until min_tokens are out"


async def test_the_end_token_counts_unless_it_is_ignored(start_engine: StartEngine) -> None:
    engine = await start_engine(answers={"Q": "hi"})
    stopped = await read(engine.generate("Q", SamplingParams(max_tokens=9)))
    assert ids_of(stopped) == [*b"hi", 256]
    params = SamplingParams(max_tokens=9, ignore_eos=True, skip_special_tokens=False)
    ignored = await read(engine.generate("Q", params))
    assert ids_of(ignored) == [*b"hi", 256, 256, 0, 0, 0, 0, 0]
    assert text_of(ignored) == "hi<|end|><|end|>\0\0\0\0\0"
    assert ignored[-1].finish_reason is FinishReason.LENGTH


# --- leaving ---


async def leave_by_break(engine: Any) -> None:
    async for _ in engine.generate("hello"):
        break


async def leave_by_an_error(engine: Any) -> None:
    async def consume() -> None:
        async for _ in engine.generate("hello"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def leave_by_aclose(engine: Any) -> None:
    stream = engine.generate("hello")
    await anext(stream)
    await stream.aclose()
    assert engine.stats().num_blocks_held == 0, "at once"
    await stream.aclose()
    assert await read(stream) == []


async def leave_by_async_with(engine: Any) -> None:
    async with engine.generate("hello") as stream:
        async for _ in stream:
            break
    assert engine.stats().num_blocks_held == 0, "at once"


async def leave_by_timeout(engine: Any) -> None:
    async def consume() -> None:
        async with asyncio.timeout(None) as timeout:
            async for _ in engine.generate("hello"):
                timeout.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        await consume()
    assert engine.stats().num_blocks_held == 0, "at once"


async def leave_by_wait_for(engine: Any) -> None:
    stream = engine.generate("hello")
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    assert engine.stats().num_blocks_held == 0, "at once"
    assert await read(stream) == []


async def leave_by_task_cancel(engine: Any) -> None:
    task = asyncio.create_task(read(engine.generate("hello")))
    await engine.turn(20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.stats().num_blocks_held == 0, "at once"


async def leave_while_the_task_does_something_else(engine: Any) -> None:
    async def consume() -> None:
        async for _ in engine.generate("hello"):
            await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await engine.turn(20)
    task.cancel()
    await asyncio.wait([task])


async def leave_in_another_thread(engine: Any) -> None:
    asyncio.get_running_loop().set_debug(True)  # complains of calls that are not thread-safe
    streams = [engine.generate("hello")]
    await anext(streams[0])
    await asyncio.to_thread(streams.clear)


async def leave_as_garbage_in_a_cycle(engine: Any) -> None:
    stream = engine.generate("hello")
    await anext(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    assert engine.stats().num_blocks_held > 0
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


async def leave_without_ever_reading(engine: Any) -> None:
    stream = engine.generate("hello")
    await engine.turn(10)
    assert engine.stats().num_blocks_held > 0
    del stream


WAYS = {
    leave_by_break: "abandoned",
    leave_by_an_error: "abandoned",
    leave_by_aclose: "closed",
    leave_by_async_with: "closed",
    leave_by_timeout: "abandoned",
    leave_by_wait_for: "abandoned",
    leave_by_task_cancel: "abandoned",
    leave_while_the_task_does_something_else: "abandoned",
    leave_in_another_thread: "abandoned",
    leave_as_garbage_in_a_cycle: "abandoned",
    leave_without_ever_reading: "abandoned",
}


@pytest.mark.parametrize("leave", WAYS, ids=lambda leave: leave.__name__)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
async def test_however_it_is_left_the_blocks_are_free_though_the_device_is_busy(
    start_engine: StartEngine, overlap: bool, leave: Callable[[Any], Awaitable[None]]
) -> None:
    engine = await start_engine(overlap=overlap)
    engine.device.hold()
    engine.device.release(1)  # the first step comes back, the second does not
    await leave(engine)
    await engine.turn(SOON)
    assert engine.device.num_outstanding > 0, "the device still holds a step"
    stats = engine.stats()
    assert (stats.num_blocks_held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    engine.check()
    assert engine.witness.cancels == [WAYS[leave]]
    (report,) = engine.witness.finished.values()
    assert report.finish_reason is FinishReason.CANCELLED
    await engine.settle()
    deltas = await read(engine.generate("hello", SamplingParams(max_tokens=5)))
    assert ids_of(deltas) == engine.alone("hello", 5), "it goes on"


async def test_a_request_that_still_waits_is_left_the_same_way(start_engine: StartEngine) -> None:
    engine = await start_engine(max_num_seqs=1)
    engine.device.hold()
    running = engine.generate("first")
    waiting = engine.generate("second")
    await engine.turn(10)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    await waiting.aclose()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 0)
    await running.aclose()
    await engine.settle()


async def test_leaving_one_of_many_changes_nothing_for_the_others(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine()
    params = SamplingParams(max_tokens=12)
    prompts = [f"prompt {number}" for number in range(8)]

    async def consume(number: int) -> list[int]:
        ids: list[int] = []
        async with engine.generate(prompts[number], params) as stream:
            async for delta in stream:
                ids += delta.token_ids
                if number % 2 and len(ids) >= number:
                    break
        return ids

    results = await asyncio.gather(*map(consume, range(8)))
    for number in range(0, 8, 2):
        assert results[number] == engine.alone(prompts[number], 12)
    assert engine.witness.cancels == ["closed"] * 4
    await engine.settle()


async def test_closing_a_finished_request_is_no_cancel(start_engine: StartEngine) -> None:
    engine = await start_engine(answers={"a": "b"})
    async with engine.generate("a") as stream:
        assert text_of(await read(stream)) == "b"
    del stream
    await engine.turn(SOON)
    assert engine.witness.cancels == []


# --- deadlines ---


async def test_a_deadline_ends_requests_that_run_and_requests_that_wait(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(max_num_seqs=1)
    engine.device.hold()
    running = engine.generate("first", timeout_s=2.0, request_id="run")
    waiting = engine.generate("second", timeout_s=1.0, request_id="wait")
    patient = engine.generate("third", SamplingParams(max_tokens=3), timeout_s=60.0)
    engine.device.release(3)
    await engine.until(lambda: ("forward", 4) in engine.device.log)
    engine.clock.advance(1.0)
    await engine.turn(SOON)
    assert engine.device.num_outstanding > 0, "the device is busy, time passes all the same"
    with pytest.raises(DeadlineExceededError, match=r"wait .* after 0 tokens"):
        await read(waiting)
    assert engine.stats().num_blocks_held > 0
    engine.clock.advance(1.0)
    await engine.turn(SOON)
    assert engine.stats().num_blocks_held == 0
    unread = await anext(running)
    assert ids_of([unread]) == engine.alone("first", 3), "what was computed is not lost"
    with pytest.raises(DeadlineExceededError, match=r"run .* after 3 tokens"):
        await anext(running)
    assert await read(running) == []
    engine.device.release()
    assert len(ids_of(await read(patient))) == 3
    assert engine.witness.cancels == ["deadline", "deadline"]
    assert engine.witness.finished["wait"].finish_reason is FinishReason.DEADLINE
    assert engine.witness.finished["wait"].time_to_first_token_s is None
    assert engine.witness.finished["run"].usage.completion_tokens == 3
    await engine.settle()


# --- failing steps ---


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
async def test_a_failed_step_takes_its_rows_with_it_and_nobody_else(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = await start_engine(overlap=overlap, max_num_seqs=2)
    engine.device.fail(3)
    params = SamplingParams(max_tokens=6)
    streams = [engine.generate(f"prompt {number}", params) for number in range(4)]
    results = await asyncio.gather(*map(read, streams), return_exceptions=True)
    for number, result in enumerate(results):
        if number < 2:  # these had the slots
            assert isinstance(result, DeviceError)
            assert "Step 3 with 2 rows failed" in str(result)
            assert isinstance(result, EngineError)
        else:
            assert ids_of(result) == engine.alone(f"prompt {number}", 6)
    again = await read(engine.generate("prompt 0", params))
    assert ids_of(again) == engine.alone("prompt 0", 6)
    assert engine.state == "ready"
    reasons = [engine.witness.finished[f"req-{number}"].finish_reason for number in range(5)]
    assert reasons == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH] * 3
    await engine.settle()
