"""Each kind of weight gives the product it promises, and the choice between them is explained."""

from __future__ import annotations

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


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8") as caught:
        make_linear("int8", torch.zeros(2, 2))
    assert caught.value.field == "dtype"
