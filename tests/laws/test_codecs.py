"""What every codec promises, checked for all of them: a new codec is one row of the table."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ashl.compression import BodyError
from ashl.compression.downlink import advance, pull
from ashl.compression.feedback import Feedback, Residual, handed_over, with_feedback
from ashl.errors import UsageError
from ashl.runtime.effects import Hollow
from tests.conf_option import conf_option


class Row(NamedTuple):
    codec: Any
    delta: Callable[[float, int], float]  # of the contraction, by ratio and d


def topk(indices: str) -> Row:
    codec = conf_option("compression", "topk", indices=indices)
    return Row(codec, lambda ratio, d: codec.kept(ratio, d) / d)


ROWS = {
    "none": Row(conf_option("compression", "none"), lambda ratio, d: 1.0),
    **{f"topk-{code}": topk(code) for code in ("int32", "packed", "bitmap")},
}
VECTORS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "heavy": lambda rng, d: rng.standard_cauchy(d),
    "layered": lambda rng, d: rng.standard_normal(d) * 10.0 ** (np.arange(d) * 9 // d - 6),
    "ties": lambda rng, d: rng.integers(-2, 3, d),
    "constant": lambda rng, d: np.full(d, -0.5),
    "zero": lambda rng, d: np.zeros(d),
    "mostly zero": lambda rng, d: rng.standard_normal(d) * (rng.random(d) < 0.01),
    "tiny": lambda rng, d: rng.standard_normal(d) * 1e-42,  # subnormal
}
SIZES = (1, 2, 3, 31, 1000, 70_001)
RATIOS = (None, 1e-4, 0.01, 0.1, 0.4, 0.9, 1.0)
CASES = [(kind, d) for kind in VECTORS for d in SIZES]

every_codec = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
laws = settings(max_examples=60)
cases = given(
    case=st.sampled_from(CASES), ratio=st.sampled_from(RATIOS), seed=st.integers(0, 2**32 - 1), more=st.booleans()
)


def vector(kind: str, d: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(VECTORS[kind](np.random.default_rng(seed), d).astype(np.float32))


def decoded(codec: Any, body: Any, d: int) -> Tensor:
    return codec.decode(None, body, d)[1]


def bits(x: Tensor) -> bytes:
    return x.numpy().tobytes()


@every_codec
@laws
@cases
def test_encode_and_decode(row: Row, case: tuple[str, int], ratio: float | None, seed: int, more: bool) -> None:
    """Nothing is changed, the size is the declared one, decoding is repeatable, and no length grows."""
    codec, d = row.codec, case[1]
    x = vector(*case, seed)
    before = bits(x)
    _, body = codec.encode(None, x, ratio)
    wire = bits(body)
    got = decoded(codec, body, d)
    assert (got.shape, got.dtype) == (x.shape, torch.float32)
    declared = codec.payload(ratio, d)
    assert body.nbytes <= declared if codec.flags.variable else body.nbytes == declared
    assert bits(codec.encode(None, x, ratio)[1]) == wire
    out = vector("normal", d, seed + 1)
    expected = out + got
    codec.add(out, body)
    assert torch.equal(out, expected)
    assert (bits(x), bits(body)) == (before, wire)
    if codec.flags.lossless:
        assert bits(got) == before
    if codec.flags.contraction:
        lost, whole = (float((v.double() ** 2).sum()) for v in (x - got, x))
        assert lost <= (1 - row.delta(ratio or getattr(codec, "ratio", 1.0), d)) * whole * (1 + 1e-9)


@every_codec
@pytest.mark.parametrize("d", SIZES)
def test_a_hollow_vector_is_as_long(row: Row, d: int) -> None:
    for codec in (row.codec, Feedback(row.codec)):
        for ratio in RATIOS:
            sender, body = codec.encode(None, Hollow(4 * d), ratio)
            sender, again = codec.encode(codec.undo(sender, body), Hollow(4 * d), ratio)
            assert body == again == Hollow(codec.payload(ratio, d))
            assert codec.decode(None, body, d)[1] == Hollow(4 * d)


@every_codec
@laws
@cases
def test_feedback_loses_nothing(row: Row, case: tuple[str, int], ratio: float | None, seed: int, more: bool) -> None:
    """sent + residual = x + residual before, bit for bit where C keeps elements as they are; undo puts it all back."""
    codec, d = Feedback(row.codec), case[1]
    sender = None
    for turn in range(3):
        x = vector(*case, seed + turn)
        carried = x if sender is None else x + sender.error
        before = [bits(v) for v in (x, *([sender.error] if sender else []))]
        old = sender
        sender, body = codec.encode(old, x, None if turn == 1 else ratio)
        assert [bits(v) for v in (x, *([old.error] if old else []))] == before
        assert torch.equal(decoded(codec, body, d) + sender.error, carried)
        if more:
            dropped = sender
            sender = codec.undo(dropped, body)
            assert torch.equal(sender.error, carried)
            assert torch.equal(decoded(codec, body, d) + dropped.error, carried)


@every_codec
@laws
@given(st.data())
def test_a_malformed_body_is_refused_or_read(row: Row, data: st.DataObject) -> None:
    """Whatever comes, decoding ends with d elements or with a refusal; `add` writes nothing beyond them."""
    codec = row.codec
    d = data.draw(st.sampled_from((1, 5, 64, 1000)))
    body = np.frombuffer(bits(codec.encode(None, vector("normal", d), data.draw(st.sampled_from(RATIOS)))[1]), np.uint8)
    kind = data.draw(st.sampled_from(("noise", "bytes", "longer", "shorter", "words")))
    if kind == "noise":
        body = np.frombuffer(data.draw(st.binary(max_size=64)), np.uint8)
    elif kind == "longer":
        body = np.concatenate([body, np.frombuffer(data.draw(st.binary(min_size=1, max_size=9)), np.uint8)])
    elif kind == "shorter":
        body = body[: data.draw(st.integers(0, body.size - 1))]
    elif kind == "bytes":
        body = body.copy()
        body[data.draw(st.integers(0, body.size - 1))] = data.draw(st.integers(0, 255))
    elif body.size >= 16:
        body = body.copy()
        body.data.cast("B")[4:16] = b"".join(
            data.draw(st.sampled_from((0, 1, 2, 3, 4, d - 1, d, d + 1, 2**31, 2**32 - 1))).to_bytes(4, "little")
            for _ in range(3)
        )
    wire, room = torch.from_numpy(body.copy()), torch.zeros(d + 2)
    try:
        got = decoded(codec, wire, d)
    except BodyError:
        with pytest.raises(BodyError):
            codec.add(room[1:-1], wire)
        assert not room.any()
    else:
        assert got.shape == (d,)
        codec.add(room[1:-1], wire)
        assert room[0] == room[-1] == 0


@every_codec
def test_a_body_of_another_length_is_refused(row: Row) -> None:
    _, body = row.codec.encode(None, vector("normal", 100))
    for d in (99, 101, 1):
        with pytest.raises(BodyError, match=f"{d}"):
            row.codec.decode(None, body, d)


@pytest.mark.parametrize("d", [1, 2, 3, 100, 2**16, 2**16 + 1, 100_000])
@pytest.mark.parametrize("code", ["int32", "packed", "bitmap"])
def test_bytes_of_topk(code: str, d: int) -> None:
    """16 of header, 4 for each value, and the places; never more than the dense vector."""
    codec = conf_option("compression", "topk", indices=code, ratio=0.01)
    for ratio in RATIOS:
        k = max(1, round((0.01 if ratio is None else ratio) * d))
        places = {"int32": 4 * k, "packed": math.ceil(k * math.ceil(math.log2(d)) / 8), "bitmap": math.ceil(d / 8)}
        assert codec.payload(ratio, d) == 16 + min(4 * d, 4 * k + places[code])
        assert codec.kept(ratio, d) == (k if 4 * k + places[code] < 4 * d else d)


def packed_body(kind: int, d: int, values: int, rest: bytes = b"", signature: bytes = b"ASC\x01") -> Tensor:
    numbers = b"".join(number.to_bytes(4, "little") for number in (kind, d, values))
    return torch.frombuffer(bytearray(signature + numbers + bytes(4 * values) + rest), dtype=torch.uint8)


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (packed_body(0, 8, 8)[:15], "no encoded vector"),
        (packed_body(0, 8, 8).float(), "no encoded vector"),
        (packed_body(0, 8, 8)[None], "no encoded vector"),
        (None, "no encoded vector"),
        (packed_body(0, 8, 8, signature=b"ASC\x02"), "another version"),
        (packed_body(0, 9, 9), "9 elements came where 8"),
        (packed_body(0, 8, 8)[:-1], "8 values of 8, in 47 bytes"),
        (packed_body(0, 8, 9), "9 values of 8"),
        (packed_body(0, 8, 7), "no Top-K vector"),
        (packed_body(0, 8, 8, b"x"), "no Top-K vector"),
        (packed_body(4, 8, 1, words(1)), "no Top-K vector"),
        (packed_body(1, 8, 0), "0 values of 8"),
        (packed_body(1, 8, 2, words(1)), "take 8 bytes, but 4 came"),
        (packed_body(1, 8, 2, words(-1, 1)), "ascending"),
        (packed_body(1, 8, 2, words(1, 8)), "ascending"),
        (packed_body(1, 8, 2, words(1, 1)), "ascending"),
        (packed_body(1, 8, 2, words(2, 1)), "ascending"),
        (packed_body(2, 5, 2, bytes([0b111001])), "ascending"),  # 1 and 7, below 5
        (packed_body(3, 8, 2, bytes([0b0111])), "ascending"),  # three places for two values
    ],
)
def test_what_is_refused(body: Any, why: str) -> None:
    codec, d = conf_option("compression", "topk"), 5 if body is not None and body[4:5].tolist() == [2] else 8
    with pytest.raises(BodyError, match=why) as refusal:
        codec.decode(None, body, d)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, math.nan])
def test_a_ratio_that_is_none(ratio: float) -> None:
    with pytest.raises(ValueError, match="kept share"):
        conf_option("compression", "topk").encode(None, torch.ones(9), ratio)
    with pytest.raises(ValueError, match="ratio"):
        conf_option("compression", "topk", ratio=ratio)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent_first(bad: float) -> None:
    """A run that diverges is seen at the server; the sizes stay."""
    x = vector("normal", 1000)
    x[[7, 500]] = bad
    codec = with_feedback(conf_option("compression", "topk", ratio=0.002))
    _, body = codec.encode(None, x)
    assert body.nbytes == codec.payload(None, 1000)
    got = decoded(codec, body, 1000)
    assert torch.equal(got[[7, 500]].isnan(), x[[7, 500]].isnan())
    assert got[[7, 500]].isfinite().logical_not().all()
    assert int(got.count_nonzero()) == 2


def test_feedback_is_where_it_was_asked_for_and_only_where_it_is_sound() -> None:
    plain, kept = (conf_option("compression", "topk", feedback=on) for on in (False, True))
    assert with_feedback(plain) is plain
    assert with_feedback(kept) == Feedback(kept)
    assert with_feedback(conf_option("compression", "none")) == conf_option("compression", "none")
    assert Feedback(kept).flags.contraction

    class Scaled:
        flags = plain.flags._replace(contraction=False)
        feedback = True

    with pytest.raises(UsageError, match=r"compression\.feedback=false"):
        with_feedback(Scaled())


def test_a_residual_goes_on_into_the_next_stage() -> None:
    first, second = (with_feedback(conf_option("compression", "topk", ratio=r)) for r in (0.1, 0.5))
    x = vector("normal", 100)
    sender, body = first.encode(None, x)
    after = handed_over(sender, second)
    assert torch.equal(after.error, sender.error)
    _, rest = second.encode(after, torch.zeros(100), 1.0)
    assert torch.equal(decoded(first, body, 100) + decoded(second, rest, 100), x)
    assert handed_over(sender, conf_option("compression", "none")) is None
    assert handed_over(None, second) is None
    assert handed_over(Residual(x, "state of the codec before"), second) == Residual(x, None)


@every_codec
@pytest.mark.parametrize("ratio", [0.01, 0.1, 1.0])
def test_a_compressed_pull(row: Row, ratio: float) -> None:
    """Both ends hold the same; what was left out comes later; a ratio of 1 is the plain pull."""
    model = vector("normal", 1000)
    held = worker = None
    for version in range(20):
        before = [bits(v) for v in (model, *([held] if held is not None else []))]
        old = held
        held, body = pull(row.codec, old, model, ratio)
        assert [bits(v) for v in (model, *([old] if old is not None else []))] == before
        worker = advance(row.codec, worker, body)
        assert bits(worker) == bits(held)
        assert body.nbytes == (4000 if version == 0 else min(4000, row.codec.payload(ratio, 1000)))
        if ratio == 1.0 or version == 0:
            assert bits(worker) == bits(model)
        if version < 9:
            model = model + 0.01 * vector("heavy", 1000, version)
    for _ in range(math.ceil(1 / ratio)):  # the model stands still: every element comes over
        held, body = pull(row.codec, held, model, ratio)
        worker = advance(row.codec, worker, body)
    assert torch.allclose(worker, model, rtol=1e-6, atol=1e-9)


@every_codec
def test_a_compressed_pull_without_content(row: Row) -> None:
    hollow = Hollow(4000)
    held, first = pull(row.codec, None, hollow, 0.1)
    held, second = pull(row.codec, held, hollow, 0.1)
    assert (first.nbytes, second.nbytes) == (4000, min(4000, row.codec.payload(0.1, 1000)))
    assert advance(row.codec, hollow, second) == advance(row.codec, None, first) == held == hollow
