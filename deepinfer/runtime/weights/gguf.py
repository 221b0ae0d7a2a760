"""A memory-mapped reader of GGUF files, versions 2 and 3.

Owns the file format: header, metadata, tensor directory, bounds. Does not know models:
`gguf_names.py` says what the metadata and tensor names mean. Layout of a file, little-endian:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:   key string, type u32, value                          (string: length u64, bytes)
    directory:  name string, dimensions u32, sizes u64 (innermost first), type u32, offset u64
    padding to the alignment, then tensor data; offsets count from its start

Opening walks the header and checks that every tensor lies inside the file. Arrays in the metadata
(vocabularies) are stepped over and parsed when asked for; tensor data is touched only by `read`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from deepinfer.errors import CheckpointError, UnsupportedModelError
from deepinfer.runtime.weights.quantization import (
    FORMATS,
    UNSERVED_FORMATS,
    Bytes,
    TensorFormat,
    dequantize,
)

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the directory. `shape` has the outermost dimension first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True)
class _PendingArray:
    offset: int  # of the element type


class _Cursor:
    """Reads the header front to back; every step is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path, offset: int) -> None:
        self.data = data
        self.path = path
        self.offset = offset

    def fail(self, what: str, offset: int) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is damaged at byte {offset:,} of {len(self.data):,}: {what}. "
            "Fetch the file again; compare its size with that of the original."
        )

    def claim(self, num_bytes: int, what: str) -> int:
        """Steps over `num_bytes` and returns where they start."""
        start = self.offset
        if num_bytes > len(self.data) - start:
            self.fail(f"{what} needs {num_bytes:,} bytes, past the end of the file", start)
        self.offset = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.claim(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.claim(8, what))[0]
        return value

    def name(self, what: str) -> str:
        """A key or tensor name, which must be valid UTF-8."""
        start = self.offset
        raw = self._raw_string(what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", start)

    def value(self, key: str) -> Any:
        """A metadata value; an array is stepped over and comes back as a `_PendingArray`."""
        start = self.offset
        kind = self.u32(f"the type of {key!r}")
        if kind == _ARRAY:
            pending = _PendingArray(self.offset)
            self._skip_array(key, 1)
            return pending
        if kind == _STRING:
            return self._raw_string(f"the value of {key!r}").decode(errors="replace")
        if kind not in _SCALARS:
            self.fail(f"{key!r} has the unknown value type {kind}", start)
        return self._numbers(_SCALARS[kind], 1, key)[0].item()

    def array(self, key: str) -> list[Any] | np.ndarray[Any, Any]:
        """The array whose element type is at the cursor: numbers as numpy, the rest as a list."""
        kind, count = self._array_head(key)
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], count, key)
        if kind == _STRING:
            return self._strings(count, key)
        return [self.array(key) for _ in range(count)]

    def _raw_string(self, what: str) -> bytes:
        length = self.u64(f"the length of {what}")
        start = self.claim(length, what)
        return self.data[start : start + length]

    def _numbers(self, dtype: np.dtype[Any], count: int, key: str) -> np.ndarray[Any, Any]:
        start = self.claim(count * dtype.itemsize, f"the value of {key!r}")
        return np.frombuffer(self.data, dtype, count, start).copy()

    def _array_head(self, key: str) -> tuple[int, int]:
        start = self.offset
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if kind not in _SCALARS and kind not in (_STRING, _ARRAY):
            self.fail(f"{key!r} has elements of the unknown type {kind}", start)
        return kind, count

    def _skip_array(self, key: str, depth: int) -> None:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"{key!r} nests arrays more than {_MAX_ARRAY_DEPTH} deep", self.offset)
        kind, count = self._array_head(key)
        if kind in _SCALARS:
            self.claim(count * _SCALARS[kind].itemsize, f"the value of {key!r}")
        elif kind == _STRING:
            self._skip_strings(count, key)
        else:
            for _ in range(count):
                self._skip_array(key, depth + 1)

    def _skip_strings(self, count: int, key: str) -> None:
        """The one loop that matters when opening: a vocabulary has 10^5 strings."""
        data, offset, read_length = self.data, self.offset, _U64.unpack_from
        last = len(data) - _U64.size
        for _ in range(count):
            if offset > last:
                self.fail(f"{key!r} announces {count:,} strings and ends early", self.offset)
            offset += _U64.size + read_length(data, offset)[0]
        self.claim(offset - self.offset, f"the value of {key!r}")

    def _strings(self, count: int, key: str) -> list[str]:
        """Only for arrays that `_skip_array` has walked: no bounds are left to check."""
        data, offset, read_length = self.data, self.offset, _U64.unpack_from
        strings = []
        for _ in range(count):
            start = offset + _U64.size
            offset = start + read_length(data, offset)[0]
            strings.append(data[start:offset].decode(errors="replace"))
        self.offset = offset
        return strings


class GgufMetadata(Mapping[str, Any]):
    """Keys to values: str, int, float, bool, list[str] or a numpy array. Arrays are parsed when
    first asked for and kept."""

    def __init__(self, data: mmap.mmap, path: Path, values: dict[str, Any]) -> None:
        self._data = data
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _PendingArray):
            value = _Cursor(self._data, self._path, value.offset).array(key)
            self._values[key] = value
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class GgufFile:
    """An open file: `.version`, `.metadata`, `.tensors` (the directory), `read(name)`.

    The mapping is private and copy-on-write: nothing that is done to a tensor reaches the file.
    It lives until the last tensor that views it is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(self._data, path, 0)
        self.version, num_tensors, num_values = _read_header(cursor)
        values: dict[str, Any] = {}
        for _ in range(num_values):
            start = cursor.offset
            key = cursor.name("a metadata key")
            if key in values:
                cursor.fail(f"the metadata key {key!r} occurs twice", start)
            values[key] = cursor.value(key)
        self.metadata = GgufMetadata(self._data, path, values)
        self.tensors = _read_directory(cursor, num_tensors, self._alignment(cursor))

    def read(self, name: str, *, interleaved_heads: int = 0) -> torch.Tensor:
        """The tensor of that name: float32 where quantised, else the stored type, as a view.

        `interleaved_heads = n` undoes a reordering of rows: inside each of n heads of 2 h rows,
        rows stored as 0, h, 1, h + 1, ... come back as 0, 1, ..., 2 h - 1. It is done on the
        packed bytes, which are several times fewer than the values.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        if interleaved_heads:
            raw = _separate_halves(raw, tensor, interleaved_heads)
        elif tensor.offset % 4:  # an alignment of 1 or 2 is legal; unaligned floats are not
            raw = raw.copy()
        if tensor.format.unpack is not None:
            values = dequantize(raw.reshape(-1, tensor.format.block_bytes), tensor.format)
            return torch.from_numpy(values.reshape(tensor.shape))
        if tensor.format.name == "BF16":
            return torch.from_numpy(raw).view(torch.bfloat16).view(tensor.shape)
        dtype = np.dtype("<f4") if tensor.format.name == "F32" else np.dtype("<f2")
        return torch.from_numpy(raw.view(dtype).reshape(tensor.shape))

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            cursor.fail(
                f"'general.alignment' is {alignment!r}, which is not a power of two", cursor.offset
            )
        return alignment


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """Returns version, number of tensors and number of metadata values."""
    magic = cursor.data[: len(_MAGIC)]
    if magic != _MAGIC:
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}."
        )
    cursor.offset = len(_MAGIC)
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        reason = "a big-endian file" if swapped else f"version {version} of the format"
        raise UnsupportedModelError(
            f"{cursor.path} is {reason}; versions 2 and 3, little-endian, are read. "
            "Convert the model again with a current llama.cpp."
        )
    return version, cursor.u64("the tensor count"), cursor.u64("the metadata count")


def _read_directory(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    entries: list[tuple[int, GgufTensor]] = []
    names: set[str] = set()
    for _ in range(count):
        start = cursor.offset
        tensor = _read_entry(cursor, alignment)
        if tensor.name in names:
            cursor.fail(f"the tensor {tensor.name!r} occurs twice", start)
        names.add(tensor.name)
        entries.append((start, tensor))
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for start, tensor in entries:
        offset = data_start + tensor.offset
        if offset + tensor.num_bytes > len(cursor.data):
            cursor.fail(
                f"the data of {tensor.name!r} should be bytes {offset:,} to "
                f"{offset + tensor.num_bytes:,}, past the end of the file",
                start,
            )
        tensors[tensor.name] = GgufTensor(
            tensor.name, tensor.shape, tensor.format, offset, tensor.num_bytes
        )
    return tensors


def _read_entry(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One directory entry; its offset still counts from the start of the tensor data."""
    start = cursor.offset
    name = cursor.name("a tensor name")
    num_dimensions = cursor.u32(f"the number of dimensions of {name!r}")
    if num_dimensions > _MAX_DIMENSIONS:
        cursor.fail(f"{name!r} has {num_dimensions} dimensions", start)
    sizes = [cursor.u64(f"the shape of {name!r}") for _ in range(num_dimensions)]
    if 0 in sizes:
        cursor.fail(f"{name!r} is empty: its sizes are {sizes}", start)
    kind = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    if kind in UNSERVED_FORMATS:
        raise UnsupportedModelError(
            f"{cursor.path}: the tensor {name!r} is stored as {UNSERVED_FORMATS[kind]}, which has "
            f"no implementation. Served are {', '.join(f.name for f in FORMATS.values())}: take "
            "another quantisation of the model, Q4_K_M or Q8_0 for example."
        )
    if kind not in FORMATS:
        cursor.fail(f"{name!r} has the unknown tensor type {kind}", start)
    if offset % alignment:
        cursor.fail(f"the offset {offset:,} of {name!r} is no multiple of {alignment}", start)
    tensor_format = FORMATS[kind]
    row_values = sizes[0] if sizes else 1
    if row_values % tensor_format.block_values:
        cursor.fail(
            f"{name!r} has rows of {row_values} values, no multiple of the "
            f"{tensor_format.block_values} that {tensor_format.name} packs together",
            start,
        )
    num_values = 1
    for size in sizes:
        num_values *= size
    num_bytes = num_values // tensor_format.block_values * tensor_format.block_bytes
    return GgufTensor(name, tuple(reversed(sizes)), tensor_format, offset, num_bytes)


def _separate_halves(raw: Bytes, tensor: GgufTensor, num_heads: int) -> Bytes:
    """raw: [bytes] of num_heads * head_dim rows -> the same, rows of a head back in halves."""
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{tensor.name!r} has {num_rows} rows, which {num_heads} heads cannot share evenly."
        )
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
