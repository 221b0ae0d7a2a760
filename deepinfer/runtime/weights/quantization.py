"""The block formats of GGUF tensors, and how each becomes float32.

Owns the byte layout of every served format. Does not know files, names or shapes: it is given the
bytes of whole blocks. `gguf.py` calls it, possibly from several threads: nothing here is shared,
and numpy drops the interpreter lock while it works.

A block holds 32 or 256 consecutive values of a row. With q the stored integer, a value is

    Q4_0, Q5_0, Q8_0     d * (q - zero)                   one float16 scale d per 32 values
    Q4_1, Q5_1           d * q + m                        and one float16 minimum m
    Q3_K, Q6_K           (d * scale) * (q - zero)         one small integer scale per 16 values
    Q2_K, Q4_K, Q5_K     (d * scale) * q - dmin * minimum per 16 (Q2_K) or 32 values

The order of these float32 operations is part of the format: another order rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 18  # 1 MiB of float32: the passes over a chunk find it in the cache


@dataclass(frozen=True)
class TensorFormat:
    """How a GGUF tensor type stores its values. `unpack is None`: plain numbers, nothing to do."""

    name: str
    block_values: int
    block_bytes: int
    unpack: Callable[[Bytes, Floats], None] | None  # blocks [n, bytes] -> out [n, values]


def dequantize(blocks: Bytes, tensor_format: TensorFormat) -> Floats:
    """blocks: [num_blocks, block_bytes] -> float32 [num_blocks, block_values]."""
    assert tensor_format.unpack is not None
    out = np.empty((blocks.shape[0], tensor_format.block_values), np.float32)
    step = _CHUNK_VALUES // tensor_format.block_values
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or nan: pass it on
        for start in range(0, blocks.shape[0], step):
            tensor_format.unpack(blocks[start : start + step], out[start : start + step])
    return out


def _float16_at(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of every block, as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """packed: [n, bytes] -> [n, bytes / group, 2, group]: low halves of a group, then high ones."""
    packed = np.ascontiguousarray(packed).reshape(packed.shape[0], -1, group)
    halves = np.empty((packed.shape[0], packed.shape[1], 2, group), np.uint8)
    np.bitwise_and(packed, 0x0F, out=halves[:, :, 0])
    np.right_shift(packed, 4, out=halves[:, :, 1])
    return halves


def _bit_planes(packed: Bytes, group: int, width: int) -> Bytes:
    """packed: [n, bytes] -> [n, bytes / group, 8 / width, group]: fields of `width` bits, lowest
    first; plane p holds field p of each byte of the group."""
    packed = np.ascontiguousarray(packed).reshape(packed.shape[0], -1, 1, group)
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    planes: Bytes = (packed >> shifts) & np.uint8((1 << width) - 1)
    return planes


def _unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, _nibbles(blocks[:, 2:], 16).reshape(-1, 32))
    np.subtract(out, 8, out=out)
    np.multiply(out, _float16_at(blocks, 0), out=out)


def _unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, _nibbles(blocks[:, 4:], 16).reshape(-1, 32))
    np.multiply(out, _float16_at(blocks, 0), out=out)
    np.add(out, _float16_at(blocks, 2), out=out)


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    """low: [n, 16] nibbles, high: [n, 4], one bit per value -> [n, 32] of 0 to 31."""
    values = np.unpackbits(high, axis=-1, bitorder="little")
    values <<= 4
    values |= _nibbles(low, 16).reshape(-1, 32)
    return values


def _unpack_q5_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, _five_bits(blocks[:, 6:], blocks[:, 2:6]))
    np.subtract(out, 16, out=out)
    np.multiply(out, _float16_at(blocks, 0), out=out)


def _unpack_q5_1(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, _five_bits(blocks[:, 8:], blocks[:, 4:8]))
    np.multiply(out, _float16_at(blocks, 0), out=out)
    np.add(out, _float16_at(blocks, 2), out=out)


def _unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, blocks[:, 2:].view(np.int8))
    np.multiply(out, _float16_at(blocks, 0), out=out)


def _unpack_q2_k(blocks: Bytes, out: Floats) -> None:
    """16 bytes of (minimum << 4 | scale), 64 bytes of 2-bit values, d, dmin."""
    scales = _float16_at(blocks, 80) * (blocks[:, :16] & 0x0F).astype(np.float32)
    minimums = _float16_at(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    groups = out.reshape(-1, 16, 16)
    np.copyto(groups, _bit_planes(blocks[:, 16:80], 32, 2).reshape(-1, 16, 16))
    np.multiply(groups, scales[:, :, None], out=groups)
    np.subtract(groups, minimums[:, :, None], out=groups)


def _unpack_q3_k(blocks: Bytes, out: Floats) -> None:
    """32 bytes of high bits, 64 bytes of low 2-bit fields, 16 scales of 6 bits, d.

    The high bit says that 4 is NOT to be subtracted, so q = low + 4 * high - 4. A scale's low four
    bits are nibbles of the first 8 scale bytes, its high two bits are planes of the last 4.
    """
    scale_low = _nibbles(blocks[:, 96:104], 8).reshape(-1, 16)
    scale_high = _bit_planes(blocks[:, 104:108], 4, 2).reshape(-1, 16)
    integers = (scale_low | (scale_high << 4)).astype(np.float32) - np.float32(32)
    scales = _float16_at(blocks, 108) * integers
    values = _bit_planes(blocks[:, :32], 32, 1).reshape(-1, 256)
    values <<= 2
    values |= _bit_planes(blocks[:, 32:96], 32, 2).reshape(-1, 256)
    groups = out.reshape(-1, 16, 16)
    np.copyto(groups, values.reshape(-1, 16, 16))
    np.subtract(groups, 4, out=groups)
    np.multiply(groups, scales[:, :, None], out=groups)


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """packed: [n, 12] -> eight scales and eight minimums, each [n, 8].

    Bytes 0-3 and 4-7 hold the first four scales and minimums in their low six bits. The last four
    have their low nibbles in bytes 8-11 (scale low, minimum high) and their upper two bits in what
    is left of bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=-1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scale_groups_of_32(blocks: Bytes, values: Bytes, out: Floats) -> None:
    """Shared end of Q4_K and Q5_K, whose blocks begin with d, dmin and twelve bytes of scales."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    scales *= _float16_at(blocks, 0)
    minimums *= _float16_at(blocks, 2)
    groups = out.reshape(-1, 8, 32)
    np.copyto(groups, values.reshape(-1, 8, 32))
    np.multiply(groups, scales[:, :, None], out=groups)
    np.subtract(groups, minimums[:, :, None], out=groups)


def _unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    _scale_groups_of_32(blocks, _nibbles(blocks[:, 16:], 32), out)


def _unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    values = _bit_planes(blocks[:, 16:48], 32, 1).reshape(-1, 256)
    values <<= 4
    values |= _nibbles(blocks[:, 48:], 32).reshape(-1, 256)
    _scale_groups_of_32(blocks, values, out)


def _unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    """128 bytes of low nibbles, 64 bytes of high 2-bit fields, 16 signed scales, d."""
    scales = _float16_at(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = _bit_planes(blocks[:, 128:192], 32, 2).reshape(-1, 256)
    values <<= 4
    values |= _nibbles(blocks[:, :128], 64).reshape(-1, 256)
    groups = out.reshape(-1, 16, 16)
    np.copyto(groups, values.reshape(-1, 16, 16))
    np.subtract(groups, 32, out=groups)
    np.multiply(groups, scales[:, :, None], out=groups)


FORMATS: dict[int, TensorFormat] = {
    0: TensorFormat("F32", 1, 4, None),
    1: TensorFormat("F16", 1, 2, None),
    30: TensorFormat("BF16", 1, 2, None),
    2: TensorFormat("Q4_0", 32, 18, _unpack_q4_0),
    3: TensorFormat("Q4_1", 32, 20, _unpack_q4_1),
    6: TensorFormat("Q5_0", 32, 22, _unpack_q5_0),
    7: TensorFormat("Q5_1", 32, 24, _unpack_q5_1),
    8: TensorFormat("Q8_0", 32, 34, _unpack_q8_0),
    10: TensorFormat("Q2_K", 256, 84, _unpack_q2_k),
    11: TensorFormat("Q3_K", 256, 110, _unpack_q3_k),
    12: TensorFormat("Q4_K", 256, 144, _unpack_q4_k),
    13: TensorFormat("Q5_K", 256, 176, _unpack_q5_k),
    14: TensorFormat("Q6_K", 256, 210, _unpack_q6_k),
}

# Types that exist in the format but have no implementation here: known so as to be refused by name.
UNSERVED_FORMATS: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
