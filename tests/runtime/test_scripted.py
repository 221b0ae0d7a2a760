"""The scripted device catches what a real one would suffer in silence."""

import asyncio

import numpy as np
import pytest

from deepinfer.clock import VirtualClock
from deepinfer.errors import DeviceError, EngineClosedError
from deepinfer.runtime.scripted import (
    PlanViolation,
    ScriptedDevice,
    generate_alone,
    hashed_next_token,
    tabled_next_token,
)
from deepinfer.step import CacheSpec, SequenceStart, StepPlan
from deepinfer.types import SamplingParams

SPEC = CacheSpec(block_tokens=4, block_bytes=64)
NEXT = hashed_next_token(1000)


def start(slot, token_ids, prompt_tokens=None, stop_token_ids=(), **params):
    return SequenceStart(
        slot=slot,
        token_ids=np.array(token_ids, np.int32),
        prompt_tokens=len(token_ids) if prompt_tokens is None else prompt_tokens,
        params=SamplingParams(**params),
        seed=0,
        stop_token_ids=tuple(stop_token_ids),
    )


def plan(number, rows, starts=(), table=()):
    """rows: (slot, first, count, samples) or with write_from; table: (slot, column, block)."""
    columns = list(zip(*[(row + (row[1],))[:5] for row in rows], strict=True)) or [[]] * 5
    changes = list(zip(*table, strict=True)) or [[], [], []]
    return StepPlan(
        number=number,
        slots=np.array(columns[0], np.int32),
        first=np.array(columns[1], np.int32),
        count=np.array(columns[2], np.int32),
        samples=np.array(columns[3], np.bool_),
        write_from=np.array(columns[4], np.int32),
        tail_start=np.zeros(len(rows), np.int32),
        num_tokens=int(sum(columns[2])),
        starts=tuple(starts),
        table_slots=np.array(changes[0], np.int32),
        table_columns=np.array(changes[1], np.int32),
        table_blocks=np.array(changes[2], np.int32),
    )


def device(**options):
    options.setdefault("next_token", NEXT)
    options.setdefault("clock", VirtualClock())
    return ScriptedDevice(SPEC, num_blocks=10, num_slots=4, **options)


async def run(scripted, step):
    scripted.forward(step)
    scripted.sample(step)
    return await scripted.collect()


async def test_chunked_prefill_and_decode_give_the_scripted_tokens():
    scripted = device()
    prompt = [5, 6, 7, 8, 9]
    first = plan(1, [(2, 0, 3, False)], [start(2, prompt)], [(2, 0, 7)])
    assert (await run(scripted, first)).num_tokens.tolist() == [0]
    rest = [
        plan(2, [(2, 3, 2, True)], table=[(2, 1, 3)]),
        plan(3, [(2, 5, 1, True)]),
        plan(4, [(2, 6, 1, True)]),
    ]
    got = [(await run(scripted, step)).token_ids[0, 0] for step in rest]
    assert got == generate_alone(NEXT, prompt, 3)
    assert scripted.known_token_ids(2).tolist() == prompt + got
    assert scripted.log[:3] == [("forward", 1), ("sample", 1), ("collect", 1)]


async def test_a_step_may_be_enqueued_before_the_one_before_is_collected():
    scripted = device()
    steps = [
        plan(1, [(0, 0, 2, True)], [start(0, [1, 2])], [(0, 0, 1)]),
        plan(2, [(0, 2, 1, True)]),
        plan(3, [(0, 3, 1, True)]),
    ]
    for step in steps:
        scripted.forward(step)
        scripted.sample(step)
    assert scripted.num_outstanding == 3
    got = [(await scripted.collect()).token_ids[0, 0] for _ in steps]
    assert got == generate_alone(NEXT, [1, 2], 3)


# A prompt of five ids in slot 0: step 1 computes four in block 1, step 2 the fifth in block 2 and
# draws the sixth id.
CHUNK = plan(1, [(0, 0, 4, False)], [start(0, [1, 2, 3, 4, 5])], [(0, 0, 1)])
DRAW = plan(2, [(0, 4, 1, True)], table=[(0, 1, 2)])


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (plan(3, [(0, 6, 1, True)]), "ends at 7, only 6 ids known"),
        (plan(3, [(0, 5, 1, False)]), "samples=False"),
        (plan(3, [(0, 4, 1, True)]), "samples=True"),
        (plan(3, [(0, 5, 1, True)], table=[(0, 1, 0)]), "position 4 has no block"),
        (plan(3, [(0, 5, 1, True)], table=[(0, 0, 3)]), "position 0 was never computed in block 3"),
        (plan(3, [(0, 5, 1, True, 6)]), "position 5 was never computed in block 2"),
        (plan(3, [(1, 5, 1, True)]), "slot 1 holds no sequence"),
        (plan(3, [(0, 5, 1, True)], table=[(0, 1, 10)]), "names block 10"),
        (plan(2, [(0, 5, 1, True)]), "does not follow step 2"),
        (plan(3, [(0, 5, 1, True)] * 2), "two rows"),
        (plan(3, [(0, 5, 0, True)]), "empty"),
        # another sequence claims the cached prefix of the first, but has other ids
        (
            plan(3, [(1, 4, 1, True)], [start(1, [1, 2, 3, 9, 5])], [(1, 0, 1), (1, 1, 3)]),
            "another",
        ),
        # a new sequence in the same slot, without its own block table
        (plan(3, [(0, 0, 2, True)], [start(0, [1, 2])]), "no block for position 0"),
        # in the same step, the block of one sequence is given to another
        (
            plan(3, [(0, 5, 1, True), (1, 0, 2, True)], [start(1, [8, 9])], [(1, 0, 2)]),
            "position 5 is another",
        ),
    ],
)
async def test_violations(bad, complaint):
    scripted = device()
    await run(scripted, CHUNK)
    await run(scripted, DRAW)
    with pytest.raises(PlanViolation, match=complaint):
        scripted.forward(bad)
    assert len(scripted.violations) == 1


async def test_a_reused_block_is_noticed_when_its_first_owner_reads_it():
    scripted = device()
    await run(scripted, CHUNK)
    await run(scripted, plan(2, [(1, 0, 2, True)], [start(1, [8, 9])], [(1, 0, 1)]))
    with pytest.raises(PlanViolation, match="position 0 is another"):
        scripted.forward(plan(3, [(0, 4, 1, True)], table=[(0, 1, 2)]))


async def test_a_shared_prefix_is_accepted():
    scripted = device()
    await run(scripted, CHUNK)
    await run(scripted, DRAW)
    share = plan(3, [(1, 4, 2, True)], [start(1, [1, 2, 3, 4, 7, 8])], [(1, 0, 1), (1, 1, 5)])
    result = await run(scripted, share)
    assert result.token_ids[0, 0] == NEXT(np.array([1, 2, 3, 4, 7, 8], np.int32))


async def test_a_failed_step_loses_its_rows_and_no_others():
    scripted = device()
    scripted.fail(2)
    both = [start(0, [1, 2]), start(1, [3, 4])]
    await run(scripted, plan(1, [(0, 0, 2, True), (1, 0, 2, True)], both, [(0, 0, 1), (1, 0, 2)]))
    scripted.forward(plan(2, [(0, 2, 1, True)]))
    scripted.sample(scripted._unsampled.plan)
    late = plan(3, [(0, 3, 1, True), (1, 2, 1, True)])  # planned before the failure was known
    scripted.forward(late)
    scripted.sample(late)
    with pytest.raises(DeviceError, match="Step 2 with 1 rows"):
        await scripted.collect()
    assert (await scripted.collect()).token_ids[1, 0] == generate_alone(NEXT, [3, 4], 2)[1]
    # what the lost sequence wrote cannot be shared
    with pytest.raises(PlanViolation, match="never computed"):
        scripted.forward(plan(4, [(2, 3, 1, True)], [start(2, [1, 2, 3, 4])], [(2, 0, 1)]))


async def test_time_passes_on_the_clock_and_steps_queue_behind_each_other():
    clock = VirtualClock()
    scripted = device(clock=clock, step_time=lambda step: 0.5 * step.num_tokens)
    for step in (CHUNK, DRAW):
        scripted.forward(step)
        scripted.sample(step)
    collected = asyncio.create_task(scripted.collect())
    await asyncio.sleep(0)
    clock.advance(1.9)
    await asyncio.sleep(0)
    assert not collected.done()
    clock.advance(0.1)
    assert (await collected).device_s == 2.0
    collected = asyncio.create_task(scripted.collect())
    await asyncio.sleep(0)
    assert clock.next_wake_s == 2.5
    clock.advance(0.5)
    assert (await collected).number == 2


async def test_results_are_withheld_until_released():
    scripted = device()
    scripted.hold()
    for step in (CHUNK, DRAW):
        scripted.forward(step)
        scripted.sample(step)
    collected = asyncio.create_task(scripted.collect())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not collected.done()
    scripted.release(1)
    assert (await collected).number == 1
    collected = asyncio.create_task(scripted.collect())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not collected.done()
    collected.cancel()  # loses nothing
    await asyncio.wait([collected])
    scripted.release()
    assert (await scripted.collect()).number == 2


async def test_min_tokens_logprobs_and_mask():
    scripted = device(next_token=tabled_next_token({(1, 2): (7, 7, 7), (3,): (9,)}))
    starts = [
        start(0, [1, 2], min_tokens=1, stop_token_ids=[7, 8], logprobs=2),
        start(1, [3]),
    ]
    step = plan(1, [(0, 0, 2, True), (1, 0, 1, True)], starts, [(0, 0, 1), (1, 0, 2)])
    scripted.forward(step)
    scripted.sample(step, np.array([[-1, -1], [~(1 << 9), -1]], np.int32))
    result = await scripted.collect()
    assert result.token_ids[:, 0].tolist() == [9, 10]  # 7 and 8 are stop ids, 9 is masked
    assert result.logprobs.rows.tolist() == [0]
    assert result.logprobs.top_token_ids.tolist() == [[[9, 10]]]


def test_generating_alone_stops_at_a_stop_id_but_not_before_min_tokens():
    follow = tabled_next_token({(1,): (7, 8, 7, 9)})
    assert generate_alone(follow, [1], 4) == [7, 8, 7, 9]
    assert generate_alone(follow, [1], 4, stop_token_ids=[8]) == [7, 8]
    assert generate_alone(follow, [1], 4, stop_token_ids=[7], min_tokens=1) == [8, 8, 7]


async def test_closing_wakes_whoever_waits():
    scripted = device()
    scripted.hold()
    scripted.forward(CHUNK)
    scripted.sample(CHUNK)
    collected = asyncio.create_task(scripted.collect())
    await asyncio.sleep(0)
    await scripted.close()
    await scripted.close()
    with pytest.raises(EngineClosedError):
        await collected
    with pytest.raises(EngineClosedError):
        scripted.forward(DRAW)
