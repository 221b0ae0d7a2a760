"""Every block format against the `gguf` package's dequantiser, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from deepinfer.runtime.weights.quantization import FORMATS, UNSERVED_FORMATS, dequantize

PACKED = {kind: form for kind, form in FORMATS.items() if form.unpack is not None}
QUANTISABLE = [2, 3, 6, 7, 8]  # the types that the package can also write
NUM_BLOCKS = 300


def name_of(kind: int) -> str:
    return FORMATS[kind].name


def oracle(blocks: np.ndarray, kind: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    is_nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), is_nan)  # a nan's payload means nothing
    assert np.array_equal(ours[~is_nan].view(np.uint32), theirs[~is_nan].view(np.uint32))


@pytest.mark.parametrize("kind", PACKED, ids=name_of)
def test_any_bytes_become_the_same_floats(kind: int) -> None:
    """Random bytes reach every field of a block, with scales that are tiny, huge, inf or nan."""
    form = PACKED[kind]
    blocks = np.random.default_rng(kind).integers(
        0, 256, (NUM_BLOCKS, form.block_bytes), dtype=np.uint8
    )
    assert_same_bits(dequantize(blocks, form), oracle(blocks, kind))


@pytest.mark.parametrize("kind", QUANTISABLE, ids=name_of)
def test_quantised_values_come_back_close(kind: int) -> None:
    """Not only equal to an oracle: the values are those that were stored, within a step."""
    form = PACKED[kind]
    values = np.random.default_rng(kind).standard_normal((NUM_BLOCKS, 32)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind))
    ours = dequantize(blocks, form)
    assert_same_bits(ours, oracle(blocks, kind))
    steps = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[form.name]
    has_minimum = form.name.endswith("_1")
    reach = np.ptp(values, axis=1) if has_minimum else np.abs(values).max(axis=1)
    assert np.all(np.abs(ours - values).max(axis=1) <= reach / steps * 1.01)


@pytest.mark.parametrize("kind", PACKED, ids=name_of)
def test_a_tensor_of_several_chunks_is_the_sum_of_its_blocks(kind: int) -> None:
    form = PACKED[kind]
    some = np.random.default_rng(kind).integers(0, 256, (64, form.block_bytes), dtype=np.uint8)
    repeats = (1 << 18) // form.block_values // 64 * 2 + 1  # two chunks and a rest
    many = dequantize(np.tile(some, (repeats, 1)), form)
    once = dequantize(some, form)
    expected = np.tile(once, (repeats, 1))
    assert np.array_equal(many.view(np.uint32), expected.view(np.uint32))


def test_no_blocks_give_no_values() -> None:
    for form in PACKED.values():
        assert dequantize(np.empty((0, form.block_bytes), np.uint8), form).size == 0


def test_sizes_and_names_are_those_of_the_format() -> None:
    for kind, form in FORMATS.items():
        known = gguf.GGMLQuantizationType(kind)
        assert known.name == form.name
        assert gguf.GGML_QUANT_SIZES[known] == (form.block_values, form.block_bytes)
    for kind, name in UNSERVED_FORMATS.items():
        assert gguf.GGMLQuantizationType(kind).name == name
    every = {kind.value for kind in gguf.GGMLQuantizationType}
    assert every == set(FORMATS) | set(UNSERVED_FORMATS)
