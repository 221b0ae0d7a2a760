"""The file format: what is read, lazily, and how damage is reported."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.errors import CheckpointError, ModelError, UnsupportedModelError
from deepinfer.runtime.weights.gguf import GgufFile

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
UINT32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return U64.pack(len(value)) + value


def header(num_tensors: int, num_values: int, version: int = 3) -> bytes:
    return b"GGUF" + U32.pack(version) + U64.pack(num_tensors) + U64.pack(num_values)


def entry(name: bytes, sizes: list[int], kind: int, offset: int) -> bytes:
    dimensions = b"".join(U64.pack(size) for size in sizes)
    return text(name) + U32.pack(len(sizes)) + dimensions + U32.pack(kind) + U64.pack(offset)


def test_scalars_strings_and_arrays(write_gguf: Callable[..., Path]) -> None:
    metadata = GgufFile(
        write_gguf(
            metadata={
                "a.bool": True,
                "a.float": 0.5,
                "a.text": "naïve ☃",
                "a.numbers": [1, -2, 3],
                "a.words": ["", "Ġthe", "日本"],
                "a.flags": [True, False],
            }
        )
    ).metadata
    assert metadata["a.bool"] is True
    assert metadata["a.float"] == 0.5
    assert metadata["a.text"] == "naïve ☃"
    assert metadata["a.numbers"].tolist() == [1, -2, 3]
    assert metadata["a.words"] == ["", "Ġthe", "日本"]
    assert metadata["a.flags"].tolist() == [True, False]
    assert metadata["a.words"] is metadata["a.words"]  # parsed once
    assert "a.nothing" not in metadata
    assert metadata.get("a.nothing") is None
    assert set(metadata) >= {"general.architecture", "a.words", "llama.block_count"}


def test_nested_arrays(tmp_path: Path) -> None:
    inner = U32.pack(UINT32) + U64.pack(2) + U32.pack(7) + U32.pack(8)
    words = U32.pack(STRING) + U64.pack(1) + text(b"x")
    value = U32.pack(ARRAY) + U32.pack(ARRAY) + U64.pack(2) + inner + words
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(0, 1) + text(b"key") + value)
    numbers, strings = GgufFile(path).metadata["key"]
    assert numbers.tolist() == [7, 8]
    assert strings == ["x"]


def test_version_2_is_read(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    data = bytearray(path.read_bytes())
    data[4:8] = U32.pack(2)
    path.write_bytes(data)
    file = GgufFile(path)
    assert file.version == 2
    assert file.read("output_norm.weight").shape == (32,)


@pytest.mark.parametrize("alignment", [1, 2, 32, 4096])
def test_tensors_come_back_whatever_the_alignment(tmp_path: Path, alignment: int) -> None:
    first = np.arange(3, dtype=np.float16)
    second = np.arange(6, dtype=np.float32).reshape(2, 3)
    start = -(-first.nbytes // alignment) * alignment
    head = (
        header(2, 1)
        + text(b"general.alignment")
        + U32.pack(UINT32)
        + U32.pack(alignment)
        + entry(b"first", [3], 1, 0)
        + entry(b"second", [3, 2], 0, start)
    )
    data = first.tobytes().ljust(start, b"\0") + second.tobytes()
    path = tmp_path / "aligned.gguf"
    path.write_bytes(head.ljust(-(-len(head) // alignment) * alignment, b"\0") + data)
    file = GgufFile(path)
    assert torch.equal(file.read("first"), torch.from_numpy(first))
    assert torch.equal(file.read("second"), torch.from_numpy(second))


def test_stored_types_are_kept_and_packed_ones_become_float32(
    write_gguf: Callable[..., Path], make_tiny_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    tensors = make_tiny_tensors()
    kinds = gguf.GGMLQuantizationType
    names = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_v", "ffn_up", "ffn_down")]
    types = dict(zip(names, (kinds.F16, kinds.BF16, kinds.Q8_0, kinds.Q4_1), strict=True))
    file = GgufFile(write_gguf(tensors=tensors, types=types))
    dtypes = [file.read(name).dtype for name in names]
    assert dtypes == [torch.float16, torch.bfloat16, torch.float32, torch.float32]
    for name, kind in types.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
        assert np.array_equal(file.read(name).float().numpy(), expected)
        assert file.tensors[name].shape == tensors[name].shape


def test_changing_a_tensor_does_not_change_the_file(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    before = path.read_bytes()
    GgufFile(path).read("output_norm.weight").zero_()
    assert path.read_bytes() == before


def test_a_tensor_outlives_the_file_object(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    tensor = GgufFile(path).read("output_norm.weight")
    path.unlink()
    assert torch.isfinite(tensor).all()


def test_reading_from_many_threads(write_gguf: Callable[..., Path]) -> None:
    types = {"token_embd.weight": gguf.GGMLQuantizationType.Q5_1}
    file = GgufFile(write_gguf(types=types))
    names = list(file.tensors) * 8
    with ThreadPoolExecutor(4) as pool:
        for name, tensor in zip(names, pool.map(file.read, names), strict=True):
            assert torch.equal(tensor, file.read(name))


NESTED = b"".join(U32.pack(ARRAY) + U64.pack(1) for _ in range(9))

MALFORMED = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" * 20, "not a GGUF file"),
    "only the magic": (b"GGUF", "the version needs 4 bytes"),
    "no counts": (b"GGUF" + U32.pack(3) + b"\0" * 11, "the metadata count needs 8 bytes"),
    "fewer values than announced": (header(0, 2**60), "damaged at byte 24"),
    "fewer tensors than announced": (header(2**60, 0), "damaged at byte 24"),
    "key beyond the end": (header(0, 1) + U64.pack(2**63) + b"k", "damaged at byte 32 of 33"),
    "key that is not text": (header(0, 1) + text(b"\xff\xfe") + b"\0" * 8, "not UTF-8"),
    "unknown value type": (
        header(0, 1) + text(b"k") + U32.pack(13) + b"\0" * 8,
        "'k' has the unknown value type 13",
    ),
    "same key twice": (
        header(0, 2) + (text(b"k") + U32.pack(UINT32) + U32.pack(1)) * 2,
        "'k' occurs twice",
    ),
    "array of numbers beyond the end": (
        header(0, 1) + text(b"k") + U32.pack(ARRAY) + U32.pack(UINT32) + U64.pack(2**62),
        "past the end",
    ),
    "array of strings beyond the end": (
        header(0, 1) + text(b"k") + U32.pack(ARRAY) + U32.pack(STRING) + U64.pack(9) + text(b"a"),
        "announces 9 strings and ends early",
    ),
    "string in an array that is too long": (
        header(0, 1) + text(b"k") + U32.pack(ARRAY) + U32.pack(STRING) + U64.pack(1) + U64.pack(9),
        "past the end",
    ),
    "array of unknown type": (
        header(0, 1) + text(b"k") + U32.pack(ARRAY) + U32.pack(77) + U64.pack(0),
        "elements of the unknown type 77",
    ),
    "arrays without end": (
        header(0, 1) + text(b"k") + U32.pack(ARRAY) + NESTED,
        "nests arrays more than 4 deep",
    ),
    "alignment of three": (
        header(0, 1) + text(b"general.alignment") + U32.pack(UINT32) + U32.pack(3),
        "not a power of two",
    ),
    "alignment of zero": (
        header(0, 1) + text(b"general.alignment") + U32.pack(UINT32) + U32.pack(0),
        "not a power of two",
    ),
    "five dimensions": (header(1, 0) + entry(b"t", [1] * 5, 0, 0), "'t' has 5 dimensions"),
    "unknown tensor type": (header(1, 0) + entry(b"t", [32], 4, 0), "unknown tensor type 4"),
    "crooked offset": (header(1, 0) + entry(b"t", [1], 0, 5), "offset 5 of 't' is no multiple"),
    "row that is no multiple of the block": (
        header(1, 0) + entry(b"t", [33], 8, 0),
        "'t' has rows of 33 values",
    ),
    "same tensor twice": (
        header(2, 0) + entry(b"t", [1], 0, 0) * 2 + b"\0" * 64,
        "the tensor 't' occurs twice",
    ),
    "data beyond the end": (
        header(1, 0) + entry(b"t", [64], 0, 0) + b"\0" * 64,
        "the data of 't' should be bytes 64 to 320",
    ),
    "shape whose product overflows": (
        header(1, 0) + entry(b"t", [2**62, 2**62], 0, 0) + b"\0" * 64,
        "past the end",
    ),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED.values(), ids=MALFORMED)
def test_damage_is_reported_with_its_place(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_other_versions_and_byte_orders_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(header(0, 0, version=1))
    with pytest.raises(UnsupportedModelError, match="version 1 of the format"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + b"\0" * 16)
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GgufFile(path)


def test_a_format_without_implementation_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(header(1, 0) + entry(b"blk.0.ffn_up.weight", [256], 16, 0) + b"\0" * 128)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' .* IQ2_XXS"):
        GgufFile(path)


def test_every_truncation_is_reported(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = write_gguf(metadata={"a.words": ["one", "two"], "a.numbers": [1, 2, 3]}).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 1, 211):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GgufFile(path)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(position=st.integers(0, 1500), value=st.binary(min_size=1, max_size=8))
def test_any_overwritten_header_opens_or_is_refused(
    write_gguf: Callable[..., Path], position: int, value: bytes
) -> None:
    path = write_gguf(metadata={"a.words": ["one", "two"], "a.numbers": [1, 2, 3]})
    data = bytearray(path.read_bytes())
    data[position : position + len(value)] = value
    path.write_bytes(data)
    try:
        file = GgufFile(path)
    except ModelError:
        return
    for key in file.metadata:
        file.metadata[key]
    for name in file.tensors:
        file.read(name)
