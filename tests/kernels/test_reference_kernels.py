"""The small operations against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import UnsupportedModelError
from deepinfer.kernels import reference
from deepinfer.kernels.rotary import inverse_frequencies, rotary_table


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(rows=st.integers(1, 5), width=st.integers(1, 70), eps=st.sampled_from([1e-6, 1e-2]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rms_norm(rows: int, width: int, eps: float) -> None:
    x, weight = randn(rows, width), randn(width, seed=1)
    for row, out in zip(x.tolist(), reference.rms_norm(x, weight, eps).tolist(), strict=True):
        rms = math.sqrt(sum(value * value for value in row) / width + eps)
        expected = [value / rms * w for value, w in zip(row, weight.tolist(), strict=True)]
        assert out == pytest.approx(expected, rel=1e-5, abs=1e-6)


@given(position=st.integers(0, 500), half=st.sampled_from([4, 12, 32]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rotary_turns_pairs_of_halves(position: int, half: int) -> None:
    """As complex numbers: (x[i] + j x[i + half]) * exp(j * position * theta^(-i / half))."""
    x = randn(1, 2, 2 * half)
    table = rotary_table(1000.0, None, 2 * half, 501)
    out = reference.rotary_embedding(x, *table.at(torch.tensor([position])))
    angle = position * 1000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angle)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=2e-4)


def test_rotary_keeps_relative_positions() -> None:
    query, key = randn(1, 1, 64), randn(1, 1, 64, seed=1)
    table = rotary_table(1e4, None, 64, 200)

    def score(query_position: int, key_position: int) -> float:
        turned = reference.rotary_embedding(query, *table.at(torch.tensor([query_position])))
        other = reference.rotary_embedding(key, *table.at(torch.tensor([key_position])))
        return float((turned * other).sum())

    assert score(10, 3) == pytest.approx(score(190, 183), rel=1e-3)
    assert score(10, 3) != pytest.approx(score(190, 182), rel=1e-3)


def test_explicit_frequency_factors_divide() -> None:
    plain, _ = inverse_frequencies(1e4, {}, 8, 100)
    factors = [1.0, 2.0, 4.0, 32.0]
    divided, magnitude = inverse_frequencies(
        1e4, {"rope_type": "factors", "factors": factors}, 8, 100
    )
    assert magnitude == 1.0
    assert torch.equal(divided, plain / torch.tensor(factors))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "factors", "factors": [1.0, 2.0]}, "2 frequency factors"),
    ],
)
def test_other_scalings_are_refused_by_name(scaling: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        inverse_frequencies(1e4, scaling, 8, 100)


def test_silu_and_multiply() -> None:
    gate_up = randn(3, 14)
    out = reference.silu_and_multiply(gate_up)
    for row, values in zip(out.tolist(), gate_up.tolist(), strict=True):
        gate, up = values[:7], values[7:]
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
        assert row == pytest.approx(expected, rel=1e-5)


def test_write_cache_changes_only_its_places() -> None:
    cache = torch.zeros(4, 2, 6, 5)
    key, value = randn(2, 3, 5), randn(2, 3, 5, seed=1)
    reference.write_cache(cache, torch.tensor([7, 2]), key, value)
    assert torch.equal(cache[3, 1], torch.cat((key[0], value[0])))
    assert torch.equal(cache[1, 0], torch.cat((key[1], value[1])))
    assert int((cache != 0).any(dim=(2, 3)).sum()) == 2
