"""Matrix products with a model's weights: one class per way to store and multiply them on a CPU.

A `Linear` owns its weight; `make_linear` builds the kind asked for, `choose_dtype` measures which
kind is fastest on this machine. Models call these and know nothing of formats.

    float32   the weights as they are; oneMKL's GEMM
    float16   weights rounded to float16 and packed; activations and sums stay float32. Half the
              memory traffic, so decoding speeds up most
    bfloat16  weights rounded to bfloat16, multiplied in float32: the checkpoint's values exactly
              where it is stored so, but the speed and the memory of float32
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

from deepinfer.errors import ConfigError

DTYPE_CANDIDATES = ("float32", "float16")  # bfloat16 costs precision and gains nothing here
_MEASURED_VALUES = 1 << 20
_PACKED_ROWS, _PACKED_COLUMNS = 512, 16  # fbgemm fills blocks of so many inputs and outputs up


class Linear(Protocol):
    """x: float32 [rows, in_features] -> float32 [rows, out_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Float32Linear:
    """`weight`: [out_features, in_features], `bias`: [out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.to(torch.float32).contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class Float16Linear:
    """Weights packed by fbgemm as float16; each is widened to float32 when it is multiplied."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with warnings.catch_warnings():
            # torch announces the removal of eager quantization in general terms here.
            warnings.simplefilter("ignore")
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16(
                weight.to(torch.float32).contiguous(), bias
            )
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._multiply(x, self._packed)
        return product


def make_linear(dtype: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`dtype` is resolved: never "auto". The bias is float32 in every kind."""
    bias = None if bias is None else bias.to(torch.float32)
    if dtype == "float32":
        return Float32Linear(weight, bias)
    if dtype == "float16":
        return Float16Linear(weight, bias)
    if dtype == "bfloat16":
        return Float32Linear(weight.to(torch.bfloat16), bias)
    raise ConfigError(
        f"dtype is {dtype!r}; on a CPU it is auto, float32, float16 or bfloat16.", "dtype"
    )


def linear_bytes(dtype: str, out_features: int, in_features: int) -> int:
    """What the weight of a `make_linear` takes once it is made. Narrow layers pack badly."""
    if dtype != "float16":
        return 4 * out_features * in_features
    rows = -(-in_features // _PACKED_ROWS) * _PACKED_ROWS
    columns = -(-out_features // _PACKED_COLUMNS) * _PACKED_COLUMNS
    return 2 * rows * columns


def choose_dtype(weight: torch.Tensor, rows: tuple[int, ...] = (1, 8, 32)) -> tuple[str, str]:
    """Measures the kinds on one of the model's own weights -> (dtype, the figures as a sentence).

    Takes about 0.1 s; of a large weight only the first rows are measured, for packing it all would
    cost seconds. The kinds take turns and run on one thread, so that other load on the machine does
    not decide.
    """
    weight = weight[: max(1, _MEASURED_VALUES // weight.shape[1])]
    linears = {dtype: make_linear(dtype, weight) for dtype in DTYPE_CANDIDATES}
    times_us: dict[str, list[float]] = {dtype: [] for dtype in linears}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for count in rows:
            for dtype, best_us in _fastest_us(linears, weight.shape[1], count).items():
                times_us[dtype].append(best_us)
    finally:
        torch.set_num_threads(threads)
    best = min(times_us, key=lambda dtype: math.prod(times_us[dtype]))
    figures = "; ".join(
        f"{dtype} " + " / ".join(f"{value:.0f}" for value in values)
        for dtype, values in times_us.items()
    )
    shape = f"{weight.shape[1]} x {weight.shape[0]}"
    at = " / ".join(str(count) for count in rows)
    return (
        best,
        f"{best}: fastest for a {shape} layer at {at} rows, us on one thread: {figures}",
    )


def _fastest_us(
    linears: Mapping[str, Linear], in_features: int, rows: int, seconds: float = 0.03
) -> dict[str, float]:
    """For each kind the fastest of the calls that fit into `seconds` together, at least three."""
    x = torch.ones(rows, in_features)
    best = dict.fromkeys(linears, float("inf"))
    calls, until = 0, time.perf_counter() + seconds
    while calls < 3 or time.perf_counter() < until:
        for dtype, linear in linears.items():
            begin = time.perf_counter()
            linear(x)
            best[dtype] = min(best[dtype], time.perf_counter() - begin)
        calls += 1
    return {dtype: seconds * 1e6 for dtype, seconds in best.items()}
