"""Guarantees of every codec, checked for all of them: a new codec is one row of the table."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ashl.compression.contract import Codec, EncodeContext
from ashl.compression.payload import PayloadError
from ashl.compression.wrappers import (
    ErrorFeedback,
    with_steps,
    wrap_codec,
)
from ashl.errors import UsageError
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.conf_option import conf_option
from tests.laws.codecs import (
    CASES,
    EXACT,
    LARGEST,
    RANDOM,
    RATIOS,
    ROWS,
    SIZES,
    bits,
    decoded,
    every_codec,
    length,
    vector,
)

TINY = 2.0**-126  # below it float32 loses digits
DRAWS = 400
MEANS = (("normal", 1), ("heavy", 96), ("normal", 96), ("constant", 8))
IN_THE_MEAN = [  # by default one of them for every second codec
    pytest.param(
        name, *case, marks=[pytest.mark.slow] * (row % 2 or place != row // 2 % len(MEANS))
    )
    for row, name in enumerate(name for name in ROWS if ROWS[name].decodes_alone)
    for place, case in enumerate(MEANS)
]
PULLS = [  # by default one of these shares of the model for each codec
    pytest.param(name, ratio, marks=[pytest.mark.slow] * bool((row + place) % 3))
    for row, name in enumerate(name for name in ROWS if ROWS[name].decodes_alone)
    for place, ratio in enumerate((0.01, 0.1, 1.0))
]


laws = settings(max_examples=settings().max_examples * 2 // 5)  # of each of many codecs
cases = given(
    case=st.sampled_from(CASES),
    ratio=st.sampled_from(RATIOS),
    seed=st.integers(0, 2**32 - 1),
    more=st.booleans(),
)


@every_codec
@laws
@cases
def test_encode_and_decode(
    name: str, case: tuple[str, int], ratio: float | None, seed: int, more: bool
) -> None:
    """Nothing is changed, the size is the declared one, decoding repeatable, and what is promised
    of lengths holds.
    """
    codec, d, context = ROWS[name], case[1], EncodeContext(ratio, seed, round=seed % 7)
    x = vector(*case, seed)
    before = bits(x)
    _, body = codec.encode(None, x, context)
    wire = bits(body)
    got = decoded(codec, body, d)
    assert (got.shape, got.dtype) == (x.shape, torch.float32)
    declared = codec.encoded_nbytes(ratio, d)
    assert body.nbytes <= declared if codec.traits.variable else body.nbytes == declared
    assert bits(codec.encode(None, x, context)[1]) == wire
    if codec.decodes_alone:
        out = vector("normal", d, seed + 1)
        expected = out + got
        codec.add(out, body)
        assert torch.allclose(out, expected, rtol=0, atol=0, equal_nan=True)
    assert (bits(x), bits(body)) == (before, wire)
    if codec.traits.lossless:
        assert bits(got) == before
    if codec.traits.contraction and not codec.traits.unbiased and name not in RANDOM:
        assert (
            length(x.double() - got.double())
            <= codec.bound(ratio, d) * length(x) * (1 + 1e-6) + d * TINY**2
        )
    beyond = case[0] == "huge" or float(x.abs().max()) > LARGEST.get(name, math.inf)
    assert codec.traits.scale_free or got.isfinite().all() or beyond


@pytest.mark.parametrize(("name", "kind", "d"), IN_THE_MEAN)
def test_what_is_promised_in_the_mean(name: str, kind: str, d: int) -> None:
    """E C(x) = x within five standard errors, and E‖C(x) − x‖² ≤ bound · ‖x‖²."""
    codec, x = ROWS[name], vector(kind, d, 5)
    if codec.traits.lossless or not (codec.traits.unbiased or name in RANDOM):
        return
    for ratio in (None, 0.3) if hasattr(codec, "ratio") else (None,):
        draws = torch.stack(
            [
                decoded(codec, codec.encode(None, x, EncodeContext(ratio, 1, round=k))[1], d)
                for k in range(DRAWS)
            ]
        )
        if codec.traits.unbiased:
            error = (draws.double().mean(0) - x).abs()
            spread = draws.double().std(0) / DRAWS**0.5
            rarely = (
                x.abs() * (30 * codec.bound(ratio, d) / DRAWS) ** 0.5
            )  # where few draws may have come, or none
            rarely = rarely.maximum(
                x.abs().minimum(draws.abs().max() * 15 / DRAWS)
            )  # their probability depends on |x|
            few = ((draws != 0).sum(0) < 15) | (spread == 0)
            assert (error <= 5.5 * spread + 1e-6 * x.abs() + few * rarely).all()
        lost = ((draws - x).double() ** 2).sum(1)
        assert lost.mean() - 5 * lost.std() / DRAWS**0.5 <= codec.bound(ratio, d) * length(x) * (
            1 + 1e-6
        )


@every_codec
def test_two_workers_and_two_rounds_draw_apart(name: str) -> None:
    """Streams differ by layer, too, in codecs that draw random numbers."""
    codec, x = ROWS[name], vector("normal", 1000)
    if name not in RANDOM and not (codec.traits.unbiased and not codec.traits.lossless):
        return
    turns = (
        EncodeContext(seed=3),
        EncodeContext(seed=4),
        EncodeContext(seed=3, round=1),
        EncodeContext(seed=3, layer=1),
    )
    assert len({bits(codec.encode(None, x, context)[1]) for context in turns}) == len(turns)
    if not codec.traits.linear:
        assert bits(codec.encode(None, x, turns[0])[1]) != bits(
            codec.encode(None, x, EncodeContext(seed=3, worker=1))[1]
        )


@every_codec
def test_what_is_only_timed_is_as_long(name: str) -> None:
    codecs = ROWS[name], with_steps(ROWS[name], ErrorFeedback())
    for codec, d, ratio in product(codecs, SIZES, RATIOS):
        link, ends = CompressionPipeline(codec, d), CodecState()
        body = link.encode(ends, SizeOnly(4 * d), EncodeContext(ratio))
        link.restore_dropped(ends, body)
        assert (
            body
            == link.encode(ends, SizeOnly(4 * d), EncodeContext(ratio))
            == SizeOnly(link.codec.encoded_nbytes(ratio, d))
        )
        assert link.decode(ends, 0, body) == SizeOnly(4 * d)
        assert ends == CodecState()


@every_codec
def test_another_element_type(name: str) -> None:
    """It is taken, and travels as float32."""
    if name == "none":
        return
    codec = ROWS[name]
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = vector("normal", 500).to(dtype)
        body = codec.encode(None, x)[1]
        assert torch.equal(body, codec.encode(None, x.float())[1])
        if not codec.decodes_alone:
            continue
        out = torch.ones(500, dtype=dtype)
        codec.add(out, body)
        whole = (1 + decoded(codec, body, 500)).to(dtype)
        assert torch.allclose(out, whole, rtol=1e-2, atol=1e-2)


@every_codec
def test_what_is_not_finite_stays_so(name: str) -> None:
    """A run that diverges is seen at the other end."""
    codec = ROWS[name]
    for bad, d in product((math.nan, math.inf, -math.inf), (1, 300)):
        x = vector("normal", d)
        x[d // 2] = bad
        _, body = codec.encode(None, x, EncodeContext(ratio=0.5))
        got = decoded(codec, body, d)
        assert got.shape == (d,)
        if not codec.traits.scale_free:
            assert not got.isfinite().all() or not got[d // 2]  # or it was not selected
            full = decoded(codec, codec.encode(None, x, EncodeContext(ratio=1.0))[1], d)
            assert not full.isfinite().all() or hasattr(codec, "blocks")  # one of them was sent


@every_codec
@laws
@cases
def test_feedback_loses_nothing(
    name: str, case: tuple[str, int], ratio: float | None, seed: int, more: bool
) -> None:
    """Check sent + residual = x + residual before, bit for bit if C keeps elements unchanged; undo
    restores all of it.
    """
    if not (ROWS[name].traits.contraction or ROWS[name].traits.drains) or case[0] == "huge":
        return
    codec, d = with_steps(ROWS[name], ErrorFeedback()), case[1]
    sender = None
    for context in range(3):
        x = vector(*case, seed + context)
        carried = x if sender is None else x + sender.error
        before = [bits(v) for v in (x, *([sender.error] if sender else []))]
        old = sender
        sender, body = codec.encode(
            old, x, EncodeContext(None if context == 1 else ratio, seed, round=context)
        )
        assert [bits(v) for v in (x, *([old.error] if old else []))] == before
        assert same(name, decoded(codec, body, d) + sender.error, carried)
        if more:
            dropped = sender
            sender = codec.restore_dropped(dropped, body)
            assert same(name, sender.error, carried)
            assert same(name, decoded(codec, body, d) + dropped.error, carried)


def same(name: str, a: Tensor, b: Tensor) -> bool:
    """Sums agree to the bit, or to one rounding of each element's largest part."""
    return (
        torch.equal(a, b)
        if name in EXACT
        else torch.allclose(a, b, rtol=1e-5, atol=2e-6 * float(b.abs().max()))
    )


@every_codec
def test_a_body_of_another_length_is_refused(name: str) -> None:
    _, body = ROWS[name].encode(None, vector("normal", 100))
    for d in (99, 101, 1):
        with pytest.raises(PayloadError, match=f"{d}"):
            ROWS[name].decode(None, body, d)


def packed_body(
    form: int,
    d: int,
    k: int,
    values: int,
    rest: bytes = b"",
    version: int = 0xA2,
    code: int = 2,
) -> Tensor:
    numbers = b"".join(number.to_bytes(4, "little") for number in (d, k, 0, 4 * values))
    return torch.frombuffer(
        bytearray(bytes((version, code, form, 0)) + numbers + bytes(4 * values) + rest),
        dtype=torch.uint8,
    )


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


@pytest.mark.parametrize(
    ("indices", "d", "body", "why"),
    [
        ("int32", 8, packed_body(2, 8, 8, 8)[:19], "a header of 20 bytes"),
        ("int32", 8, None, "a header of 20 bytes"),
        ("int32", 8, packed_body(2, 8, 8, 8, version=0xA1), "another version"),
        ("int32", 8, packed_body(2, 8, 8, 8, code=1), "codec 2; received one of codec 1"),
        ("int32", 8, packed_body(2, 9, 9, 9), "of 8 elements; received 9"),
        ("int32", 8, packed_body(2, 8, 8, 8)[:-1], "in 51 bytes"),
        ("int32", 8, packed_body(2, 8, 9, 9), "declares 9 values"),
        ("int32", 8, packed_body(2, 8, 8, 8, b"x"), "declares 8 values"),
        ("int32", 8, packed_body(4, 8, 1, 1, words(1)), "expected a sparse vector"),
        ("int32", 8, packed_body(0, 8, 2, 2, words(1)), "take 8 bytes; received 4"),
        ("int32", 8, packed_body(0, 8, 2, 2, words(-1, 1)), "ascending"),
        ("int32", 8, packed_body(0, 8, 2, 2, words(1, 8)), "ascending"),
        ("int32", 8, packed_body(0, 8, 2, 2, words(2, 1)), "ascending"),
        ("packed", 5, packed_body(0, 5, 2, 2, bytes([0b111001])), "ascending"),  # 1 and 7, below 5
        (
            "bitmap",
            8,
            packed_body(0, 8, 2, 2, bytes([0b0111])),
            "ascending",
        ),  # three places for two values
    ],
)
def test_what_is_refused(indices: str, d: int, body: Any, why: str) -> None:
    codec = conf_option("compression", "topk", indices=indices)
    with pytest.raises(PayloadError, match=why) as refusal:
        codec.decode(None, body, d)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, math.nan])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(ValueError, match="density"):
        conf_option("compression", "topk").encode(None, torch.ones(9), EncodeContext(ratio))
    with pytest.raises(ValueError, match="ratio"):
        conf_option("compression", "topk", ratio=ratio)


def test_feedback_is_where_it_was_asked_for_and_only_where_it_is_sound() -> None:
    plain, kept = (conf_option("compression", "topk", error_feedback=on) for on in (False, True))
    assert wrap_codec(plain, ()) is plain
    assert wrap_codec(kept, ()) == with_steps(kept, ErrorFeedback())
    assert wrap_codec(conf_option("compression", "none"), ()) == conf_option("compression", "none")
    assert with_steps(kept, ErrorFeedback()).traits.contraction

    class Scaled(Codec):
        traits = plain.traits._replace(contraction=False)
        error_feedback, feedback_gain, feedback_decay = True, 1.0, 1.0

    with pytest.raises(UsageError, match=r"compression\.error_feedback=false"):
        wrap_codec(Scaled(), ())


@pytest.mark.parametrize(("name", "ratio"), PULLS)
def test_a_compressed_pull(name: str, ratio: float) -> None:
    """Both ends hold the same; what was left out comes later; a ratio of 1 is the plain pull."""
    model = vector("normal", 1000)
    link, server, worker = CompressionPipeline(ROWS[name], 1000), CodecState(), torch.zeros(1000)
    for version in range(20):
        seen = [model, *server.held.values()]
        before = [bits(v) for v in seen]
        body = link.encode_pull(server, 3, model, EncodeContext(ratio))
        assert [bits(v) for v in seen] == before
        worker = link.apply_pull(worker, body)
        assert bits(worker) == bits(server.held[3])
        declared = 4000 if version == 0 else min(4000, link.pull_codec.encoded_nbytes(ratio, 1000))
        assert body.nbytes <= declared if ROWS[name].traits.variable else body.nbytes == declared
        if version == 0 or (ratio == 1.0 and name in EXACT):
            assert bits(worker) == bits(model)
        if version < 9:
            model = model + 0.01 * vector("heavy", 1000, version)
    for _ in range(math.ceil(1 / ratio)):  # the model does not change: every element arrives
        worker = link.apply_pull(worker, link.encode_pull(server, 3, model, EncodeContext(ratio)))
    assert (
        not ROWS[name].traits.contraction
        or name not in EXACT
        or torch.allclose(worker, model, rtol=1e-6, atol=1e-9)
    )


@every_codec
def test_a_compressed_pull_without_content(name: str) -> None:
    link, server, size_only = CompressionPipeline(ROWS[name], 1000), CodecState(), SizeOnly(4000)
    first, second = (link.encode_pull(server, 0, size_only, EncodeContext(0.1)) for _ in range(2))
    assert first.nbytes == 4000
    assert second.nbytes == min(4000, link.pull_codec.encoded_nbytes(0.1, 1000))
    assert (
        link.apply_pull(size_only, second)
        == link.apply_pull(size_only, first)
        == server.held[0]
        == size_only
    )
