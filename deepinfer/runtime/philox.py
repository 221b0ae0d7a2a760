"""The random stream of sampling: Philox4x32-10, keyed by (seed, position, purpose).

A counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011) has no state that could depend on the batch, the step or the rank: number and
place are one. A sequence that is preempted, resumed or moved draws what it would have drawn.

    key      seed bits 0-31 | seed bits 32-63
    counter  position bits 0-31 | position bits 32-63 | purpose | 0
    result   the first two output words, the first one high: 64 uniform bits

The position is the absolute index, in its sequence, of the token that is being drawn.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

Uint64Array = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(enum.IntEnum):
    """What a random number decides. Numbers of different purposes are independent."""

    SAMPLE = 0  # the next token
    ACCEPT = 1  # whether a drafted token stays
    RESAMPLE = 2  # the token in place of a rejected one
    DRAFT = 3  # the drafted token itself


def philox4x32(
    counter: tuple[Uint64Array, Uint64Array, Uint64Array, Uint64Array],
    key: tuple[Uint64Array, Uint64Array],
) -> tuple[Uint64Array, Uint64Array, Uint64Array, Uint64Array]:
    """Ten rounds on 32-bit words kept in uint64 arrays [numbers]; returns four words alike."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0, word1, word2, word3 = (
            (product1 >> _HALF) ^ word1 ^ key0,
            product1 & _MASK,
            (product0 >> _HALF) ^ word3 ^ key1,
            product0 & _MASK,
        )
        key0 = (key0 + np.uint64(_WEYL[0])) & _MASK
        key1 = (key1 + np.uint64(_WEYL[1])) & _MASK
    return word0, word1, word2, word3


def random_bits(seeds: Uint64Array, positions: NDArray[np.int64], purpose: Purpose) -> Uint64Array:
    """seeds: uint64 [numbers]; positions: [numbers], not negative -> 64 uniform bits [numbers]."""
    place = positions.astype(np.uint64)
    constant = np.full_like(place, int(purpose))
    counter = (place & _MASK, place >> _HALF, constant, np.zeros_like(place))
    high, low, _, _ = philox4x32(counter, (seeds & _MASK, seeds >> _HALF))
    return (high << _HALF) | low


def scale_bits(bits: Uint64Array, totals: Uint64Array) -> Uint64Array:
    """floor(bits * totals / 2 ** 64) [numbers]: uniform in 0 .. totals - 1, in integers only."""
    bits_high, bits_low = bits >> _HALF, bits & _MASK
    totals_high, totals_low = totals >> _HALF, totals & _MASK
    upper, lower = bits_high * totals_low, bits_low * totals_high
    carry = ((bits_low * totals_low) >> _HALF) + (upper & _MASK) + (lower & _MASK)
    scaled: Uint64Array = (
        bits_high * totals_high + (upper >> _HALF) + (lower >> _HALF) + (carry >> _HALF)
    )
    return scaled
