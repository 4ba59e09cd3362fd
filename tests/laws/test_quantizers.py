"""Claims of the quantizers' papers, and the rounding of each quantizer."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.coding import (
    WIDTHS,
    ValueCode,
    read_ternary,
    read_values,
    value_bound,
    value_bytes,
    write_values,
)
from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.kernels import (
    flip_signs,
    pack,
    pack_signs,
    pack_ternary,
    packed_bytes,
    unpack,
    unpack_ternary,
)
from ashl.compression.payload import PayloadError, as_bytes
from ashl.compression.rotated import rotate
from ashl.compression.terngrad import SharedScale, sum_width
from ashl.compression.wrappers import (
    RunningMean,
    codec_for_layers,
    convert_sender,
    wrap_codec,
)
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.conf_option import conf_option
from tests.laws.codecs import decoded, length, vector

SIZES = (0, 1, 7, 8, 9, 31, 33, 1000)
LAYOUT = (Layer("matrix", (3, 4)), Layer("bias", (3,)), Layer("filter", (2, 2, 2)))


def option(name: str, /, **fields: Any) -> Any:
    return conf_option("compression", name, **fields)


def draw(codec: Any, x: Tensor, k: int = 0, worker: int = 0) -> Tensor:
    return decoded(
        codec, codec.encode(None, x, EncodeContext(seed=7, round=k, worker=worker))[1], x.numel()
    )


def lost(codec: Any, x: Tensor, draws: int) -> tuple[float, float]:
    """E‖C(x) − x‖²/‖x‖² and its standard error."""
    shares = [length(draw(codec, x, k) - x) / length(x) for k in range(draws)]
    return float(np.mean(shares)), float(np.std(shares)) / draws**0.5


# --- numbers of a few bits
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 33))
def test_numbers_come_back_from_a_little_endian_stream(width: int) -> None:
    rng = np.random.default_rng(width)
    for count in SIZES:
        numbers = rng.integers(0, 2**width, count, np.uint32)
        stream = pack(numbers.astype(np.int64), width)
        assert (stream.dtype, len(stream)) == (torch.uint8, packed_bytes(count, width))
        assert int.from_bytes(stream.numpy().tobytes(), "little") == sum(
            int(n) << i * width for i, n in enumerate(numbers)
        )
        found = np.asarray(unpack(stream, width, count))
        assert np.array_equal(found.astype(np.uint32), numbers)
        above = 2**32 - 2**width
        assert torch.equal(pack(numbers.astype(np.int64) | above, width), stream)


def test_signs_and_trits_come_back() -> None:
    rng = np.random.default_rng(0)
    for count in (*SIZES, 70_001):
        x = torch.from_numpy(rng.standard_normal(count, np.float32))
        signed = flip_signs(pack_signs(x), torch.tensor([2.5]), count)
        assert torch.equal(signed, torch.copysign(torch.tensor(2.5), x))
        digits = rng.integers(0, 3, count, np.uint8)
        assert np.array_equal(unpack_ternary(pack_ternary(digits), count), digits)
    assert pack_signs(torch.tensor([0.0, -0.0, math.nan, -math.inf])).tolist() == [0b1010]
    with pytest.raises(PayloadError, match="242"):
        read_ternary(torch.tensor([243], dtype=torch.uint8), torch.ones(1), 5)


# --- the bounds of the papers
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(
    ("d", "bucket", "levels"),
    [(1000, 1000, 1), (1000, 64, 4), (10_000, 10_000, 100), (4096, 512, 16)],
)
def test_variance_of_qsgd(norm: str, d: int, bucket: int, levels: int) -> None:
    """ω = min(b/s², √b/s) for the ℓ2 norm."""
    codec, b, s = option("qsgd", norm=norm, bucket=bucket, levels=levels), bucket, levels
    expected = (
        min(b / s**2, b**0.5 / s) if norm == "l2" else min(b / (4 * s * s), (1 + b**0.5) / (2 * s))
    )
    assert codec.bound(None, d) == pytest.approx(expected)
    assert codec.traits.contraction == (expected < 1)


def test_an_eighth_is_lost_by_natural_compression_at_worst() -> None:
    """ω = 1/8 is reached at 4/3 of a power of two; powers themselves are exact."""
    codec = option("natural")
    worst, error = lost(codec, torch.full((10_000,), 4 / 3), 20)
    assert worst == pytest.approx(1 / 8, abs=5 * error)
    mean, error = lost(codec, vector("heavy", 10_000), 20)
    assert mean < 1 / 8
    powers = 2.0 ** torch.arange(-126, 128, dtype=torch.float32) * torch.tensor([1, -1]).repeat(127)
    assert torch.equal(draw(codec, powers), powers)


def test_natural_compression_at_both_ends() -> None:
    codec, top, least = option("natural"), 2.0**127, 2.0**-126
    assert draw(codec, torch.tensor([3e38, -3e38, 1.8e38])).tolist() == [top, -top, top]
    assert draw(codec, torch.tensor([math.inf, -math.inf])).tolist() == [math.inf, -math.inf]
    assert draw(codec, torch.tensor([math.nan])).isinf().all()
    small = torch.full((20_000,), 2.0**-128)
    assert set(draw(codec, small).tolist()) == {0.0, least}
    assert float(draw(codec, small).double().mean()) == pytest.approx(2.0**-128, rel=0.05)


@pytest.mark.parametrize(("levels", "gain"), [(2, 10), (16, 30)])
def test_rotation_spreads_one_large_element(levels: int, gain: int) -> None:
    """Where it makes the steps coarse for a thousand small ones, little is left of the error."""
    x = 1e-3 * vector("normal", 1024)
    x[17] = 1.0
    plain, _ = lost(option("uniform", levels=levels), x, 20)
    turned, _ = lost(option("rotated", levels=levels), x, 20)
    assert (
        turned
        <= option("rotated", levels=levels).bound(None, 1024)
        == (2 * math.log(1024) + 2) / (levels - 1) ** 2
    )
    assert turned * gain < plain


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 4096])
def test_rotating_twice_is_nothing(size: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, size)).astype(np.float32)
    z = rotate(x, size)
    assert np.allclose((z**2).sum(1), (x**2).sum(1), rtol=1e-4)
    assert np.allclose(rotate(z, size), x, atol=1e-5)


def test_clipping_makes_ternaries_biased() -> None:
    """The slope of E C(x) in x: 1, and P(|x| < 2.5 σ) = 0.988 for a normal vector that is cut
    there.
    """
    x = vector("normal", 400_000)
    for sigmas, slope in ((None, 1.0), (2.5, 0.9876)):
        codec = option("terngrad", clip_sigmas=sigmas)
        got = torch.stack([draw(codec, x, k) for k in range(4)]).double().mean(0)
        assert float(got @ x.double()) / length(x) == pytest.approx(slope, abs=0.004)
        assert len(set(draw(codec, x).tolist())) == 3
    assert option("terngrad").traits.unbiased
    assert not option("terngrad", clip_sigmas=2.5).traits.unbiased


# --- one bit
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["layer", "column"])
def test_one_bit_by_parts(per: str) -> None:
    """The columns of a matrix span all outputs; a bias is one part."""
    codec = option("one_bit", per=per).for_layout(LAYOUT)
    x = vector("normal", 23, 4)
    got = draw(codec, x)
    parts = {"layer": [range(12)], "column": [range(0, 12, 4), range(1, 12, 4)]}[per]
    for part in [*map(list, parts), [12, 13, 14]]:
        for side in (True, False):
            here = [i for i in part if (x[i] < 0) == side]
            assert got[here].tolist() == pytest.approx([float(x[here].mean())] * len(here))
    count = {"layer": 3, "column": 4 + 1 + 4}[per]
    body = codec.encode(None, x)[1]
    assert body.nbytes == codec.encoded_nbytes(None, 23) == 20 + 3 + 8 * count
    assert length(got - x) <= codec.bound(None, 23) * length(x)
    with pytest.raises(PayloadError, match="means"):
        option("one_bit").decode(None, body, 23)
    assert option("one_bit", per="vector").for_layout(LAYOUT) == option("one_bit", per="vector")


def test_signs_with_a_scale_and_without() -> None:
    x = torch.tensor([1.0, -3.0, 0.0, -0.0])
    assert draw(option("sign"), x).tolist() == [1, -1, 1, -1]
    assert draw(option("sign", scale="none"), 7 * x).tolist() == [1, -1, 1, -1]
    plain, scaled = option("sign", scale="none").traits, option("sign").traits
    assert (plain.contraction, plain.scale_free, scaled.contraction, scaled.scale_free) == (
        False,
        True,
        True,
        False,
    )


@pytest.mark.parametrize("n", [1, 2, 3, 6, 10])
def test_a_majority_decides(n: int) -> None:
    """Even votes are 0; unequal weights decide by their sum; nothing is changed."""
    codec = option("sign", scale="none", vote="majority")
    xs = [vector("normal", 500, seed) for seed in range(n)]
    bodies = [codec.encode(None, x)[1] for x in xs]
    votes = torch.stack(xs).sign().sum(0)
    assert torch.equal(codec.reduce(None, bodies, [1 / n] * n, 500)[1], votes.sign())
    weights = [1.0] + [0.1 / n] * (n - 1)
    assert torch.equal(codec.reduce(None, bodies, weights, 500)[1], xs[0].sign())
    assert CompressionPipeline(codec, 500).reduce(
        CodecState(), [SizeOnly(83)] * n, weights
    ) == SizeOnly(2000)
    assert codec.for_pulls().traits.contraction


def test_signum_sends_the_signs_of_a_running_mean() -> None:
    codec = wrap_codec(option("sign", scale="none", error_feedback=False, beta=0.75), ())
    assert isinstance(codec.steps[0], RunningMean)
    sender, mean = None, torch.zeros(100)
    for k in range(4):
        x = vector("normal", 100, k)
        before, mean = sender, 0.75 * mean + 0.25 * x
        sender, body = codec.encode(before, x, EncodeContext(round=k))
        assert torch.allclose(sender.steps[0].mean, mean, atol=1e-6)
        assert torch.equal(decoded(codec, body, 100), sender.steps[0].mean.sign())
        assert codec.restore_dropped(sender, body) == sender
    assert CompressionPipeline(codec, 100).encode(
        CodecState(), SizeOnly(400), EncodeContext()
    ) == SizeOnly(20 + 13)


def test_a_residual_continues_behind_a_running_mean() -> None:
    plain, averaged = wrap_codec(option("sign"), ()), wrap_codec(option("sign", beta=0.5), ())
    sender, _ = plain.encode(None, vector("normal", 50))
    after = convert_sender(sender, averaged)
    assert torch.equal(after.error, sender.error)
    later, _ = averaged.encode(after, torch.zeros(50))
    assert convert_sender(later, plain).error is later.error


# --- sums of payloads ---


def test_the_range_of_a_cast() -> None:
    x = torch.tensor([65504.0, 65520.0, -1e30, 1e-8, 2.0**-24])
    assert draw(option("cast", dtype="fp16"), x).tolist() == [
        65504,
        math.inf,
        -math.inf,
        0,
        2.0**-24,
    ]
    assert draw(option("cast"), x).isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 7, 8, 40])
@pytest.mark.parametrize("layers", [True, False])
def test_ternaries_of_a_shared_scale_add_up(n: int, layers: bool) -> None:
    """The sum of the words is that of the ternaries, each layer with the largest scale of all
    workers.
    """
    codec = codec_for_layers(option("terngrad", shared_scale=True, per_layer=layers), LAYOUT)
    assert isinstance(codec, SharedScale)
    xs = [vector("normal", 23, seed) for seed in range(n)]
    tops = torch.stack([codec.own_scales(x) for x in xs]).amax(0)
    assert len(tops) == (3 if layers else 1)
    words = [codec.to_words(x, tops, EncodeContext(worker=k), n) for k, x in enumerate(xs)]
    total = codec.from_sums(torch.stack(words).sum(0, dtype=torch.int32), tops, n)
    sizes = [layer.size for layer in LAYOUT] if layers else [23]
    scale = tops.repeat_interleave(torch.tensor(sizes))
    alone = [
        codec.from_sums(word, tops, n) + (n - 1) * scale for word in words
    ]  # nobody else said 0
    for one, x in zip(alone, xs, strict=True):
        assert ((one / scale).round() * x.sign() >= 0).all()
        assert torch.allclose((one / scale).abs().round(), (one / scale).abs(), atol=1e-4)
    assert torch.allclose(total, sum(alone), rtol=1e-4, atol=1e-3)
    assert 2 * n < 2 ** sum_width(n)
    assert words[0].nbytes <= 23 * sum_width(n) / 8 + 4


# --- value codes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*WIDTHS, "natural"])
def test_values_in_few_bits(code: ValueCode) -> None:
    """The bytes are as declared, for any number of values; the error is at most the stated one."""
    for k in (0, 1, 2, 1023, 1024, 1025, 3000):
        for kind in ("normal", "heavy", "zero", "constant"):
            x = vector(kind, max(1, k), 1)[:k]
            values, scales = write_values(code, x, EncodeContext().words)
            assert values.nbytes + scales.nbytes == value_bytes(code, k)
            got = read_values(code, as_bytes(values), as_bytes(scales), k)
            assert (got.dtype, got.shape) == (torch.float32, (k,))
            wide = x.double()
            stated = (
                1.0 if code == "natural" else value_bound(code, k)
            )  # its bound is one of the mean
            assert ((got - wide) ** 2).sum() <= stated * (wide**2).sum() * (1 + 1e-5)
