"""The prefix index: what a lookup finds, and the reason when it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.scheduler.prefix import PrefixIndex, extend_keys, root_key
from deepinfer.types import PrefixMiss


def keys_of(tokens, block_tokens=4, salt=b"", model="m"):
    keys: list[bytes] = []
    root = root_key(model, block_tokens, salt)
    extend_keys(keys, root, np.array(tokens, np.int32), block_tokens)
    return keys


@given(
    st.lists(st.integers(0, 2), max_size=24),
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(1, 5),
)
def test_keys_are_equal_exactly_as_far_as_whole_blocks_are(one, other, block_tokens):
    same = sum(
        1
        for end in range(block_tokens, min(len(one), len(other)) + 1, block_tokens)
        if one[:end] == other[:end]
    )
    pairs = zip(keys_of(one, block_tokens), keys_of(other, block_tokens), strict=False)
    assert sum(1 for a, b in pairs if a == b) == same


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 30))
def test_keys_can_be_extended_in_parts(tokens, cut):
    keys = keys_of(tokens[:cut])
    extend_keys(keys, root_key("m", 4), np.array(tokens, np.int32), 4)
    assert keys == keys_of(tokens)


def test_model_block_size_and_salt_are_part_of_the_key():
    tokens = [1, 2, 3, 4]
    assert (
        len({keys_of(tokens)[0], keys_of(tokens, salt=b"s")[0], keys_of(tokens, model="n")[0]}) == 3
    )
    assert root_key("m", 4) != root_key("m", 8)


@pytest.fixture
def index():
    """Holds blocks 1, 2, 3 for [1]*4 + [2]*4 + [3]*4; the third was evicted."""
    index = PrefixIndex()
    for block, key in enumerate(keys_of([1] * 4 + [2] * 4 + [3] * 4), 1):
        assert index.publish(block, key)
    index.forget(3)
    return index


@pytest.mark.parametrize(
    ("tokens", "hits", "miss"),
    [
        ([1] * 3, [], PrefixMiss.SHORT),
        ([1] * 4, [], PrefixMiss.SHORT),  # its last token has to be computed
        ([9] * 9, [], PrefixMiss.COLD),
        ([1] * 4 + [9] * 9, [1], PrefixMiss.DIVERGED),
        ([1] * 4 + [2] * 4 + [9], [1, 2], PrefixMiss.NONE),
        ([1] * 4 + [2] * 4 + [3] * 4 + [9], [1, 2], PrefixMiss.EVICTED),
    ],
)
def test_a_miss_has_a_reason(index, tokens, hits, miss):
    most = (len(tokens) - 1) // 4
    keys = keys_of(tokens)
    assert index.match(keys, most) == hits
    assert index.explain_miss(keys, len(hits), most) is miss


def test_a_disabled_index_says_so():
    index = PrefixIndex(enabled=False)
    keys = keys_of([1] * 8)
    assert not index.publish(1, keys[0])
    assert index.match(keys, 1) == []
    assert index.explain_miss(keys, 0, 1) is PrefixMiss.DISABLED
    assert not index.is_coming(keys, 0)


def test_the_first_block_stands_for_a_key(index):
    key = keys_of([1] * 4)[0]
    assert not index.publish(7, key)
    assert index.match([key], 1) == [1]


def test_what_is_announced_is_coming_until_all_have_withdrawn(index):
    keys = keys_of([5] * 8)
    index.announce(keys)
    index.announce(keys[:1])
    index.withdraw(keys)
    assert index.is_coming(keys, 0)
    assert not index.is_coming(keys, 1)
    index.withdraw(keys[:1])
    index.check_idle()


@given(st.lists(st.integers(0, 1), min_size=4, max_size=40), st.data())
def test_reach_agrees_with_match_from_wherever_it_starts(tokens, data):
    keys = keys_of(tokens)
    index = PrefixIndex()
    known = data.draw(st.integers(0, len(keys)))
    for block, key in enumerate(keys[:known], 1):
        index.publish(block, key)
    most = data.draw(st.integers(0, len(keys)))
    near = data.draw(st.integers(0, len(keys) + 3))
    assert index.reach(keys, most, near) == len(index.match(keys, most))


def test_reach_may_overlook_a_hole_but_match_does_not():
    keys = keys_of(list(range(16)))
    index = PrefixIndex()
    for block, key in enumerate(keys, 1):
        index.publish(block, key)
    index.forget(2)
    assert index.reach(keys, 4, near=4) == 4
    assert index.match(keys, 4) == [1]
