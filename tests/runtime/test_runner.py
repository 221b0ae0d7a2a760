"""The runner on a model whose arithmetic is exact, so that ids can be compared bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.runtime.runner import Runner
from deepinfer.step import CacheSpec

VOCAB = 97
BLOCK = 4
MAX_LEN = 24


class RecallModel:
    """Its hidden state is a hash of the token ids that it finds in the cache, and so its logits.

    The cache holds one id a position, so a wrong block, offset or length changes every token.
    """

    vocab_size = VOCAB
    max_positions = MAX_LEN
    error = None

    def cache_spec(self):
        return CacheSpec(block_tokens=BLOCK, block_bytes=8 * BLOCK)

    def allocate_cache(self, num_blocks, num_slots):
        return torch.full((num_blocks, BLOCK), -1)

    def forward(self, token_ids, batch, cache):
        if self.error is not None:
            raise self.error
        cache[batch.write_blocks, batch.write_offsets] = token_ids
        hidden = []
        for row, count in enumerate(batch.counts_list):
            length = int(batch.lengths[row])
            context = cache[batch.block_tables[row]].flatten()[:length].tolist()
            for position in range(length - count, length):
                state = 1
                for token in context[: position + 1]:
                    state = (state * 31 + token + 7) % 65521
                hidden.append([float(state)])
        return torch.tensor(hidden)

    def logits(self, hidden):
        ids = torch.arange(VOCAB, dtype=torch.float32)
        return (hidden * (ids + 3)) % 53.0 / 10.0


def make_runner(num_blocks=32, num_slots=5):
    model = RecallModel()
    cache = model.allocate_cache(num_blocks, num_slots)
    return Runner(model, cache, num_blocks, num_slots, MAX_LEN)


def whole_table(slot, blocks):
    return [(slot, column, block) for column, block in enumerate(blocks)]


def step(runner, plan, mask=None):
    runner.forward(plan)
    return runner.sample(plan, mask)


@pytest.fixture(scope="session")
def alone(make_plan, make_start):
    """alone(prompt, num_tokens, **params): the ids of one sequence in one slot.

    The prompt is computed at once, then token by token.
    """

    def run(prompt, num_tokens, **params):
        runner = make_runner()
        table = whole_table(1, range(1, 7))
        result = step(
            runner,
            make_plan(0, [(1, 0, len(prompt), True)], [make_start(1, prompt, **params)], table),
        )
        tokens = [int(result.token_ids[0, 0])]
        for number in range(1, num_tokens):
            known = len(prompt) + number
            result = step(runner, make_plan(number, [(1, known - 1, 1, True)]))
            tokens.append(int(result.token_ids[0, 0]))
        return tokens

    return run


def test_rows_of_all_kinds_share_a_step(make_plan, make_start, alone):
    runner = make_runner()
    step(
        runner,
        make_plan(
            1,
            [(0, 0, 5, False), (2, 0, 3, True)],
            [make_start(0, range(9)), make_start(2, [4, 5, 6], temperature=1.0, seed=3)],
            whole_table(0, [9, 4, 7]) + whole_table(2, [3, 1]),
        ),
    )
    second = make_plan(
        2,
        [(4, 0, 2, True), (2, 3, 1, True), (0, 5, 4, True)],
        [make_start(4, [8, 8], temperature=0.7, top_k=9, seed=5)],
        whole_table(4, [2]),
    )
    result = step(runner, second)
    assert result.number == 2
    assert result.num_tokens.tolist() == [1, 1, 1]
    assert result.token_ids[:, 0].tolist() == [
        alone([8, 8], 1, temperature=0.7, top_k=9, seed=5)[0],
        alone([4, 5, 6], 2, temperature=1.0, seed=3)[1],
        alone(range(9), 1)[0],
    ]


def test_rows_that_do_not_sample_have_no_token(make_plan, make_start):
    runner = make_runner()
    plan = make_plan(1, [(0, 0, 2, False)], [make_start(0, [1, 2, 3])], [(0, 0, 1)])
    result = step(runner, plan)
    assert (result.num_tokens.tolist(), result.logprobs) == ([0], None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), st.data())
def test_chunks_give_what_the_whole_prompt_gives(make_plan, make_start, alone, prompt, data):
    params = {"temperature": data.draw(st.sampled_from([0.0, 1.0])), "seed": 77}
    blocks = data.draw(st.permutations(range(1, 7)))
    runner, first, number = make_runner(), 0, 0
    changes = ([make_start(3, prompt, **params)], whole_table(3, blocks))
    while first < len(prompt):
        count = data.draw(st.integers(1, len(prompt) - first))
        row = (3, first, count, first + count == len(prompt))
        result = step(runner, make_plan(number, [row], *changes))
        first, number, changes = first + count, number + 1, ()
    tokens = [int(result.token_ids[0, 0])]
    for known in range(len(prompt) + 1, len(prompt) + 4):
        number += 1
        result = step(runner, make_plan(number, [(3, known - 1, 1, True)]))
        tokens.append(int(result.token_ids[0, 0]))
    assert tokens == alone(prompt, 4, **params)
    assert runner.known_token_ids(3, len(prompt) + 4).tolist() == prompt + tokens


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.sampled_from([0.0, 1.0]))
def test_a_resumed_sequence_continues_as_if_nothing_had_happened(
    make_plan, make_start, alone, num_before, temperature
):
    prompt, params = [3, 1, 4, 1, 5], {"temperature": temperature, "seed": 9, "min_tokens": 4}
    stops = {"stop_token_ids": range(0, VOCAB, 2)}
    expected = alone(prompt, 6, **params, **stops)
    known = prompt + expected[:num_before]
    runner = make_runner()
    resumed = make_start(2, known, prompt_tokens=len(prompt), **params, **stops)
    plan = make_plan(1, [(2, 0, len(known), True)], [resumed], whole_table(2, [6, 5, 4]))
    assert step(runner, plan).token_ids[0, 0] == expected[num_before]
    assert all(token % 2 for token in expected[:4])


def test_a_new_sequence_in_a_slot_starts_with_an_empty_table(make_plan, make_start):
    runner = make_runner()
    table = whole_table(0, [1, 2])
    step(runner, make_plan(1, [(0, 0, 6, True)], [make_start(0, range(6))], table))
    plan = make_plan(2, [(0, 0, 2, True)], [make_start(0, [7, 8])], [(0, 0, 3)])
    _, batch = runner.batch(plan)
    runner.forward(plan)
    assert runner._block_tables[0].tolist() == [3, 0, 0, 0, 0, 0]
    assert batch.block_tables.shape == (1, 1)


def test_positions_before_write_from_are_computed_but_not_written(make_plan, make_start, alone):
    runner = make_runner()
    runner.cache[5] = torch.tensor([1, 2, 3, 4])  # a cached block that others share
    plan = make_plan(
        1,
        [(0, 2, 4, True)],
        [make_start(0, [1, 2, 3, 4, 5, 6])],
        whole_table(0, [5, 8]),
        write_from=[4],
    )
    result = step(runner, plan)
    assert runner.cache[5].tolist() == [1, 2, 3, 4]
    assert runner.cache[8].tolist() == [5, 6, -1, -1]
    assert result.token_ids[0, 0] == alone([1, 2, 3, 4, 5, 6], 1)[0]


def test_a_row_beyond_the_context_limit_hurts_nobody(make_plan, make_start, alone):
    runner = make_runner()
    starts = [make_start(0, range(MAX_LEN)), make_start(1, [5, 6])]
    table = whole_table(0, range(1, 7)) + whole_table(1, [7, 8])
    rows = [(0, 0, MAX_LEN, True), (1, 0, 2, True)]
    step(runner, make_plan(1, rows, starts, table))
    before = runner.cache[1:].clone()
    for number in range(2, 5):  # slot 0 has long been full
        overrun = (0, MAX_LEN + number - 2, 1, True)
        result = step(runner, make_plan(number, [overrun, (1, number, 1, True)]))
    assert result.token_ids[1, 0] == alone([5, 6], 4)[3]
    assert torch.equal(runner.cache[1:7], before[:6])
    assert runner.known_token_ids(0, MAX_LEN).tolist() == list(range(MAX_LEN))
    assert runner.known_token_ids(1, 2).tolist() == [5, 6]


def test_a_sequence_longer_than_the_buffers_is_refused(make_plan, make_start):
    with pytest.raises(ValueError, match=r"25 token ids.*max_model_len = 24"):
        make_runner().forward(
            make_plan(1, [(0, 0, 1, False)], [make_start(0, range(25))], [(0, 0, 1)])
        )


def test_changes_of_a_failed_step_are_in_place(make_plan, make_start, alone):
    runner = make_runner()
    runner.model.error = RuntimeError("out of luck")
    plan = make_plan(1, [(0, 0, 2, True)], [make_start(0, [1, 2])], [(0, 0, 4)])
    with pytest.raises(RuntimeError, match="luck"):
        runner.forward(plan)
    runner.model.error = None
    assert step(runner, make_plan(2, [(0, 0, 2, True)])).token_ids[0, 0] == alone([1, 2], 1)[0]


def test_logprobs_name_rows_of_the_plan(make_plan, make_start):
    runner = make_runner()
    starts = [
        make_start(0, [1, 2, 3]),
        make_start(1, [4], logprobs=0),
        make_start(2, [5, 6]),
        make_start(3, [7], logprobs=2),
    ]
    rows = [(0, 0, 2, False), (1, 0, 1, True), (2, 0, 2, True), (3, 0, 1, True)]
    table = [(slot, 0, slot + 1) for slot in range(4)]
    result = step(runner, make_plan(1, rows, starts, table))
    assert result.logprobs.rows.tolist() == [1, 3]
    assert result.logprobs.chosen.shape == (2, 1)
    assert result.logprobs.top.shape == (2, 1, 2)
    assert result.logprobs.top_token_ids[1, 0, 0] == result.token_ids[3, 0]  # greedy
    assert result.logprobs.top[1, 0, 0] == result.logprobs.chosen[1, 0]


def test_a_mask_has_a_line_for_every_row_of_the_plan(make_plan, make_start):
    runner = make_runner()
    mask = np.full((2, 4), -1, np.int32)
    mask[1] = [0, 1 << 5, 0, 0]  # only id 37
    starts = [make_start(0, [1, 2, 3]), make_start(1, [4])]
    plan = make_plan(1, [(0, 0, 2, False), (1, 0, 1, True)], starts, [(0, 0, 1), (1, 0, 2)])
    assert step(runner, plan, mask).token_ids[1, 0] == 37


def test_positions_and_places_equal_those_of_a_loop(make_plan, make_start):
    runner = make_runner()
    starts = [make_start(0, range(20)), make_start(1, range(40, 50))]
    table = whole_table(0, [9, 8, 7, 6, 5]) + whole_table(1, [4, 3, 2])
    plan = make_plan(1, [(1, 0, 10, True), (0, 0, 7, False)], starts, table)
    runner.forward(plan)
    token_ids, batch = runner.batch(plan)
    assert token_ids.tolist() == [*range(40, 50), *range(7)]
    assert batch.positions.tolist() == [*range(10), *range(7)]
    assert batch.row_starts.tolist() == [0, 10, 17]
    assert batch.lengths.tolist() == batch.lengths_list == [10, 7]
    assert batch.counts_list == [10, 7]
    assert batch.block_tables.tolist() == [[4, 3, 2], [9, 8, 7]]
    assert batch.write_blocks.tolist() == [4] * 4 + [3] * 4 + [2] * 2 + [9] * 4 + [8] * 3
    assert batch.write_offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert {tensor.dtype for tensor in (token_ids, batch.write_blocks, batch.block_tables)} == {
        torch.int64
    }
