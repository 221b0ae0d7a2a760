"""The sampler against a slow, obvious one that looks at one row at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.runtime.philox import Purpose, random_bits
from deepinfer.runtime.sampler import SamplingState, sample
from deepinfer.step import SequenceStart
from deepinfer.types import SamplingParams

ONE = 2**40


def state_of(rows, stop_token_ids=(), prompt_tokens=0):
    """rows: (SamplingParams, seed), one a slot."""
    state = SamplingState(len(rows))
    for slot, (params, seed) in enumerate(rows):
        state.load(
            SequenceStart(
                slot=slot,
                token_ids=np.zeros(1, np.int32),
                prompt_tokens=prompt_tokens,
                params=params,
                seed=seed,
                stop_token_ids=tuple(stop_token_ids),
            )
        )
    return state


def draw(logits, rows, positions, slots=None, mask=None, **options):
    state = state_of(rows, **options)
    slots = np.arange(len(logits)) if slots is None else np.asarray(slots)
    return sample(logits.clone(), slots, np.asarray(positions, np.int64), state, mask)


def obvious_token(logits, params, seed, position):
    """logits: list of floats, masked already. What one row must get, in plain Python."""
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return ranking[0]
    values = torch.tensor(logits) - max(logits)
    temperature = np.float32(max(params.temperature, 1e-6))
    weights = [math.floor(e * ONE) for e in (values / torch.tensor(temperature)).exp().tolist()]
    kept = ranking[: params.top_k] if params.top_k > 0 else ranking
    if params.top_p < 1:
        wanted = max(1, math.ceil(np.float64(params.top_p) * sum(weights[token] for token in kept)))
        size, mass = 0, 0
        while size < len(kept) and mass < wanted:
            mass += weights[kept[size]]
            size += 1
        kept = kept[:size]
    kept = [token for token in kept if weights[token] >= math.ceil(params.min_p * ONE)]
    total = sum(weights[token] for token in kept)
    bits = random_bits(
        np.array([seed % 2**64], np.uint64), np.array([position]), Purpose.SAMPLE
    ).tolist()[0]
    target, mass = bits * total >> 64, 0
    for token in sorted(kept):
        mass += weights[token]
        if mass > target:
            return token
    raise AssertionError("the total was reached without a token")


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 3, 63, 64, 70, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-3, 0.2, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(PARAMS, st.integers(-(2**63), 2**64 - 1)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 40, 64, 65, 300, 1500]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 8.0, 40.0]),
    st.booleans(),
)
def test_equals_the_obvious_sampler(rows, vocab_size, data_seed, spread, coarse):
    generator = torch.Generator().manual_seed(data_seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * spread
    if coarse:  # many ties
        logits = logits.round()
    positions = torch.randint(0, 2**40, (len(rows),), generator=generator).tolist()
    token_ids, logprobs = draw(logits, rows, positions)
    expected = [
        obvious_token(row.tolist(), params, seed, position)
        for row, (params, seed), position in zip(logits, rows, positions, strict=True)
    ]
    assert token_ids.tolist() == expected
    assert logprobs is None


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 12))
def test_the_other_rows_of_the_batch_change_nothing(order, size):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(12, 2000, generator=generator) * 4
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=2.0, top_p=0.99, top_k=500, logprobs=5),
        SamplingParams(temperature=1.0, min_p=0.05),
    ]
    rows = [(kinds[slot % len(kinds)], slot) for slot in range(12)]
    positions = np.arange(100, 112)
    together, _ = draw(logits, rows, positions)
    some = np.array(order[:size])
    part, _ = draw(logits[torch.from_numpy(some)], rows, positions[some], slots=some)
    assert part.tolist() == together[some].tolist()


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), 8),
        (SamplingParams(temperature=2.0), 8),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_p=0.8), 4),
        (SamplingParams(min_p=0.3), 3),
        (SamplingParams(temperature=0.5, top_k=6, top_p=0.99, min_p=0.01), 5),
    ],
)
def test_the_distribution_is_right(params, kept):
    # Probabilities proportional to 2 ** (-0.7 i), in shuffled order of ids.
    num_draws, order = 20_000, [3, 0, 7, 5, 1, 6, 2, 4]
    scores = -torch.tensor(order, dtype=torch.float32) * math.log(2) * 0.7
    exact = torch.softmax(scores.double() / params.temperature, 0).numpy()
    exact[np.array(order) >= kept] = 0.0
    exact /= exact.sum()
    state = state_of([(params, 1234)])
    slots = np.zeros(num_draws, np.int64)
    token_ids, _ = sample(scores.repeat(num_draws, 1), slots, np.arange(num_draws), state)
    counts = np.bincount(token_ids, minlength=8)
    assert (counts[exact == 0] == 0).all()
    # 99.9th percentile of chi-square with 7 degrees of freedom is 24.3; the seed is fixed.
    assert chi_square(counts[exact > 0], exact[exact > 0]) < 24.3


def test_same_seed_and_position_same_token_and_positions_differ():
    logits = torch.zeros(64, 1000)
    rows = [(SamplingParams(), 5)] * 64
    same, _ = draw(logits, rows, [9] * 64)
    assert len(set(same.tolist())) == 1
    different, _ = draw(logits, rows, range(64))
    assert len(set(different.tolist())) > 50
    negative, _ = draw(logits[:1], [(SamplingParams(), -1)], [9])
    assert negative == draw(logits[:1], [(SamplingParams(), 2**64 - 1)], [9])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(temperature):
    logits = torch.zeros(4, 40)
    logits[:, [7, 9]] = 50.0
    rows = [(SamplingParams(temperature=temperature, min_tokens=2), 1)] * 4
    token_ids, _ = draw(
        logits, rows, [10, 11, 12, 13], stop_token_ids=[7, 9, 4_000_000], prompt_tokens=10
    )
    assert [token in (7, 9) for token in token_ids.tolist()] == [False, False, True, True]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=50.0),
        SamplingParams(temperature=50.0, top_k=20, top_p=0.9),
    ],
)
def test_a_mask_leaves_only_what_it_allows(params):
    vocab_size, allowed = 1003, [{0, 31, 32, 1002}, {500}, set(range(1003))]
    words = np.zeros((3, 32), np.uint32)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    mask = torch.from_numpy(words.view(np.int32))
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    for position in range(20):
        token_ids, _ = draw(logits, [(params, 3)] * 3, [position] * 3, mask=mask)
        assert all(token in ids for token, ids in zip(token_ids.tolist(), allowed, strict=True))


def test_logprobs_are_raw_and_only_for_the_rows_that_asked():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 500, generator=generator) * 3
    logits[3] = logits[3].round()  # ties
    wishes = (None, 0, 3, 20)
    rows = [
        (SamplingParams(temperature=3.0, top_k=4, min_tokens=3, logprobs=wish), 11)
        for wish in wishes
    ]
    best = logits.argmax(dim=1).tolist()
    token_ids, logprobs = draw(logits, rows, [0] * 4, stop_token_ids=best)
    assert logprobs.rows.tolist() == [1, 2, 3]
    assert logprobs.top.shape == (3, 20)
    raw = torch.log_softmax(logits, dim=1)
    for index, row in enumerate((1, 2, 3)):
        assert token_ids[row] != best[row]  # masked for drawing, but not in the raw distribution
        assert logprobs.chosen[index] == raw[row, token_ids[row]]
        ranking = sorted(range(500), key=lambda token, row=row: (-raw[row, token].item(), token))
        assert logprobs.top_token_ids[index].tolist() == ranking[:20]
        assert logprobs.top[index].tolist() == raw[row][ranking[:20]].tolist()


def test_logprobs_zero_gives_the_chosen_one_alone():
    rows = [(SamplingParams(temperature=0.0, logprobs=0), 0)]
    _, logprobs = draw(torch.tensor([[0.0, 1.0]]), rows, [0])
    assert logprobs.top.shape == (1, 0)
    assert logprobs.chosen.tolist() == pytest.approx([-math.log1p(math.exp(-1))])


def test_hopeless_logits_still_give_an_id_inside_the_vocabulary():
    logits = torch.stack([torch.full((70,), -torch.inf), torch.full((70,), torch.nan)])
    for params in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(temperature=0.0)):
        token_ids, _ = draw(logits, [(params, 0)] * 2, [0, 0])
        assert all(0 <= token < 70 for token in token_ids.tolist())
