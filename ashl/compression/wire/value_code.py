"""Codes of the values of a sparse codec: k numbers, float32 before and after.

fp32: unchanged. fp16: half precision of the values divided by the largest magnitude, which avoids
overflow and underflow to 0. bf16: the nearest 16-bit number with the range of float32. natural: a
sign and a random power of two, 9 bits. int8, int4: the nearest of 255 or 15 levels between plus and
minus the largest magnitude of each 1024 values. int2: a sign, and whether the magnitude exceeds the
mean of 1024 values. Either group decodes to the mean of its magnitudes. ternary: 0 for magnitudes
below 0.7 of the mean, else a sign and the mean of those magnitudes, 1.6 bits. The random rounding
of TernGrad would not be a contraction. mean: a sign, 1 bit; all magnitudes decode to their mean.

Source: mean as in Sattler et al., STC, 2019; 2 bits for chunks of selected values as in Sarfi et
al., SparseLoCo, 2025; ternary as in Li and Liu, "Ternary Weight Networks", 2016; natural: Horváth
et al., 2019.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext
from ashl.compression.wire.arrays import Array, beside, cast, read, uncast
from ashl.compression.wire.bits import apply_signs, pack, pack_signs, packed_bytes, unpack
from ashl.compression.wire.levels import mean_magnitude
from ashl.compression.wire.payload_format import EMPTY, typed_part
from ashl.compression.wire.powers import OMEGA, natural_bytes, read_natural, write_natural
from ashl.compression.wire.ternary_packing import BLOCK, pack_ternary, read_ternary, ternary_nbytes

ValueCode = Literal["fp32", "fp16", "bf16", "natural", "int8", "int4", "int2", "ternary", "mean"]
WIDTHS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "int2": 2, "mean": 1}
CHUNK = 1024  # values that share a scale, with int8, int4 and int2
# Codes that run on the host also for values on a device: the values are few.
BY_HOST: Sequence[ValueCode] = ("int8", "int4", "int2", "ternary")
LOW = 0.7  # fraction of the mean magnitude below which ternary values become 0
VALUES = 1  # name of the random stream of values; indices have another one


def value_bytes(code: ValueCode, k: int) -> int:
    """Return the size in bytes of k values and their scales."""
    if code in ("natural", "ternary"):
        return natural_bytes(k) if code == "natural" else ternary_nbytes(k) + 4 * _scales(code, k)
    return packed_bytes(k, WIDTHS[code]) + 4 * _scales(code, k)


def value_bound(code: ValueCode, k: int) -> float:
    """Return b such that E‖C(v) − v‖² ≤ b·‖v‖² for k values."""
    if code in ("int8", "int4"):
        # Worst case: the largest value is exact, and all others are half a step, rounded to 0.
        a = (min(k, CHUNK) - 1) / (2 * _top(code)) ** 2
        return a / (1 + a) + 2.0**-40
    if code in ("int2", "mean"):
        # The mean of k magnitudes keeps at least 1/k of the sum of their squares.
        return 1 - 1 / max(1, min(k, CHUNK) if code == "int2" else k)
    if code == "ternary":  # the magnitudes below the limit sum to at most 0.7 of ‖v‖₁
        return 1 - (1 - LOW) ** 2 / max(1, k)
    return {"fp32": 0.0, "fp16": 2.0**-20, "bf16": 2.0**-16, "natural": OMEGA}[code]


def write_values(code: ValueCode, values: Array, context: EncodeContext) -> tuple[Array, Array]:
    """Return (values, scales) as parts of a payload."""
    if code in BY_HOST and isinstance(values, Tensor):
        coded, scales = write_values(code, read(values), context)
        return beside(values, coded), scales
    if code == "fp32":
        return values, EMPTY
    if code == "bf16":
        return cast(values, torch.bfloat16), EMPTY
    if code == "fp16" and isinstance(values, Tensor):
        scale = values.abs().amax(0, keepdim=True)
        return cast(values / torch.where(scale == 0, 1.0, scale), torch.float16), scale
    if code == "fp16":
        scale = np.abs(values).max(keepdims=True, initial=0)
        return (values / np.where(scale == 0, np.float32(1), scale)).astype("<f2"), scale
    if code == "natural":
        return write_natural(values, context.words(VALUES)), EMPTY
    if code == "mean":
        return pack_signs(values), mean_magnitude(values)[: len(values)]
    if code == "ternary":
        return _write_ternary(values)
    write = _write_two_levels if code == "int2" else _write_levels
    numbers, scales = (
        zip(*(write(code, part) for part in _chunks(values)), strict=True)
        if values.size
        else ((), ())
    )
    flat = [part.reshape(-1) for part in numbers]
    return pack(np.concatenate(flat or [EMPTY]), WIDTHS[code]), np.concatenate(
        [*map(np.ravel, scales), EMPTY.view("<f4")]
    )


def read_values(code: ValueCode, values: Array, scales: Array, k: int) -> Array:
    """Decode k values to float32.   Raises: PayloadError if the sizes are wrong."""
    if code in BY_HOST and isinstance(values, Tensor):
        return beside(values, read_values(code, read(values), read(scales), k))
    scales = typed_part(scales, "<f4", _scales(code, k), "scales")
    if code == "fp32":
        return typed_part(values, "<f4", k, "values")
    if code == "bf16":
        return uncast(typed_part(values, "<i2", k, "values"), torch.bfloat16)
    if code == "fp16":
        return uncast(typed_part(values, "<i2", k, "values"), torch.float16) * scales
    typed_part(values, "u1", value_bytes(code, k) - scales.nbytes, "values")
    if not k:
        return np.empty(0, np.float32)
    if code == "natural":
        return read_natural(values, k)
    if code == "mean":
        return apply_signs(values, k, scales)
    if code == "ternary":
        return read_ternary(values, scales, k)
    numbers = unpack(values, WIDTHS[code], k)
    read_chunks = _read_two_levels if code == "int2" else _read_levels
    chunks = -(-k // CHUNK)
    scale_of_value = np.repeat(
        scales.reshape(chunks, -1), np.minimum(CHUNK, k - CHUNK * np.arange(chunks)), axis=0
    )
    return read_chunks(code, numbers, scale_of_value)


def _scales(code: ValueCode, k: int) -> int:
    """Return the number of float32 scales of k values."""
    chunks = -(-k // CHUNK)
    return {
        "fp16": 1,
        "int8": chunks,
        "int4": chunks,
        "int2": 2 * chunks,
        "ternary": min(1, k),
        "mean": min(1, k),
    }.get(code, 0)


def _top(code: ValueCode) -> int:
    return 2 ** (WIDTHS[code] - 1) - 1


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the values as [n, CHUNK], and the remaining ones as [1, rest]."""
    whole = values.size - values.size % CHUNK
    if whole:
        yield values[:whole].reshape(-1, CHUNK)
    if whole < values.size:
        yield values[None, whole:]


def _write_ternary(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    magnitude = np.abs(v)
    low = magnitude < LOW * mean_magnitude(v)
    numbers = np.where(low, 1, np.where(np.signbit(v), 0, 2)).astype(np.uint8)
    stream = np.concatenate(
        [pack_ternary(numbers[start : start + BLOCK]) for start in range(0, v.size, BLOCK)]
        or [EMPTY]
    )
    return stream, mean_magnitude(magnitude[~low])[: v.size]


def _write_levels(code: ValueCode, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(v).max(1, keepdims=True)
    level = np.rint(v.astype(np.float64) / np.where(scale == 0, 1.0, scale) * _top(code))
    # A scale that is not finite makes the decoded values not finite.
    return np.where(np.isnan(level), 0, level).astype(np.int64) + _top(code), scale


def _read_levels(code: ValueCode, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    level = numbers.astype(np.int32) - _top(code)
    return (level / _top(code) * scales[:, 0]).astype(np.float32)


def _write_two_levels(code: ValueCode, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    magnitude = np.abs(v)
    above = magnitude > magnitude.mean(1, keepdims=True, dtype=np.float64)
    count = above.sum(1)
    high = np.where(above, magnitude, 0).sum(1, dtype=np.float64) / np.maximum(1, count)
    low = np.where(above, 0, magnitude).sum(1, dtype=np.float64) / np.maximum(1, v.shape[1] - count)
    return np.signbit(v) + 2 * above, np.stack([low, high], 1).astype(np.float32)


def _read_two_levels(code: ValueCode, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    magnitude = np.where(numbers & 2, scales[:, 1], scales[:, 0])
    return np.where(numbers & 1, -magnitude, magnitude)
