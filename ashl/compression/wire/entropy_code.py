"""Lossless codes of a quantizer's integers.

none: ⌈log2 n⌉ bits each, for n levels. huffman: the canonical code of the message's own histogram;
the lengths of the codewords are sent, too. elias: level 0, often the most frequent one, is not
written. Each other level is written as its distance from the one before, its sign, and its
magnitude (level + 1) >> 1, in the Elias omega code; there is no table. range: within a fraction of
a per cent of the entropy of the message's own histogram, which is sent, too; needs the library
constriction.

Limits: no code needs more than 5 bytes more than `none`: a longer result is replaced by `none`. A
quantizer with levels around 0 folds them first, see `fold`: 0, −1, 1, −2, 2, … become 0, 1, 2, 3,
4.

Source: Huffman, 1952; Elias coding as in Alistarh et al., "QSGD", NeurIPS 2017; variable lengths
after a quantizer as in Suresh et al., "Distributed Mean Estimation with Limited Communication",
ICML 2017; range coding by Bamler, "Understanding Entropy Coding With Asymmetric Numeral Systems
(ANS)", arXiv:2201.01741, 2022.
"""

from __future__ import annotations

import heapq
from typing import Any, Literal

import numpy as np

from ashl.compression.contract import PayloadError
from ashl.compression.wire.bits import blocks, pack, packed_bytes, unpack
from ashl.compression.wire.prefix_code import omega, read_omega, read_prefix, write_prefix
from ashl.errors import UsageError

EntropyCode = Literal["none", "huffman", "elias", "range"]
PLAIN, CODED, CONSTANT = 0, 1, 2  # first byte of a code: as with `none`, coded, one level only
LONGEST = 16  # bits of the longest Huffman codeword, unless more than 2^15 levels occur
MOST_LEVELS = 1 << 16  # with more levels, a histogram is not worth its size


def check_code(code: EntropyCode) -> None:
    """Raise UsageError if the code needs a library that is not installed."""
    if code == "range":
        _constriction()


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
        write = {"huffman": _write_huffman, "elias": _write_elias, "range": _write_range}[code]
        coded = write(levels, num_levels)
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
            read = {"huffman": _read_huffman, "elias": _read_elias, "range": _read_range}[code]
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


# --- tables: non-negative numbers, most of which are 0


def _write_table(numbers: np.ndarray) -> np.ndarray:
    """Encode the numbers up to the last non-zero one.

    Format: how many, the size of the code in bytes, and n + 1 of each number n in the omega code.
    """
    used = numbers[: np.flatnonzero(numbers)[-1] + 1]
    coded = write_prefix(used + 1, omega)
    return np.concatenate([_words(used.size, coded.size), coded])


def _read_table(buffer: np.ndarray, num_levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (numbers, the bytes after the table)."""
    (used, size), rest = _read_header(buffer, 2)
    if not 0 < used <= num_levels or size > rest.size:
        raise PayloadError(f"received a table of {used} levels; there are {num_levels}")
    return read_prefix(rest[:size], used, read_omega) - 1, rest[size:]


# --- huffman


def _write_huffman(levels: np.ndarray, num_levels: int) -> np.ndarray:
    lengths = _code_lengths(_histogram(levels, num_levels))
    order = np.lexsort((np.arange(num_levels), lengths))
    order = order[lengths[order] > 0]
    steps = 1 << (lengths.max() - lengths[order])
    codes = np.zeros(num_levels, np.uint64)
    codes[order] = (np.cumsum(steps) - steps) >> (lengths.max() - lengths[order])
    stream = write_prefix(levels, lambda block: (codes[block], lengths[block]))
    return np.concatenate([_write_table(lengths), stream])


def _read_huffman(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    lengths, stream = _read_table(buffer, num_levels)
    longest = int(lengths.max())
    order = np.lexsort((np.arange(lengths.size), lengths))
    order = order[lengths[order] > 0]
    if not 0 < longest <= LONGEST + 1 or lengths.min() < 0:
        raise PayloadError(f"received codewords of {longest} bits; at most {LONGEST + 1} are valid")
    steps = 1 << (longest - lengths[order])
    if steps.sum() != 1 << longest:
        raise PayloadError("the received lengths of codewords do not form a complete code")
    symbols, sizes = np.repeat(order, steps), np.repeat(lengths[order], steps)

    def decode(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        leading = (windows >> np.uint64(64 - longest)).view(np.int64)
        return symbols.take(leading), sizes.take(leading)

    return read_prefix(stream, count, decode)


def _code_lengths(counts: np.ndarray) -> np.ndarray:
    """Return the lengths of the codewords in bits, 0 for levels that do not occur.

    At least two levels must occur. If the longest codeword exceeds the limit, the histogram is
    flattened until it does not.
    """
    used = np.flatnonzero(counts)
    limit = max(LONGEST, _width(used.size) + 1)
    while True:
        lengths = _tree_depths(counts[used])
        if lengths.max() <= limit:
            break
        counts = (counts + 1) >> 1
    result = np.zeros(counts.size, np.int64)
    result[used] = lengths
    return result


def _tree_depths(counts: np.ndarray) -> np.ndarray:
    """Return the depth of each leaf in Huffman's tree."""
    heap = [(int(count), leaf) for leaf, count in enumerate(counts)]
    heapq.heapify(heap)
    parents = np.zeros(2 * counts.size - 1, np.int64)
    for node in range(counts.size, parents.size):
        light, first = heapq.heappop(heap)
        heavy, second = heap[0]
        parents[first] = parents[second] = node
        heapq.heapreplace(heap, (light + heavy, node))
    depths = np.zeros(parents.size, np.int64)
    for node in range(parents.size - 2, -1, -1):
        depths[node] = depths[parents[node]] + 1
    return depths[: counts.size]


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


# --- range


def _write_range(levels: np.ndarray, num_levels: int) -> np.ndarray:
    library = _constriction()
    counts = _histogram(levels, num_levels)
    used = np.flatnonzero(counts)
    ranks = np.zeros(num_levels, np.int32)
    ranks[used] = np.arange(used.size)
    coder = library.stream.queue.RangeEncoder()
    model = _model(counts[used])
    for where in blocks(levels.size):
        coder.encode(ranks[levels[where]], model)
    # Words of 32 bits. Their number is sent, because a decoder does not notice missing ones.
    coded = coder.get_compressed()
    return np.concatenate(
        [_write_table(counts), _words(coded.size), coded.astype("<u4").view(np.uint8)]
    )


def _read_range(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    library = _constriction()
    counts, rest = _read_table(buffer, num_levels)
    (size,), stream = _read_header(rest, 1)
    used = np.flatnonzero(counts)
    if counts.min() < 0 or counts.sum() != count or used.size < 2 or stream.size != 4 * size:
        raise PayloadError(
            f"expected a histogram of {count} levels; received one of {counts.sum()} with"
            f" {stream.size} bytes"
        )
    coder = library.stream.queue.RangeDecoder(stream.copy().view("<u4").astype(np.uint32))
    try:
        return used[coder.decode(_model(counts[used]), count)]
    except Exception as wrong:
        raise PayloadError(f"expected a range code of {count} levels") from wrong


def _model(counts: np.ndarray) -> Any:
    """Return the entropy model of levels that all occur."""
    return _constriction().stream.model.Categorical(counts / counts.sum(), perfect=False)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise UsageError(
            "compression.entropy=range: needs the library constriction; run pip install"
            " constriction, or set compression.entropy=huffman"
        ) from None
    return constriction
