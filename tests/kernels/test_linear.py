"""Each kind of weight gives the product it promises, and the choice between them is explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.kernels.linear import choose_dtype, make_linear


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_product_with_the_rounded_weight(dtype: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(70, 40, generator=generator), torch.randn(70, generator=generator)
    x = torch.randn(rows, 40, generator=generator)
    rounded = weight.to(getattr(torch, dtype)).double()
    out = make_linear(dtype, weight, bias)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ rounded.T + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(make_linear(dtype, weight)(x), out - bias, rtol=1e-4, atol=1e-4)


def test_auto_chooses_a_kind_and_says_why() -> None:
    dtype, reason = choose_dtype(torch.randn(96, 64), rows=(1, 4))
    assert dtype in ("float32", "float16")
    assert reason.startswith(f"{dtype}: ")
    assert "64 x 96" in reason
    assert "1 / 4 rows" in reason
    assert "float32 " in reason
    assert "float16 " in reason


GROWTH = """
import json, torch
from deepinfer.kernels.linear import linear_bytes, make_linear

def anonymous_bytes():
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

torch.set_num_threads(1)
weight = torch.ones(20001, 576).to(torch.bfloat16)
kept, seen = [], {}
for dtype in ("float32", "float16", "bfloat16"):
    wide = weight.float()
    before = anonymous_bytes()
    kept.append(make_linear(dtype, wide))
    own = wide.nbytes if dtype == "float32" else 0  # which it takes over as it is
    seen[dtype] = (anonymous_bytes() - before + own) / linear_bytes(dtype, *weight.shape)
    if dtype == "float32":
        kept.append(wide)
print(json.dumps(seen))
"""


def test_weights_take_the_memory_that_is_planned_for_them() -> None:
    """In a process of its own, whose memory nothing else changes."""
    run = subprocess.run(
        [sys.executable, "-c", GROWTH],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    for dtype, share in json.loads(run.stdout).items():
        assert share == pytest.approx(1.0, abs=0.03), dtype


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8") as caught:
        make_linear("int8", torch.zeros(2, 2))
    assert caught.value.field == "dtype"
