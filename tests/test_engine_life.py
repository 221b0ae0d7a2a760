"""An engine's life and death: loading, draining, closing, failing, and what is left: nothing."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.config import EngineConfig
from deepinfer.engine import Engine
from deepinfer.errors import (
    CheckpointError,
    ConfigError,
    DeepinferError,
    DrainingError,
    EngineClosedError,
    EngineError,
    ModelError,
)
from deepinfer.types import FinishReason, SamplingParams

StartEngine = Callable[..., Awaitable[Any]]
MakeEngine = Callable[..., Any]
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


async def ids_of(stream: Any) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


# --- draining ---


async def test_draining_refuses_newcomers_and_lets_the_others_finish(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(max_num_seqs=1)
    engine.device.hold()
    streams = [engine.generate("running", SHORT), engine.generate("waiting", SHORT)]
    await engine.turn(10)
    drains = [asyncio.create_task(engine.drain(60.0)) for _ in range(2)]
    await engine.turn()
    assert engine.state == "draining"
    with pytest.raises(DrainingError, match="shutting down") as caught:
        engine.generate("new", SHORT)
    assert caught.value.retry_after_s > 0
    engine.device.release()
    assert [len(await ids_of(stream)) for stream in streams] == [4, 4]
    assert await asyncio.gather(*drains) == [True, True]
    assert engine.witness.cancels == []
    assert await engine.drain(), "again, at once"


async def test_a_drain_that_takes_too_long_cuts_the_rest_off(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.device.hold()
    stream = engine.generate("slow", SHORT)
    await engine.turn(10)
    assert await engine.drain(0.0) is False
    assert engine.stats().num_blocks_held == 0
    (last,) = [delta async for delta in stream]
    assert last.finish_reason is FinishReason.CANCELLED
    assert engine.witness.cancels == ["shutdown"]
    await engine.settle()


async def test_draining_an_idle_engine_is_done_at_once(start_engine: StartEngine) -> None:
    engine = await start_engine(drain_timeout_s=0.0)
    assert await engine.drain() is True


# --- before, after, again ---


async def test_outside_of_its_life_it_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for ask in (lambda: engine.generate("Hi"), engine.explain, lambda: engine.tokenizer):
        with pytest.raises(EngineClosedError, match=r"is new; it answers between start\(\)"):
            ask()
    assert engine.stats().num_blocks == 0
    async with engine:
        assert engine.state == "ready"
        assert engine.explain()[0] == "model: a script"
        with pytest.raises(EngineClosedError, match="start"):
            await engine.start()
        await ids_of(engine.generate("Hi", SHORT))
    assert (engine.state, engine.closed) == ("closed", True)
    with pytest.raises(EngineClosedError, match="is closed"):
        engine.generate("Hi")
    with pytest.raises(EngineClosedError, match="make a new one"):
        await engine.start()
    await engine.aclose()


async def test_an_engine_that_never_started_can_be_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await engine.start()


def test_a_wrong_setting_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(EngineConfig(max_num_seqs=0))
    assert caught.value.field == "max_num_seqs"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
async def test_closing_while_the_device_is_busy_ends_every_request(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = await start_engine(max_num_seqs=1, overlap=overlap)
    engine.device.hold()
    running = asyncio.create_task(ids_of(engine.generate("running")))
    waiting = asyncio.create_task(ids_of(engine.generate("waiting")))
    await engine.turn(10)
    await asyncio.gather(*(engine.aclose() for _ in range(3)))
    for task in (running, waiting):
        with pytest.raises(EngineClosedError, match="closed while request"):
            await task
    assert engine.stats().num_blocks_held == 0
    assert engine.witness.cancels == ["shutdown", "shutdown"]
    engine.check()


async def test_a_cancelled_aclose_goes_on(start_engine: StartEngine) -> None:
    engine = await start_engine()
    closing = asyncio.create_task(engine.aclose())
    await engine.turn()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert engine.closed
    await engine.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_nothing_is_left_behind(make_engine: MakeEngine) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    sockets = _sockets()
    async with make_engine() as engine:
        during = {task.get_name() for task in asyncio.all_tasks()}
        assert {"deepinfer steps", "deepinfer beat"} <= during
        await ids_of(engine.generate("Hi", SHORT))
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert _sockets() == sockets
    assert not [t.name for t in threading.enumerate() if t.name.startswith("deepinfer")]


def _sockets() -> set[str]:
    links = (_link(path) for path in Path("/proc/self/fd").iterdir())
    return {link for link in links if link.startswith("socket:")}


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the directory's own descriptor
        return ""


# --- loading ---


class Loading:
    """A build that waits, in its thread, for the test."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = threading.Event()
        self._event_loop = asyncio.get_running_loop()

    def slow(self, engine: Any) -> Any:
        """Makes that engine wait while it loads."""
        build = engine._build

        def wait_and_build(config: EngineConfig, tell: Callable[[str], None]) -> Any:
            self._event_loop.call_soon_threadsafe(self.begun.set)
            assert self.go_on.wait(60)
            return build(config, tell)

        engine._build = wait_and_build
        return engine


@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_while_loading_waits_for_the_thread(
    make_engine: MakeEngine, cancelled: bool
) -> None:
    loading = Loading()
    engine = loading.slow(make_engine())
    starting = asyncio.create_task(engine.start())
    await loading.begun.wait()
    assert engine.state == "loading"
    with pytest.raises(EngineClosedError, match="is loading"):
        engine.generate("Hi")
    if cancelled:
        starting.cancel()
        await asyncio.wait([starting])
        assert engine.state == "closed", "not failed"
    closings = [asyncio.create_task(engine.aclose()) for _ in range(2)]
    await engine.turn(5)
    assert engine.closed
    assert not any(closing.done() for closing in closings), "the thread still loads"
    loading.go_on.set()
    await asyncio.gather(*closings)
    with pytest.raises(asyncio.CancelledError if cancelled else EngineClosedError):
        await starting
    with pytest.raises(EngineClosedError):
        await engine.device.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_event_loop_is_free_while_a_model_loads(make_engine: MakeEngine) -> None:
    loading = Loading()
    async with asyncio.timeout(30):
        starting = asyncio.create_task(loading.slow(make_engine()).start())
        await loading.begun.wait()  # arrives although the thread stands still
        loading.go_on.set()
        await starting


async def test_what_loading_raises_is_raised_and_remembered() -> None:
    problem = ModelError("No such model.")

    def build(config: EngineConfig, tell: Callable[[str], None]) -> Any:
        raise problem

    engine = Engine(build=build)
    with pytest.raises(ModelError, match="No such model") as caught:
        await engine.start()
    assert caught.value is engine.failure is problem
    assert engine.state == "failed"
    with pytest.raises(EngineError, match="failed and must be restarted") as refused:
        engine.generate("Hi")
    assert refused.value.__cause__ is problem
    await engine.aclose()
    assert engine.closed


async def test_the_settings_may_name_another_tokenizer(
    start_engine: StartEngine, tokenizer_json: Path, tmp_path: Path
) -> None:
    shutil.copy(tokenizer_json, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "H"}')
    engine = await start_engine(tokenizer=str(tmp_path))
    assert set(engine.tokenizer.eos_token_ids) == {72, 256}
    assert set((await start_engine()).tokenizer.eos_token_ids) == {256}


@pytest.mark.parametrize(
    ("setting", "error"), [("tokenizer", CheckpointError), ("chat_template", ConfigError)]
)
async def test_a_file_that_the_settings_name_and_is_not_there(
    make_engine: MakeEngine,
    tmp_path: Path,
    setting: str,
    error: type[DeepinferError],
) -> None:
    engine = make_engine(**{setting: str(tmp_path / "missing")})
    with pytest.raises(error, match="missing"):
        await engine.start()
    with pytest.raises(EngineClosedError):  # the device that was built already is not left behind
        await engine.device.collect()
    await engine.aclose()


# --- a bug inside ---


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
async def test_when_the_step_loop_breaks_everybody_is_told(
    start_engine: StartEngine, overlap: bool
) -> None:
    engine = await start_engine(max_num_seqs=1, overlap=overlap)
    engine.device.hold()
    running, waiting = engine.generate("running"), engine.generate("waiting")
    draining = asyncio.create_task(engine.drain())
    await engine.turn(10)
    engine.device.broken_by = AssertionError("a bug")
    engine.device.release()
    for stream in (running, waiting):
        with pytest.raises(EngineError, match=r"must be restarted.*a bug") as caught:
            await ids_of(stream)
        assert caught.value.__cause__ is engine.failure is engine.device.broken_by
        assert await ids_of(stream) == []
    assert engine.state == "failed"
    with pytest.raises(EngineError, match="must be restarted") as refused:
        engine.generate("Hi")
    assert refused.value.__cause__ is engine.failure
    assert await draining
    reasons = {report.finish_reason for report in engine.witness.finished.values()}
    assert reasons == {FinishReason.ERROR}
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        engine.generate("Hi")


async def test_a_cancelled_step_loop_is_a_failure_too(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.device.hold()
    stream = engine.generate("Hi")
    await engine.turn(10)
    for task in asyncio.all_tasks():
        if task.get_name() == "deepinfer steps":
            task.cancel()
    with pytest.raises(EngineError, match="must be restarted"):
        await ids_of(stream)
    assert engine.state == "failed"


# --- no state but its own ---


async def test_two_engines_in_one_loop_do_not_meet(start_engine: StartEngine) -> None:
    one = await start_engine(answers={"Q": "first"})
    two = await start_engine(answers={"Q": "second"})
    two.device.hold()
    blocked = two.generate("Q")
    assert bytes((await ids_of(one.generate("Q")))[:-1]) == b"first"
    assert one.stats().num_blocks_cached == 1
    assert two.stats().num_blocks_cached == 0
    await one.aclose()
    two.device.release()
    assert bytes((await ids_of(blocked))[:-1]) == b"second"
    assert list(two.witness.finished) == ["req-0"] == list(one.witness.finished)


def test_engines_live_and_die_with_their_own_event_loops(make_engine: MakeEngine) -> None:
    async def live() -> tuple[list[int], Any]:
        async with make_engine() as engine:
            stream = engine.generate("left behind")
            await anext(stream)
            return await ids_of(engine.generate("Hi", SHORT)), stream

    (first, left), (again, _) = asyncio.run(live()), asyncio.run(live())
    assert first == again
    del left  # its event loop is closed: nothing to tell, nobody to wake
