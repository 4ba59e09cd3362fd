"""The last stage loses nothing, is as short as it says, and believes nothing of what comes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ashl.compression.coding import (
    fold,
    level_bytes,
    omega_codewords,
    read_entropy,
    read_omega,
    write_entropy,
    write_omega,
)
from ashl.compression.payload import PayloadError
from tests.laws.codecs import codec, decoded, vector

CODES = ("elias", "pco")
every_code = pytest.mark.parametrize("code", CODES)


def drawn(rng: np.random.Generator, kind: str, count: int, num_levels: int) -> np.ndarray:
    levels = {
        "even": lambda: rng.integers(0, num_levels, count),
        "steep": lambda: np.minimum(rng.geometric(0.6, count) - 1, num_levels - 1),
        "rare": lambda: (rng.random(count) < 0.01) * (num_levels - 1),
        "one": lambda: np.full(count, num_levels - 1),
        "Fibonacci": lambda: (
            np.repeat(np.arange(24), np.minimum(1.618 ** np.arange(24), 9e3).astype(int))
            % num_levels
        ),
    }[kind]()
    return levels[:count].astype(np.uint8 if num_levels <= 256 else np.uint32)


@every_code
@settings(max_examples=60)
@given(
    kind=st.sampled_from(("even", "steep", "rare", "one", "Fibonacci")),
    count=st.sampled_from((0, 1, 2, 7, 300, 20_000)),
    num_levels=st.sampled_from((2, 3, 16, 201, 256)),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_written_is_read(
    code: str, kind: str, count: int, num_levels: int, seed: int
) -> None:
    levels = drawn(np.random.default_rng(seed), kind, count, num_levels)
    before = levels.tobytes()
    buffer = write_entropy(code, levels, num_levels)
    assert buffer.dtype == torch.uint8
    assert len(buffer) <= level_bytes(levels.size, num_levels - 1, code)
    assert np.array_equal(read_entropy(code, buffer, levels.size, num_levels), levels)
    assert levels.tobytes() == before


@every_code
@settings(max_examples=150)
@given(st.data())
def test_a_malformed_buffer_is_refused_or_read(code: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    num_levels, count = (
        data.draw(st.sampled_from((2, 17, 300))),
        data.draw(st.sampled_from((1, 40, 3000))),
    )
    kind = data.draw(st.sampled_from(("even", "steep", "rare")))
    levels = drawn(rng, kind, count, num_levels)
    buffer = write_entropy(code, levels, num_levels).numpy().copy()
    for _ in range(data.draw(st.integers(1, 3))):
        buffer[data.draw(st.integers(0, min(buffer.size - 1, 40)))] = data.draw(
            st.sampled_from((0, 1, 2, 127, 255))
        )
    cut = data.draw(st.integers(0, 3))
    buffer = (
        buffer[: max(0, buffer.size - cut)]
        if data.draw(st.booleans())
        else np.append(buffer, np.uint8(cut))
    )
    try:
        levels = read_entropy(code, torch.from_numpy(buffer), count, num_levels)
    except PayloadError:
        return
    assert levels.shape == (count,)
    assert levels.min() >= 0
    assert levels.max() < num_levels


@pytest.mark.parametrize("code", CODES)
def test_what_is_cut_is_refused(code: str) -> None:
    levels = drawn(np.random.default_rng(0), "steep", 5000, 30)
    buffer = write_entropy(code, levels, 30)
    longer = torch.cat([buffer, torch.zeros(4, dtype=torch.uint8)])
    for cut in (buffer[:-4], buffer[:3], buffer[:0], longer):
        with pytest.raises(PayloadError):
            read_entropy(code, cut, 5000, 30)


def entropy(levels: np.ndarray) -> float:
    """The least number of bits of a code of single levels, without a table."""
    counts = np.unique(levels, return_counts=True)[1]
    return float((counts * np.log2(levels.size / counts)).sum())


def qsgd_levels(d: int, s: int) -> np.ndarray:
    """Quantize a normal vector by the rule of QSGD with one bucket."""
    rng = np.random.default_rng(3)
    v = rng.standard_normal(d)
    return (np.sign(v) * np.floor(s * np.abs(v) / np.linalg.norm(v) + rng.random(d))).astype(
        np.int32
    )


def test_lengths_of_levels() -> None:
    """Theorem 3.4 of the paper: at s = √d at most 2.8·d + 32 bits; the others are near the
    entropy.
    """
    d, s = 10_000, 100
    levels = fold(qsgd_levels(d, s))
    bits = {code: 8 * len(write_entropy(code, levels, 2 * s + 1)) for code in CODES}
    least = entropy(levels)
    assert 2.7 * d < bits["elias"] + 32 <= 2.8 * d + 32
    assert least < bits["pco"] <= 1.05 * least
    long = fold(qsgd_levels(300_000, 200))
    assert 8 * len(write_entropy("pco", long, 401)) <= 1.01 * entropy(long)


def test_the_omega_code() -> None:
    """The codewords of Elias's table, and back again up to 32 bits."""
    words = {
        1: "0",
        2: "100",
        3: "110",
        4: "101000",
        7: "101110",
        8: "1110000",
        15: "1111110",
        16: "10100100000",
    }
    codes, lengths = omega_codewords(np.array(list(words)))
    found = zip(codes.tolist(), lengths.tolist(), strict=True)
    assert [f"{code:0{length}b}" for code, length in found] == [*words.values()]
    numbers = np.random.default_rng(0).integers(
        1, 2 ** np.arange(1, 33)[:, None].repeat(2000, 1), endpoint=False
    )
    numbers = np.append(numbers.reshape(-1), [2**32 - 1, 1])
    stream = write_omega(numbers)
    assert np.array_equal(read_omega(stream, numbers.size), numbers)
    with pytest.raises(PayloadError, match="cannot hold"):
        read_omega(stream, 8 * stream.size + 1)


def test_a_quantizer_with_an_entropy_code() -> None:
    """The same values in fewer bytes; with s = √d and Elias's code within 2.8·d + 32 bits, the norm
    included.
    """
    x, d = vector("normal", 10_000), 10_000
    plain = codec("qsgd", levels=100, bucket=d)
    sizes = {"none": plain.encode(None, x)[1].nbytes - 20}
    for code in ("elias", "pco"):
        coded = codec("qsgd", levels=100, bucket=d, entropy=code)
        body = coded.encode(None, x)[1]
        assert torch.equal(decoded(coded, body, d), decoded(plain, plain.encode(None, x)[1], d))
        sizes[code] = body.nbytes - 20
    assert 8 * sizes["elias"] <= 2.8 * d + 32
    assert sizes["pco"] < sizes["elias"] < 0.36 * sizes["none"]
