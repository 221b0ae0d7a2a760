"""Who goes first, who waits and for how long: bounds on virtual time."""

from __future__ import annotations

import itertools

import pytest

from deepinfer.errors import QueueFullError
from deepinfer.scheduler.sequence import Status
from deepinfer.types import FinishReason

STEP_S = 0.010
TOKEN_S = 0.001


def step_time(plan):
    return STEP_S + TOKEN_S * plan.num_tokens


async def test_a_long_prompt_delays_decoding_by_no_more_than_the_bound(rig):
    one = rig(
        step_time=step_time,
        num_blocks=400,
        max_model_len=1200,
        max_prefill_tokens_beside_decode=16,
        max_num_batched_tokens=256,
    )
    decoding = [one.submit([number] * 3, 200) for number in range(4)]
    await one.until(lambda: len(decoding[0].new_token_ids) > 5)
    long = one.submit(list(range(40)) * 20, 3)
    await one.finish_all(*decoding, long)
    # Two steps at most lie between two tokens' commits in the overlapped loop.
    for sequence in decoding:
        assert one.longest_gap(sequence) <= STEP_S + TOKEN_S * (16 + 4) + 1e-9
    assert long.new_token_ids == one.alone(long)


async def test_without_anybody_decoding_a_prompt_may_take_the_whole_budget(rig):
    one = rig(step_time=step_time, num_blocks=400, max_model_len=1200, max_num_batched_tokens=256)
    long = one.submit(list(range(40)) * 16, 1)
    await one.finish_all(long)
    assert [plan.num_tokens for plan in one.plans[:3]] == [256, 256, 128]


async def test_decoding_does_not_starve_a_prompt_even_when_it_fills_the_budget(rig):
    one = rig(
        step_time=step_time,
        num_slots=14,
        num_blocks=600,
        max_model_len=300,
        max_num_batched_tokens=10,
        min_prefill_tokens=4,
        max_prefill_tokens_beside_decode=16,
    )
    decoding = [one.submit([number] * 2, 150) for number in range(12)]
    await one.until(lambda: all(len(s.new_token_ids) > 3 for s in decoding))
    arrived_s = one.clock.now()
    prompt = one.submit(list(range(40)), 2)
    await one.until(lambda: prompt.first_token_s is not None)
    # 40 tokens at 4 a step are 10 steps; one more may be in flight when it arrives.
    longest_step_s = STEP_S + TOKEN_S * 10
    assert prompt.first_token_s - arrived_s <= 12 * longest_step_s
    await one.finish_all(*decoding, prompt)
    # Meanwhile 12 sequences took turns at 6 rows: nobody waited longer than three steps.
    assert max(map(one.longest_gap, decoding)) <= 3 * longest_step_s + 1e-9
    assert [s.new_token_ids for s in decoding] == [one.alone(s) for s in decoding]


async def test_smaller_requests_pass_one_that_does_not_fit_but_not_for_ever(rig):
    one = rig(num_blocks=17, num_slots=5, max_skips=3, max_model_len=64, step_time=step_time)
    runs = one.submit([1] * 30, 20)
    await one.until(lambda: runs.status is Status.RUNNING)
    big = one.submit([2] * 45, 4)
    order = [one.submit([3, number], 2) for number in range(8)]
    await one.finish_all(runs, big, *order)
    passed = [s for s in order if s.admitted_s < big.admitted_s]
    assert len(passed) == 3
    assert passed == order[:3]
    assert set(big.stalls_s) <= {"queue", "blocks", "slot"}
    assert big.stalls_s["blocks"] > 0
    assert sum(big.stalls_s.values()) == pytest.approx(big.admitted_s - big.request.arrived_s)


async def test_priority_goes_first_and_age_makes_up_for_it(rig):
    one = rig(num_slots=2, step_time=step_time, ageing_s=1.0)
    first = one.submit([1, 2], 5)
    await one.until(lambda: first.status is Status.RUNNING)
    low = one.submit([3, 3], 5, priority=1)
    high = one.submit([4, 4], 5, priority=0)
    await one.finish_all(first, low, high)
    assert high.admitted_s < low.admitted_s

    low = one.submit([3, 3], 5, priority=1)
    high = [one.submit([5, 0], 60)]
    while low.admitted_s is None:
        assert len(high) < 10, "a stream of important requests starves the other"
        high.append(one.submit([5, len(high)], 60))
        await one.until(lambda: high[-2].admitted_s is not None or low.admitted_s is not None)
    assert low.admitted_s - low.request.arrived_s < 4.0
    await one.finish_all(low, *high)


async def test_the_waiting_room_is_bounded_in_requests_and_in_tokens(rig):
    one = rig(num_slots=2, max_waiting_requests=3, max_waiting_tokens=30)
    one.device.hold()
    one.submit([1, 2], 5)
    await one.turn(10)
    one.submit([1] * 10)
    one.submit([1] * 15)
    with pytest.raises(QueueFullError, match="2 of 3 requests and 25 of 30 tokens") as refused:
        one.submit([1] * 6)
    assert refused.value.retry_after_s >= 1
    one.submit([1] * 5)
    with pytest.raises(QueueFullError, match="3 of 3 requests"):
        one.submit([1])


async def test_the_victim_of_preemption_is_the_cheapest_and_resumes_through_the_cache(rig):
    # 20 usable blocks of 4: the three grow to 48, 44 and 30 tokens, 32 blocks.
    one = rig(num_blocks=21, num_slots=4, max_model_len=64, step_time=step_time)
    big = one.submit([1] * 28, 20)
    middle = one.submit([2] * 24, 20)
    small = one.submit([3] * 10, 20)
    await one.finish_all(big, middle, small)
    assert [s.new_token_ids for s in (big, middle, small)] == [
        one.alone(s) for s in (big, middle, small)
    ]
    assert big.preemptions == 0
    assert small.preemptions > 0
    assert small.stalls_s["preempted"] > 0
    resumed = [start for plan in one.plans for start in plan.starts if len(start.token_ids) > 10]
    assert resumed
    computed_twice = sum(plan.num_tokens for plan in one.plans) - (28 + 24 + 10 + 3 * 20)
    thrown_away = sum(len(start.token_ids) for start in resumed)
    assert computed_twice < thrown_away, "nothing came from the cache"


async def test_a_less_important_sequence_is_preempted_first(rig):
    one = rig(num_blocks=17, num_slots=3, max_model_len=60, step_time=step_time)
    long_but_low = one.submit([1] * 30, 20, priority=5)
    await one.until(lambda: long_but_low.status is Status.RUNNING)
    short_but_high = one.submit([2] * 8, 30, priority=0)
    await one.finish_all(long_but_low, short_but_high)
    assert short_but_high.preemptions == 0
    assert long_but_low.preemptions > 0


async def test_requests_that_arrive_together_compute_their_shared_prompt_once(rig):
    one = rig(step_time=step_time)
    prompt = list(range(40))
    twins = [one.submit(prompt + [number], 3) for number in range(5)]
    await one.finish_all(*twins)
    assert [s.cached_tokens for s in twins] == [0, 40, 40, 40, 40]
    assert "shared_prefix" in twins[1].stalls_s
    # 41 once, 1 for each other, 2 decode rows each; sequences at their limit have no wasted row.
    assert sum(plan.num_tokens for plan in one.plans) == 41 + 4 + 5 * 2
    assert [s.new_token_ids for s in twins] == [one.alone(s) for s in twins]


async def test_a_twin_does_not_wait_for_one_that_was_cancelled(rig):
    one = rig(step_time=step_time, max_num_batched_tokens=16)
    prompt = list(range(40))
    first, second = one.submit(prompt, 3), one.submit(prompt, 3)
    await one.until(lambda: first.status is Status.RUNNING)
    one.cancel(first)
    await one.finish_all(second)
    assert second.finish_reason is FinishReason.LENGTH
    assert second.new_token_ids == one.alone(second)


async def test_after_a_hit_the_state_is_replayed_and_its_blocks_are_not_written(rig):
    one = rig(step_time=step_time, replay_tokens=6, hit_alignment_tokens=8)
    prompt = list(range(30))
    first = one.submit(prompt, 2)
    await one.finish_all(first)
    second = one.submit(prompt, 2)
    await one.finish_all(second)
    assert second.cached_tokens == 24  # of 28 tokens in full blocks, the multiple of 8 below
    (plan,) = [plan for plan in one.plans if plan.starts and plan.number > 1]
    assert (plan.first.tolist(), plan.write_from.tolist()) == ([18], [24])
    assert second.new_token_ids == one.alone(second)


async def test_a_failed_step_publishes_nothing(rig):
    one = rig()
    prompt = list(range(20))
    one.device.fail(1)
    await one.finish_all(one.submit(prompt, 2))
    assert len(one.state.prefix) == 0
    again = one.submit(prompt, 2)
    await one.finish_all(again)
    assert again.cached_tokens == 0
    assert again.new_token_ids == one.alone(again)


async def test_a_step_in_flight_publishes_nothing_before_its_results_are_in(rig):
    one = rig(max_num_batched_tokens=8)
    prompt = list(range(30))
    one.device.fail(2)
    await one.finish_all(one.submit(prompt, 2))
    assert len(one.state.prefix) == 2  # the two blocks of step 1, none of step 2
    again = one.submit(prompt, 2)
    await one.finish_all(again)
    assert again.cached_tokens == 8
    assert again.new_token_ids == one.alone(again)


async def test_every_start_is_told_once_and_before_its_rows(rig):
    one = rig(step_time=step_time, num_blocks=21, num_slots=4)
    sequences = [one.submit([number] * (5 + 7 * number), 20) for number in range(1, 6)]
    await one.finish_all(*sequences)
    slots = set()
    for plan in one.plans:
        slots |= {start.slot for start in plan.starts}
        assert set(plan.slots.tolist()) <= slots
    starts = list(itertools.chain.from_iterable(plan.starts for plan in one.plans))
    assert len(starts) == 5 + sum(s.preemptions for s in sequences)
