"""From settings to a device that answers, on a tiny checkpoint."""

import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from deepinfer.runtime import build as build_module
from deepinfer.runtime.build import build_device, plan_device


@pytest.fixture
def directory(tmp_path, write_config):
    write_config(tmp_path)
    return tmp_path


def settings(directory, **changes):
    values = {"model": str(directory), "load_format": "dummy", "dtype": "float32"}
    return EngineConfig(**{**values, "max_num_seqs": 3, **changes})


async def test_the_built_device_samples(directory, make_plan, make_start):
    lines = []
    built = build_device(settings(directory), lines.append)
    device = built.device
    assert (device.num_slots, built.max_model_len, built.vocab_size) == (4, 128, 320)
    assert device.num_blocks == built.memory.num_blocks == 3 * 4 + 1
    assert [line.split()[0] for line in lines] == ["loading", "allocating"]
    assert built.checkpoint.config["model_type"] == "llama"
    start = make_start(3, [7, 8], seed=1, temperature=1.0)
    plan = make_plan(1, [(3, 0, 2, True)], [start], [(3, 0, 1)])
    device.forward(plan)
    device.sample(plan)
    assert 0 <= (await device.collect()).token_ids[0, 0] < 320
    await device.close()


async def test_the_plan_alone_says_what_the_device_will_have(directory):
    config = settings(directory, max_model_len=50, kv_cache_memory_bytes=2**20)
    built = build_device(config, lambda line: None)
    assert plan_device(config).memory.num_blocks == built.device.num_blocks
    assert built.max_model_len == 50
    for part in ("model:", "dtype: float32: as asked for", "threads:", "memory:", "KV cache:"):
        assert any(line.startswith(part) for line in built.explanation), part
    await built.device.close()


def test_what_cannot_be_served_is_refused_before_loading(directory, monkeypatch, write_config):
    with pytest.raises(ConfigError, match="'tpu'"):
        plan_device(settings(directory, device="tpu"))
    monkeypatch.setattr(build_module.host, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        plan_device(settings(directory))
    write_config(directory, model_type="gpt_neox")
    with pytest.raises(UnsupportedModelError, match="gpt_neox"):
        plan_device(settings(directory))


def test_threads_are_only_ever_lowered_unasked(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(build_module.host, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "64" in build_module._set_threads(0)
    monkeypatch.setattr(build_module.host, "usable_cores", lambda: 128)
    build_module._set_threads(0)
    assert chosen == [2]
    build_module._set_threads(96)
    assert chosen == [2, 96]
    monkeypatch.setattr(build_module.host, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")  # the user has spoken
    build_module._set_threads(0)
    assert chosen == [2, 96]


def test_weight_estimates_are_not_below_what_a_model_takes(directory):
    for dtype, bytes_per_value in (("float32", 4), ("auto", 4), ("bfloat16", 4), ("float16", 2)):
        plan = plan_device(settings(directory, dtype=dtype))
        assert plan.memory.weights_bytes >= bytes_per_value * plan.checkpoint.num_parameters
