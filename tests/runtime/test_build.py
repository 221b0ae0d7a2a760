"""From settings to a device that answers, on a tiny checkpoint."""

import json

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.errors import ConfigError, MemoryPlanError, UnsupportedModelError
from deepinfer.runtime import build as build_module
from deepinfer.runtime.build import build_device, plan_device
from deepinfer.step import SequenceStart, StepPlan
from deepinfer.types import SamplingParams

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def settings(directory, **changes):
    values = {"model": str(directory), "load_format": "dummy", "dtype": "float32"}
    return EngineConfig(**{**values, "max_num_seqs": 3, **changes})


async def test_the_built_device_samples(directory):
    lines = []
    built = build_device(settings(directory), lines.append)
    device = built.device
    assert (device.num_slots, built.max_model_len, built.vocab_size) == (4, 128, 320)
    assert device.num_blocks == built.memory.num_blocks == 3 * 4 + 1
    assert [line.split()[0] for line in lines] == ["loading", "allocating"]
    assert built.checkpoint.config["model_type"] == "llama"
    plan = StepPlan(
        number=1,
        slots=np.array([3], np.int32),
        first=np.array([0], np.int32),
        count=np.array([2], np.int32),
        samples=np.array([True]),
        write_from=np.array([0], np.int32),
        tail_start=np.array([0], np.int32),
        num_tokens=2,
        starts=(
            SequenceStart(
                slot=3,
                token_ids=np.array([7, 8], np.int32),
                prompt_tokens=2,
                params=SamplingParams(),
                seed=1,
                stop_token_ids=(),
            ),
        ),
        table_slots=np.array([3], np.int32),
        table_columns=np.array([0], np.int32),
        table_blocks=np.array([1], np.int32),
    )
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


def test_what_cannot_be_served_is_refused_before_loading(directory, monkeypatch):
    with pytest.raises(ConfigError, match="'tpu'"):
        plan_device(settings(directory, device="tpu"))
    monkeypatch.setattr(build_module.host, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        plan_device(settings(directory))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt_neox"}))
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
