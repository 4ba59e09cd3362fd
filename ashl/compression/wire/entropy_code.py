"""Lossless codes of a quantizer's integers.

none: ⌈log2 n⌉ bits each, for n levels. elias: level 0, often the most frequent one, is not written.
Each other level is written as its distance from the one before, its sign, and its magnitude
(level + 1) >> 1, in the Elias omega code; there is no table. pco: an asymmetric numeral system over
the message's own histogram of bins, within 1 % of the entropy of long messages, by the library
pcodec.

Limits: no code needs more than 5 bytes more than `none`: a longer result is replaced by `none`. A
quantizer with levels around 0 folds them first, see `fold`: 0, −1, 1, −2, 2, … become 0, 1, 2, 3,
4.

Source: Elias coding as in Alistarh et al., "QSGD", NeurIPS 2017; variable lengths after a quantizer
as in Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017; pco:
Loncaric, Jeppesen and Zinberg, "Pcodec: Better Compression for Numerical Sequences",
arXiv:2502.06112, 2025.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pcodec

from ashl.compression.contract import PayloadError
from ashl.compression.wire.bits import blocks, pack, packed_bytes, unpack
from ashl.compression.wire.prefix_code import omega, read_omega, read_prefix, write_prefix

EntropyCode = Literal["none", "elias", "pco"]
PLAIN, CODED, CONSTANT = 0, 1, 2  # first byte of a code: as with `none`, coded, one level only
MOST_LEVELS = 1 << 16  # with more levels, a table is not worth its size
PCODEC: Any = pcodec  # has no stubs
# Levels are independent of each other and have no common divisor, so pcodec only bins them.
PCO = PCODEC.ChunkConfig(
    compression_level=8,
    mode_spec=PCODEC.ModeSpec.classic(),
    delta_spec=PCODEC.DeltaSpec.no_op(),
)


def fold(levels: np.ndarray) -> np.ndarray:
    """Return signed levels as unsigned ones: 2|q| − 1 for negative q, else 2q."""
    doubled = levels.astype(np.int32) << 1
    return (doubled ^ (doubled >> 31)).view(np.uint32)


def unfold(levels: np.ndarray) -> np.ndarray:
    """Return the signed levels of folded ones, int32."""
    levels = levels.astype(np.int32)
    return (levels >> 1) ^ -(levels & 1)


def entropy(levels: np.ndarray, num_levels: int) -> float:
    """Return the least number of bits of a code of single levels, without a table.

    Rule: Σ −log2 of each level's frequency.
    """
    counts = _histogram(levels, num_levels)
    counts = counts[counts > 0]
    return float((counts * np.log2(levels.size / counts)).sum())


def bound_bytes(code: EntropyCode, count: int, num_levels: int) -> int:
    """Return the largest size in bytes of `count` levels."""
    return packed_bytes(count, _width(num_levels)) + (code != "none") * 5


def write_levels(code: EntropyCode, levels: np.ndarray, num_levels: int) -> np.ndarray:
    """Encode unsigned integers below num_levels as uint8."""
    if code == "none":
        return pack(levels, _width(num_levels))
    plain = packed_bytes(levels.size, _width(num_levels))
    coded = None
    if levels.size and num_levels <= MOST_LEVELS:
        if (levels == levels[0]).all():
            return np.concatenate([np.array([CONSTANT], np.uint8), _words(levels[0])])
        coded = (_write_elias if code == "elias" else _write_pco)(levels, num_levels)
    if coded is None or coded.size >= plain:
        return np.concatenate([np.array([PLAIN], np.uint8), pack(levels, _width(num_levels))])
    return np.concatenate([np.array([CODED], np.uint8), coded])


def read_levels(code: EntropyCode, buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    """Decode `count` levels.   Raises: PayloadError if the buffer is malformed."""
    if code != "none":
        if not buffer.size:
            raise PayloadError(f"expected {count} levels; received no bytes")
        form, buffer = buffer[0], buffer[1:]
        if form == CODED and count and num_levels <= MOST_LEVELS:
            read = _read_elias if code == "elias" else _read_pco
            return _below(read(buffer, count, num_levels), num_levels)
        if form == CONSTANT:
            return _below(
                np.full(count, _read_header(buffer, 1, exactly=True)[0][0], np.uint32), num_levels
            )
        if form != PLAIN:
            raise PayloadError(
                f"expected a {code} code of {count} levels; received a code of form {form}"
            )
    if buffer.size != packed_bytes(count, _width(num_levels)):
        raise PayloadError(
            f"received {buffer.size} bytes, which do not hold {count} levels below {num_levels}"
        )
    return _below(unpack(buffer, _width(num_levels), count), num_levels)


def _width(num_levels: int) -> int:
    return max(1, (num_levels - 1).bit_length())


def _below(levels: np.ndarray, num_levels: int) -> np.ndarray:
    if levels.size and (int(levels.max()) >= num_levels or int(levels.min()) < 0):
        raise PayloadError(f"received level {int(levels.max())}; levels are below {num_levels}")
    return levels


def _histogram(levels: np.ndarray, num_levels: int) -> np.ndarray:
    """Return the number of times each level occurs.

    It counts block by block, because bincount converts its input to int64.
    """
    counts = np.zeros(num_levels, np.int64)
    for where in blocks(levels.size):
        counts += np.bincount(levels[where], minlength=num_levels)
    return counts


def _words(*numbers: Any) -> np.ndarray:
    return np.array(numbers, "<u4").view(np.uint8)


def _read_header(
    buffer: np.ndarray, count: int, exactly: bool = False
) -> tuple[list[int], np.ndarray]:
    """Return the first `count` numbers of 32 bits, and the bytes after them."""
    if buffer.size < 4 * count or (exactly and buffer.size != 4 * count):
        raise PayloadError(f"expected {4 * count} bytes of levels; received {buffer.size}")
    return buffer[: 4 * count].copy().view("<u4").tolist(), buffer[4 * count :]


# --- elias


def _write_elias(levels: np.ndarray, num_levels: int) -> np.ndarray:
    indices = np.flatnonzero(levels)
    found = levels[indices].astype(np.int64)
    gaps = write_prefix(np.diff(indices, prepend=-1), omega)
    signs = np.packbits((found & 1).astype(bool), bitorder="little")
    magnitudes = write_prefix((found + 1) >> 1, omega)
    return np.concatenate([_words(indices.size, gaps.size), gaps, signs, magnitudes])


def _read_elias(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    (found, size), rest = _read_header(buffer, 2)
    split = size + -(-found // 8)
    if found > count or split > rest.size:
        raise PayloadError(f"received {found} non-zero levels; there are {count} in all")
    gaps = read_prefix(rest[:size], found, read_omega)
    magnitudes = read_prefix(rest[split:], found, read_omega)
    indices = np.cumsum(gaps) - 1
    if found and (
        gaps.min() < 1
        or indices[-1] >= count
        or magnitudes.min() < 1
        or magnitudes.max() > num_levels
    ):
        raise PayloadError(
            f"the received indices or magnitudes do not belong to {count} levels below {num_levels}"
        )
    levels = np.zeros(count, np.uint32)
    levels[indices] = 2 * magnitudes - np.unpackbits(
        rest[size:split], count=found, bitorder="little"
    )
    return levels


# --- pco


def _write_pco(levels: np.ndarray, num_levels: int) -> np.ndarray:
    """Return the size in bytes of pcodec's stream, and the stream.

    The size is sent because pcodec ignores bytes after the end of its stream.
    """
    stream = np.frombuffer(
        PCODEC.standalone.simple_compress(levels.astype(np.uint16), PCO), np.uint8
    )
    return np.concatenate([_words(stream.size), stream])


def _read_pco(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    (size,), stream = _read_header(buffer, 1)
    levels = np.empty(count, np.uint16)
    try:
        progress = PCODEC.standalone.simple_decompress_into(stream.tobytes(), levels)
    except RuntimeError as wrong:
        raise PayloadError(f"expected a pco code of {count} levels: {wrong}") from wrong
    if size != stream.size or progress.n_processed != count or not progress.finished:
        raise PayloadError(
            f"expected a pco code of {count} levels; received {stream.size} bytes with"
            f" {progress.n_processed}"
        )
    return levels
