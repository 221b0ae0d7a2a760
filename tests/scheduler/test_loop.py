"""The step loop: same tokens overlapped and plain, launches one step ahead, survives everything."""

from __future__ import annotations

import pytest

from deepinfer.types import FinishReason

PROMPTS = [[1, 2, 3], [4] * 11, list(range(30)), [7, 8], [9] * 5 + [1] * 14]


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_batch_gives_the_tokens_of_each_sequence_alone(rig, overlap):
    one = rig(overlap=overlap)
    sequences = [one.submit(prompt, 12) for prompt in PROMPTS]
    await one.finish_all(*sequences)
    for sequence in sequences:
        assert sequence.new_token_ids == one.alone(sequence)
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.num_output_tokens == 12
    await one.settle()
    assert one.state.pool.num_held == 0


async def test_step_n_plus_1_is_launched_while_the_results_of_step_n_are_withheld(rig):
    one = rig()
    one.device.hold()
    one.submit([1, 2, 3], 10)
    await one.turn(20)
    # The prefill and the first decode are launched; sampling of the second waits for results.
    assert one.device.log == [("forward", 1), ("sample", 1), ("forward", 2)]
    one.device.release(1)
    await one.turn(20)
    assert one.device.log[3:] == [("collect", 1), ("sample", 2), ("forward", 3)]


async def test_the_plain_loop_launches_nothing_ahead(rig):
    one = rig(overlap=False)
    one.device.hold()
    one.submit([1, 2, 3], 10)
    await one.turn(20)
    assert one.device.log == [("forward", 1), ("sample", 1)]


async def test_results_that_come_late_change_nothing(rig):
    one = rig(step_time=lambda plan: 0.5 + 0.01 * plan.num_tokens)
    sequences = [one.submit(prompt, 9) for prompt in PROMPTS]
    await one.finish_all(*sequences)
    assert [s.new_token_ids for s in sequences] == [one.alone(s) for s in sequences]


async def test_a_stop_token_costs_one_discarded_row(rig):
    one = rig()
    prompt = [5, 6, 7]
    stop = one.alone(one.sequence(prompt, 10))[3]
    sequence = one.submit(prompt, 10, stop_token_ids=(stop,))
    await one.finish_all(sequence)
    await one.settle()
    assert sequence.new_token_ids == one.alone(sequence)
    assert sequence.new_token_ids[-1] == stop
    assert (sequence.finish_reason, sequence.stop_match) == (FinishReason.STOP, stop)
    steps = len(sequence.new_token_ids)
    assert one.state.step_number == steps + 1


async def test_more_stop_token_ids_than_the_arrays_hold(rig):
    one = rig()
    prompt = [5, 6, 7]
    answer = one.alone(one.sequence(prompt, 12))
    others = [token for token in range(100, 120) if token not in answer]
    sequence = one.submit(prompt, 12, stop_token_ids=(*others, answer[5]))
    await one.finish_all(sequence)
    assert sequence.new_token_ids == answer[: answer.index(answer[5]) + 1]
    assert sequence.finish_reason is FinishReason.STOP


async def test_stop_token_ids_do_not_count_before_min_tokens(rig):
    one = rig()
    prompt = [5, 6, 7]
    stop = one.alone(one.sequence(prompt, 10))[1]
    sequence = one.submit(prompt, 10, stop_token_ids=(stop,), min_tokens=4)
    await one.finish_all(sequence)
    assert len(sequence.new_token_ids) > 4
    assert stop not in sequence.new_token_ids[:4]


async def test_a_stop_check_sees_every_token_and_ends_the_sequence(rig):
    one = rig()
    seen = []

    def check(token_id):
        seen.append(token_id)
        return "enough" if len(seen) == 4 else None

    sequence = one.submit([1, 2, 3], 10, stop_check=check)
    await one.finish_all(sequence)
    assert seen == sequence.new_token_ids == one.alone(sequence)[:4]
    assert (sequence.finish_reason, sequence.stop_match) == (FinishReason.STOP, "enough")


async def test_cancelling_frees_blocks_at_once_even_while_the_device_hangs(rig):
    one = rig()
    one.device.hold()
    sequence = one.submit(list(range(20)), 10)
    await one.turn(20)
    assert one.state.pool.num_held > 0
    assert one.cancel(sequence)
    assert one.state.pool.num_held == 0
    assert not one.cancel(sequence)
    one.state.check()
    one.device.release()
    await one.settle()
    assert one.state.slot_pool.available == one.state.slot_pool.num_slots - 1


async def test_blocks_of_a_cancelled_sequence_are_reused_while_its_last_row_is_in_flight(rig):
    one = rig(num_blocks=9, prefix_caching=False)
    one.device.hold()
    first = one.submit(list(range(20)), 10)
    await one.turn(20)
    one.cancel(first)
    second = one.submit([9] * 25, 5)
    await one.turn(20)
    one.device.release()
    await one.finish_all(second)
    assert second.new_token_ids == one.alone(second)


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_failing_step_ends_its_own_sequences_and_no_others(rig, overlap):
    one = rig(overlap=overlap)
    one.device.fail(2)
    first = one.submit([1, 2, 3], 10)
    await one.finish_all(first)
    assert first.finish_reason is FinishReason.ERROR
    assert "step 2 was told to fail" in str(first.error)
    second = one.submit([1, 2, 3], 10)
    await one.finish_all(second)
    assert second.new_token_ids == one.alone(second)


async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(rig):
    one = rig(num_slots=2, step_time=lambda plan: 1.0)
    runs = one.submit([1, 2, 3], 50, deadline_s=5.5)
    waits = one.submit([4, 5, 6], 5, deadline_s=3.5)
    await one.finish_all(runs, waits)
    assert runs.finish_reason is waits.finish_reason is FinishReason.DEADLINE
    assert 3 <= len(runs.new_token_ids) <= 6
    assert waits.new_token_ids == []
    assert runs.new_token_ids == one.alone(runs)[: len(runs.new_token_ids)]


async def test_the_timeline_of_a_request(rig):
    one = rig(num_slots=2, step_time=lambda plan: 1.0)
    first = one.submit([1, 2, 3], 4)
    second = one.submit([4, 5, 6], 2)
    await one.finish_all(first, second)
    assert (first.admitted_s, first.first_token_s, first.last_token_s) == (0.0, 1.0, 4.0)
    assert second.admitted_s >= 4.0
    assert second.stalls_s == {"queue": 0.0, "slot": second.admitted_s} or sum(
        second.stalls_s.values()
    ) == pytest.approx(second.admitted_s)
