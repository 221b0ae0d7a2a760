"""`deepinfer plan`: the memory plan of a checkpoint that is never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.cli import main


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A model of which nothing but the configuration exists: 1.1 billion parameters."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_it_says_what_fits_and_why(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--load-format", "dummy", "--kv-cache-memory-bytes", "256M"]
    assert main(["plan", str(model_directory), *arguments]) == 0
    text = capsys.readouterr().out
    assert "1,100.0 M parameters" in text
    # 22 layers x 32 tokens x 2 x 4 heads x 64 x 4 bytes = 1.375 MiB a block, 186 blocks in 256 MiB
    assert "186 blocks of 32 tokens" in text
    assert "(kv_cache_memory_bytes)" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert rows == [["512", "11"], ["1,024", "5"], ["2,048", "2"], ["4,096", "1"]]


def test_json_has_the_same_numbers(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--load-format", "dummy", "--kv-cache-memory-bytes", "256M", "--json"]
    assert main(["plan", str(model_directory), *arguments]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_blocks"] == 186
    assert plan["max_model_len"] == 4096
    assert plan["sequences_by_tokens"]["2048"] == 2
    assert len(plan["reasons"]) >= 4


def test_what_does_not_fit_is_refused_with_what_would(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--load-format", "dummy", "--kv-cache-memory-bytes", "64M"]
    assert main(["plan", str(model_directory), *arguments, "--max-model-len", "4096"]) == 2
    assert "At most 1,440 tokens fit" in capsys.readouterr().err
