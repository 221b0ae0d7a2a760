"""The memory plan fits, says why, and its refusals name a number that works."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepinfer.errors import ConfigError, MemoryPlanError
from deepinfer.runtime.memory import WORKSPACE_BYTES, MemoryDemand, plan_memory
from deepinfer.step import CacheSpec

GIB = 2**30
SPEC = CacheSpec(block_tokens=32, block_bytes=2**20)


def demand(**changes):
    values = {
        "free_bytes": 64 * GIB,
        "weights_bytes": GIB,
        "cache_spec": SPEC,
        "model_max_positions": 8192,
        "max_num_seqs": 64,
    }
    return MemoryDemand(**{**values, **changes})


def test_a_cpu_cache_holds_the_typical_load_and_no_more():
    plan = plan_memory(demand())
    assert (plan.num_blocks, plan.max_model_len) == (64 * 64 + 1, 8192)
    assert "64 sequences of 2,048 tokens" in plan.explain()
    assert "8,192 tokens (the model's own limit)" in plan.explain()


def test_short_contexts_need_less():
    assert plan_memory(demand(max_model_len=100)).num_blocks == 64 * 4 + 1


def test_a_single_long_sequence_fits_even_if_few_run():
    plan = plan_memory(demand(max_num_seqs=1))
    assert plan.num_blocks == 8192 // 32 + 1
    assert "one sequence of max_model_len = 8,192" in plan.explain()


def test_a_cpu_cache_takes_a_quarter_of_free_memory_at_most():
    plan = plan_memory(demand(free_bytes=8 * GIB))
    assert plan.num_blocks == 2 * 1024
    assert "a quarter" in plan.explain()


def test_an_explicit_context_may_take_more_than_the_quarter():
    plan = plan_memory(demand(free_bytes=4 * GIB, model_max_positions=2**20, max_model_len=50_000))
    assert plan.max_model_len == 50_000
    assert plan.kv_cache_bytes > GIB
    assert "no more" in plan.explain()


def test_a_derived_context_is_cut_to_the_cache():
    plan = plan_memory(demand(free_bytes=4 * GIB, model_max_positions=2**20))
    assert plan.max_model_len == (1024 - 1) * 32
    assert "the model allows 1,048,576" in plan.explain()


def test_a_gpu_cache_fills_the_room():
    plan = plan_memory(demand(fill=True))
    assert plan.num_blocks == (int(64 * GIB * 0.9) - GIB - WORKSPACE_BYTES) // 2**20


def test_an_explicit_cache_size_is_taken():
    plan = plan_memory(demand(kv_cache_memory_bytes=3 * GIB))
    assert plan.num_blocks == 3 * 1024
    assert "(kv_cache_memory_bytes)" in plan.explain()


def test_sequence_state_counts():
    spec = CacheSpec(block_tokens=32, block_bytes=2**20, state_bytes=2**26)
    with_state = plan_memory(demand(cache_spec=spec, fill=True))
    assert with_state.num_blocks == plan_memory(demand(fill=True)).num_blocks - 65 * 64


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"9,000.*8,192 positions") as caught:
        plan_memory(demand(max_model_len=9000))
    assert caught.value.field == "max_model_len"


def test_too_little_memory_for_the_weights():
    with pytest.raises(MemoryPlanError, match=r"weights 1\.0 GiB.*1\.0 GiB that are free"):
        plan_memory(demand(free_bytes=GIB))


@pytest.mark.parametrize("asked", [63 * GIB, 2**20])
def test_an_impossible_cache_size_names_the_possible_ones(asked):
    with pytest.raises(MemoryPlanError, match="kv_cache_memory_bytes") as caught:
        plan_memory(demand(kv_cache_memory_bytes=asked))
    low, high = re.search(r"be ([\d,]+) .* to ([\d,]+) ", str(caught.value)).groups()
    for bound in (low, high):
        plan_memory(demand(kv_cache_memory_bytes=int(bound.replace(",", ""))))


DEMANDS = st.builds(
    MemoryDemand,
    free_bytes=st.integers(0, 200 * GIB),
    weights_bytes=st.integers(0, 20 * GIB),
    cache_spec=st.builds(
        CacheSpec,
        block_tokens=st.sampled_from([1, 16, 32, 256]),
        block_bytes=st.integers(1, 2**24),
        state_bytes=st.sampled_from([0, 2**20]),
    ),
    model_max_positions=st.integers(1, 2**20),
    max_num_seqs=st.integers(1, 512),
    max_model_len=st.one_of(st.just(0), st.integers(1, 2**18)),
    kv_cache_memory_bytes=st.one_of(st.just(0), st.integers(1, 100 * GIB)),
    memory_utilization=st.floats(0.05, 1.0),
    fill=st.booleans(),
)


@given(DEMANDS)
def test_every_plan_fits_and_holds_one_whole_sequence(wanted):
    assume(wanted.max_model_len <= wanted.model_max_positions)
    try:
        plan = plan_memory(wanted)
    except MemoryPlanError as error:
        most = re.search(r"--max-model-len (\d+)", str(error))
        if most and int(most.group(1)) > 0:
            values = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
            plan_memory(MemoryDemand(**{**values, "max_model_len": int(most.group(1))}))
        return
    spec = wanted.cache_spec
    taken = plan.kv_cache_bytes + spec.state_bytes * (wanted.max_num_seqs + 1)
    assert taken + wanted.weights_bytes + WORKSPACE_BYTES <= wanted.free_bytes
    assert plan.kv_cache_bytes == plan.num_blocks * spec.block_bytes
    assert 1 <= plan.max_model_len <= wanted.model_max_positions
    assert (plan.num_blocks - 1) * spec.block_tokens >= plan.max_model_len
    if wanted.kv_cache_memory_bytes:
        assert plan.kv_cache_bytes <= wanted.kv_cache_memory_bytes
