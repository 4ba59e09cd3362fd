"""How the integers of a quantizer are written: a last stage that loses nothing.

none: ⌈log2 n⌉ bits each, for n levels. huffman: the canonical code of this message's own histogram;
the lengths of the codewords go with it. elias: levels count from 0, the most usual one, and 0s are
not written: of the others the gap to the one before, the sign and the magnitude, as (level + 1) >>
1, in the Elias omega code; no table. range: within a fraction of a per cent of the entropy of this
message's own histogram, which goes with it; needs the library constriction.

No code takes more than `none` and 5 bytes: what would is written as `none`. A quantizer whose
levels lie around 0 folds them first, see `fold`: 0, −1, 1, −2, 2, … become 0, 1, 2, 3, 4.

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
PLAIN, CODED, CONSTANT = 0, 1, 2  # the first byte of what has been coded
LONGEST = 16  # bits of a Huffman codeword, where no more levels than that are used
MOST_LEVELS = 1 << 16  # beyond it a histogram says nothing


def check_code(code: EntropyCode) -> None:
    """Raises UsageError where the code needs a library that is not there."""
    if code == "range":
        _constriction()


def fold(levels: np.ndarray) -> np.ndarray:
    """Signed levels as unsigned ones, small where they are close to 0: 2|q| − 1 for negative q, 2q
    for others.
    """
    doubled = levels.astype(np.int32) << 1
    return (doubled ^ (doubled >> 31)).view(np.uint32)


def unfold(levels: np.ndarray) -> np.ndarray:
    """The signed levels, int32."""
    levels = levels.astype(np.int32)
    return (levels >> 1) ^ -(levels & 1)


def entropy(levels: np.ndarray, num_levels: int) -> float:
    """The bits that no code of single levels can do without, table aside: Σ −log2 of each level's
    frequency.
    """
    counts = _histogram(levels, num_levels)
    counts = counts[counts > 0]
    return float((counts * np.log2(levels.size / counts)).sum())


def bound_bytes(code: EntropyCode, count: int, num_levels: int) -> int:
    """What `count` levels take at most."""
    return packed_bytes(count, _width(num_levels)) + (code != "none") * 5


def write_levels(code: EntropyCode, levels: np.ndarray, num_levels: int) -> np.ndarray:
    """uint8, of unsigned integers below num_levels."""
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
    """The levels [count]. Raises BodyError where the buffer is none of theirs."""
    if code != "none":
        if not buffer.size:
            raise PayloadError(f"no bytes came where {count} levels were expected")
        form, buffer = buffer[0], buffer[1:]
        if form == CODED and count and num_levels <= MOST_LEVELS:
            read = {"huffman": _read_huffman, "elias": _read_elias, "range": _read_range}[code]
            return _below(read(buffer, count, num_levels), num_levels)
        if form == CONSTANT:
            return _below(
                np.full(count, _read_header(buffer, 1, exactly=True)[0][0], np.uint32), num_levels
            )
        if form != PLAIN:
            raise PayloadError(f"what came is no {code} code: form {form}, {count} levels")
    if buffer.size != packed_bytes(count, _width(num_levels)):
        raise PayloadError(f"{count} levels below {num_levels} came in {buffer.size} bytes")
    return _below(unpack(buffer, _width(num_levels), count), num_levels)


def _width(num_levels: int) -> int:
    return max(1, (num_levels - 1).bit_length())


def _below(levels: np.ndarray, num_levels: int) -> np.ndarray:
    if levels.size and (int(levels.max()) >= num_levels or int(levels.min()) < 0):
        raise PayloadError(f"a level of {int(levels.max())} came where all are below {num_levels}")
    return levels


def _histogram(levels: np.ndarray, num_levels: int) -> np.ndarray:
    """How often each level occurs; in blocks, since bincount makes int64 of what it is given."""
    counts = np.zeros(num_levels, np.int64)
    for where in blocks(levels.size):
        counts += np.bincount(levels[where], minlength=num_levels)
    return counts


def _words(*numbers: Any) -> np.ndarray:
    return np.array(numbers, "<u4").view(np.uint8)


def _read_header(
    buffer: np.ndarray, count: int, exactly: bool = False
) -> tuple[list[int], np.ndarray]:
    """The first numbers of 32 bits, and what follows them."""
    if buffer.size < 4 * count or (exactly and buffer.size != 4 * count):
        raise PayloadError(f"{buffer.size} bytes of levels came where {4 * count} were expected")
    return buffer[: 4 * count].copy().view("<u4").tolist(), buffer[4 * count :]


# --- tables: numbers from 0 on, of which most are 0
# -------------------------------------------------------------------


def _write_table(numbers: np.ndarray) -> np.ndarray:
    """Up to the last that is not 0: how many, their bytes, and n + 1 of each in the omega code."""
    used = numbers[: np.flatnonzero(numbers)[-1] + 1]
    coded = write_prefix(used + 1, omega)
    return np.concatenate([_words(used.size, coded.size), coded])


def _read_table(buffer: np.ndarray, num_levels: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, what follows them)."""
    (used, size), rest = _read_header(buffer, 2)
    if not 0 < used <= num_levels or size > rest.size:
        raise PayloadError(f"a table of {used} levels came where there are {num_levels}")
    return read_prefix(rest[:size], used, read_omega) - 1, rest[size:]


# --- huffman
# --------------------------------------------------------------------------------------------------


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
        raise PayloadError(f"codewords of {longest} bits came where {LONGEST + 1} are the most")
    steps = 1 << (longest - lengths[order])
    if steps.sum() != 1 << longest:
        raise PayloadError("the lengths of codewords that came are those of no complete code")
    symbols, sizes = np.repeat(order, steps), np.repeat(lengths[order], steps)

    def decode(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        leading = (windows >> np.uint64(64 - longest)).view(np.int64)
        return symbols.take(leading), sizes.take(leading)

    return read_prefix(stream, count, decode)


def _code_lengths(counts: np.ndarray) -> np.ndarray:
    """Of the codewords, in bits, 0 for what does not occur; at least two levels occur. Where the
    longest would be beyond LONGEST, the histogram is made flatter until it is not.
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
    """Depth of each leaf in Huffman's tree."""
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
# --------------------------------------------------------------------------------------------------


def _write_elias(levels: np.ndarray, num_levels: int) -> np.ndarray:
    places = np.flatnonzero(levels)
    found = levels[places].astype(np.int64)
    gaps = write_prefix(np.diff(places, prepend=-1), omega)
    signs = np.packbits((found & 1).astype(bool), bitorder="little")
    magnitudes = write_prefix((found + 1) >> 1, omega)
    return np.concatenate([_words(places.size, gaps.size), gaps, signs, magnitudes])


def _read_elias(buffer: np.ndarray, count: int, num_levels: int) -> np.ndarray:
    (found, size), rest = _read_header(buffer, 2)
    split = size + -(-found // 8)
    if found > count or split > rest.size:
        raise PayloadError(f"{found} levels beside 0 came where there are {count} in all")
    gaps = read_prefix(rest[:size], found, read_omega)
    magnitudes = read_prefix(rest[split:], found, read_omega)
    places = np.cumsum(gaps) - 1
    if found and (
        gaps.min() < 1
        or places[-1] >= count
        or magnitudes.min() < 1
        or magnitudes.max() > num_levels
    ):
        raise PayloadError(
            f"the places or magnitudes of levels that came are not those of {count} below"
            f" {num_levels}"
        )
    levels = np.zeros(count, np.uint32)
    levels[places] = 2 * magnitudes - np.unpackbits(
        rest[size:split], count=found, bitorder="little"
    )
    return levels


# --- range
# --------------------------------------------------------------------------------------------------


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
    coded = (
        coder.get_compressed()
    )  # words of 32 bits; a decoder cannot tell whether some are missing
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
            f"a histogram of {counts.sum()} levels came with {stream.size} bytes for {count}"
        )
    coder = library.stream.queue.RangeDecoder(stream.copy().view("<u4").astype(np.uint32))
    try:
        return used[coder.decode(_model(counts[used]), count)]
    except Exception as wrong:
        raise PayloadError(f"what came is no range code of {count} levels") from wrong


def _model(counts: np.ndarray) -> Any:
    """Of levels that all occur."""
    return _constriction().stream.model.Categorical(counts / counts.sum(), perfect=False)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError:
        raise UsageError(
            "compression.entropy=range needs the library constriction: pip install constriction, or"
            " take compression.entropy=huffman"
        ) from None
    return constriction
