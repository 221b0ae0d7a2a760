"""The random stream is the published one, and its scaling is exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.runtime.philox import Purpose, philox4x32, random_bits, scale_bits

WORDS = st.integers(0, 2**64 - 1)


# The known-answer vectors of the Random123 distribution, philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, answer):
    def words(values):
        return tuple(np.array([value], np.uint64) for value in values)

    assert [int(word[0]) for word in philox4x32(words(counter), words(key))] == answer


def test_seed_position_and_purpose_each_choose_a_stream():
    def draw(seed, position, purpose):
        seeds, positions = np.array([seed], np.uint64), np.array([position], np.int64)
        return int(random_bits(seeds, positions, purpose)[0])

    assert draw(0, 0, Purpose.SAMPLE) == 0x6627E8D5E169C58D
    places = [
        (seed, position, purpose)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for position in (0, 1, 2**32)
        for purpose in Purpose
    ]
    assert len({draw(*place) for place in places}) == len(places)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=20))
def test_scaling_is_the_high_half_of_the_exact_product(pairs):
    bits, totals = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    expected = [a * b >> 64 for a, b in pairs]
    assert scale_bits(bits, totals).tolist() == expected
