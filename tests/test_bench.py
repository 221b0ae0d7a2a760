"""The measuring programs run, and print a table and then one JSON document as their last line.

Their figures are not checked: timed checks belong in the benchmarks, not here.
"""

from __future__ import annotations

import json

import pytest

from deepinfer import bench


def run(capsys, *arguments):
    assert bench.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[:-1], json.loads(lines[-1])


def test_scheduler(capsys):
    table, document = run(
        capsys, "scheduler", "--sequences", "1", "5", "--contexts", "300", "--steps", "70"
    )
    points = document["points"]
    assert [point["sequences"] for point in points] == [1, 5]
    assert all(point["steps"] == 70 and point["context_tokens"] == 300 for point in points)
    for point in points:
        assert point["host_us"] == pytest.approx(point["plan_us"] + point["commit_us"])
        assert point["per_sequence_us"] == pytest.approx(point["host_us"] / point["sequences"])
    assert sum("300" in line for line in table) == 2


def test_engine(capsys):
    table, document = run(
        capsys,
        *("engine", "--transformers", "--dtype", "float32"),
        *("--concurrency", "1", "2", "--input-tokens", "8", "--output-tokens", "3"),
    )
    rounds = document["rounds"]
    assert [one["concurrency"] for one in rounds] == [1, 2]
    assert all(one["output_tokens_per_s"] > 0 and one["tpot_s"] >= 0 for one in rounds)
    assert any(line.startswith("dtype: float32") for line in table)
    assert all(one["system"] == "deepinfer float32" for one in rounds)


def test_lag(capsys):
    table, document = run(capsys, "lag", "--prompt-tokens", "40", "--decoding", "1")
    assert document["busy"]["max_ms"] >= document["busy"]["p99_ms"] >= 0
    assert table[-1].startswith("busy")
