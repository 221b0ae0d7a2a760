"""The CPU device: a line of steps in one thread, and an event loop that never waits for it."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.errors import DeviceError, EngineClosedError
from deepinfer.models import build
from deepinfer.runtime.device import CpuDevice
from deepinfer.runtime.runner import Runner
from deepinfer.runtime.weights import open_checkpoint
from deepinfer.step import CacheSpec, StepResult

BLOCK = 4
MAX_LEN = 64


class EchoRunner:
    """Its token is the step's number. Notes the thread that it runs in."""

    cache_spec = CacheSpec(block_tokens=BLOCK, block_bytes=1)
    num_blocks = 9
    num_slots = 3

    def __init__(self):
        self.calls = []
        self.threads = set()

    def forward(self, plan):
        self.calls.append(("forward", plan.number))
        self.threads.add(threading.get_ident())
        if plan.first[0] == 13:
            raise ArithmeticError("thirteen")

    def sample(self, plan, mask=None):
        self.calls.append(("sample", plan.number))
        self.threads.add(threading.get_ident())
        if plan.first[0] == 14:
            raise ArithmeticError("fourteen")
        ids = np.full((len(plan.slots), 1), plan.number, np.int32)
        return StepResult(number=plan.number, token_ids=ids, num_tokens=ids[:, 0] * 0 + 1)


def enqueue(device, *plans):
    for plan in plans:
        device.forward(plan)
        device.sample(plan)


@pytest.fixture
async def device():
    device = CpuDevice(EchoRunner())
    yield device
    await device.close()


@pytest.fixture
def one_row(make_plan):
    return lambda number, first=0: make_plan(number, [(0, first, 1, True)])


async def collect_held(device, *plans):
    """Enqueues the plans; the first stands still in the thread until the event is set.

    Returns (the task that collects it, the event).
    """
    reached, release = threading.Event(), threading.Event()

    def hold(number):
        reached.set()
        release.wait()

    device.before_step = hold
    enqueue(device, *plans)
    collected = asyncio.create_task(device.collect())
    await asyncio.to_thread(reached.wait)
    return collected, release


async def test_steps_run_in_order_in_one_other_thread(device, one_row):
    enqueue(device, *(one_row(number) for number in range(5)))
    results = [await device.collect() for _ in range(5)]
    assert [result.number for result in results] == list(range(5))
    assert [result.token_ids[0, 0] for result in results] == list(range(5))
    assert all(result.device_s > 0 for result in results)
    runner = device._runner
    assert runner.calls == [(kind, n) for n in range(5) for kind in ("forward", "sample")]
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


@pytest.mark.parametrize(("poison", "sampled"), [(13, False), (14, True)])
async def test_a_failing_step_is_lost_alone(device, poison, sampled, one_row):
    enqueue(device, one_row(1), one_row(2, poison), one_row(3))
    assert (await device.collect()).number == 1
    with pytest.raises(DeviceError, match="Step 2 with 1 rows and 1 tokens failed") as caught:
        await device.collect()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert (await device.collect()).number == 3
    assert (("sample", 2) in device._runner.calls) == sampled


async def test_a_held_step_leaves_the_event_loop_free(device, one_row):
    collected, release = await collect_held(device, one_row(1), one_row(2))
    turns = 0
    for _ in range(100):  # the loop turns while the thread stands still
        await asyncio.sleep(0)
        turns += 1
    assert (turns, collected.done()) == (100, False)
    release.set()
    assert (await collected).number == 1
    assert (await device.collect()).number == 2


async def test_an_error_of_the_hook_is_an_error_of_the_step(device, one_row):
    def refuse(number):
        if number == 1:
            raise ValueError("not today")

    device.before_step = refuse
    enqueue(device, one_row(1), one_row(2))
    with pytest.raises(DeviceError, match="not today"):
        await device.collect()
    assert (await device.collect()).number == 2


@pytest.mark.parametrize("first", [0, 13])
async def test_a_cancelled_collect_loses_nothing(device, first, one_row):
    release = threading.Event()
    device.before_step = lambda number: release.wait()
    enqueue(device, one_row(1, first), one_row(2))
    collected = asyncio.create_task(device.collect())
    await asyncio.sleep(0)
    collected.cancel()
    await asyncio.wait([collected])
    release.set()
    if first == 13:
        with pytest.raises(DeviceError, match="Step 1"):
            await device.collect()
    else:
        assert (await device.collect()).number == 1
    assert (await device.collect()).number == 2


async def test_a_closed_device_lets_go_of_weights_and_cache(one_row):
    runner = EchoRunner()
    device = CpuDevice(runner)
    enqueue(device, one_row(1))
    await device.collect()
    held = weakref.ref(runner)
    del runner
    assert held() is not None
    await device.close()
    gc.collect()
    assert held() is None


async def test_close_drops_the_line_and_joins_the_thread(one_row):
    runner = EchoRunner()
    device = CpuDevice(runner)
    collected, release = await collect_held(device, one_row(1), one_row(2))
    closing = asyncio.create_task(device.close())
    await asyncio.sleep(0)
    assert not closing.done()  # the running part must end first
    release.set()
    await closing
    with pytest.raises(EngineClosedError):
        await collected
    assert runner.calls == [("forward", 1)]
    await device.close()
    for call in (lambda: device.forward(one_row(3)), lambda: device.sample(one_row(3))):
        with pytest.raises(EngineClosedError):
            call()
    with pytest.raises(EngineClosedError):
        await device.collect()
    assert not any(t.name.startswith("deepinfer-step") for t in threading.enumerate())


async def test_a_close_that_is_cut_short_still_wakes_whoever_waits(one_row):
    device = CpuDevice(EchoRunner())
    release = threading.Event()
    device.before_step = lambda number: release.wait()
    enqueue(device, one_row(1))
    collected = asyncio.create_task(device.collect())
    await asyncio.sleep(0)
    closing = asyncio.create_task(device.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(EngineClosedError):
        await collected
    release.set()
    await device.close()
    assert not any(t.name.startswith("deepinfer-step") for t in threading.enumerate())


async def test_an_idle_device_closes_at_once_and_twice():
    device = CpuDevice(EchoRunner())
    await device.close()
    await device.close()


async def test_calls_out_of_order_are_refused(device, one_row):
    with pytest.raises(RuntimeError, match="without its forward"):
        device.sample(one_row(1))
    device.forward(one_row(2))
    with pytest.raises(RuntimeError, match="Step 2 was not sampled"):
        device.forward(one_row(3))
    with pytest.raises(RuntimeError, match="without a sampled step"):
        await device.collect()


# --- with a real, tiny model ---


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory, write_config):
    directory = tmp_path_factory.mktemp("tiny")
    write_config(directory, max_position_embeddings=MAX_LEN, tie_word_embeddings=False)
    checkpoint = open_checkpoint(str(directory), "dummy", seed=4)
    return build(checkpoint.config, checkpoint.tensors, EngineConfig(dtype="float32"))


def make_runner(model, num_blocks=40, num_slots=5):
    return Runner(
        model, model.allocate_cache(num_blocks, num_slots), num_blocks, num_slots, MAX_LEN
    )


@pytest.fixture
def decode_plans(make_plan, make_start):
    """decode_plans(num_steps, prompts): all prompts in the first step, then one token each."""

    def plans(num_steps, prompts):
        starts, table, rows = [], [], []
        for slot, (prompt, params) in enumerate(prompts):
            starts.append(make_start(slot, prompt, seed=slot, **params))
            table += [(slot, column, 1 + slot + len(prompts) * column) for column in range(2)]
            rows.append((slot, 0, len(prompt), True))
        yield make_plan(0, rows, starts, table)
        for number in range(1, num_steps):
            rows = [(slot, len(p) + number - 1, 1, True) for slot, (p, _) in enumerate(prompts)]
            yield make_plan(number, rows)

    return plans


PROMPTS = [
    ([5, 6, 7, 8, 9, 10, 11], {"temperature": 0.0}),
    ([200], {"temperature": 1.0}),
    ([33, 44, 55], {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 3}),
    ([9, 9, 9], {"temperature": 50.0, "top_p": 0.999, "min_p": 0.001}),
]


async def test_steps_enqueued_ahead_give_the_same_ids_as_one_by_one(tiny_model, decode_plans):
    runner = make_runner(tiny_model)
    expected = []
    for plan in decode_plans(16, PROMPTS):
        runner.forward(plan)
        expected.append(runner.sample(plan))
    device = CpuDevice(make_runner(tiny_model))
    plans = list(decode_plans(16, PROMPTS))
    enqueue(device, plans[0])
    for plan in plans[1:]:
        enqueue(device, plan)  # one ahead: the result before is not known yet
        result = await device.collect()
        assert result.token_ids.tolist() == expected[result.number].token_ids.tolist()
    last = await device.collect()
    assert last.token_ids.tolist() == expected[15].token_ids.tolist()
    assert last.logprobs.top.tolist() == expected[15].logprobs.top.tolist()
    await device.close()


async def test_a_resumed_sequence_continues_on_the_real_model(tiny_model, decode_plans):
    runner = make_runner(tiny_model)
    ids = []
    for plan in decode_plans(8, PROMPTS[1:2]):
        runner.forward(plan)
        ids.append(int(runner.sample(plan).token_ids[0, 0]))
    resumed = [([200, *ids[:5]], {"temperature": 1.0})]
    other = make_runner(tiny_model)
    again = []
    for plan in decode_plans(3, resumed):
        other.forward(plan)
        again.append(int(other.sample(plan).token_ids[0, 0]))
    assert again == ids[5:]
