"""Codecs on a device give the same bytes and the same vector as in the host's memory, with the
allowed transfers only.

The bits of NaN are a device's own, so there the decoded vectors are compared. So are the last bits
of lengths (`qsgd`, l2): there the law is that of two messages about the same vector.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.kernels import outer_sum, pack, unpack
from ashl.compression.payload import HEADER, PayloadError
from ashl.compression.wrappers import codec_for_layers
from ashl.device import to_device, to_host
from tests.laws.codecs import ROWS, VECTORS, bits, codec, decoded, vector
from tests.stand_in_device import DEVICE, There, guarded
from tests.support import slow_unless

PORTED = {name: row for name, row in ROWS.items() if not row.on_host} | {
    "sign-layers": codec("sign", scale="none"),
    "one_bit-vector": codec("one_bit", per="vector"),
    "terngrad-vector": codec("terngrad", per_layer=False),
    "qsgd-31": codec("qsgd", norm="max", levels=31),
}
LAST_BIT = {
    name
    for name, row in PORTED.items()
    if name.startswith(("rotated", "demo", "terngrad-clipped"))
    or (name.startswith("qsgd") and row.norm == "l2")
}
KEEPS = {  # what keeps something between messages
    "topk": codec("topk", error_feedback=True),
    "topk-int8": codec("topk", values="int8", momentum=0.9, error_feedback=False),
    "adacomp": codec("adacomp"),
    "diana": codec("diana", norm="max"),
    "ef21": codec("ef21"),
    "ef21-natural": codec("ef21", compressor="natural"),
    "econtrol": codec("econtrol", values="int4"),
    "laq": codec("laq"),
    "lag": codec("laq", bits=None),
    "variance": codec("variance"),
    "gtopk": codec("gtopk", error_feedback=True),
}
TWINS = {  # of others here, so that only `-m slow` runs them
    *(
        "topk-int4",
        "strom-dense",
        "uniform-pco",
        "terngrad-pco",
        "sparse_loco-16",
    ),
    *("grid-2", "grid-8", "laq-1", "laq-None", "block_coordinate-random"),
}
NOT_FINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
KINDS = (*VECTORS, "-0", *NOT_FINITE)
CASES: dict[int, Sequence[str]] = {
    1: ("normal",),
    7: ("-0", "nan"),
    1000: ("heavy", "ties", "tiny", "huge", "mostly zero"),
    70_001: ("inf",),
}


def there(x: Tensor) -> Tensor:
    return to_device(x, DEVICE)


def of_kind(kind: str, d: int) -> Tensor:
    if kind == "-0":
        return torch.tensor([0.0, -0.0, 1.0]).repeat(d)[:d] * -1
    if kind in NOT_FINITE:
        x = vector("normal", d, seed=1)
        x[d // 2 :: 40_000] = NOT_FINITE[kind]
        return x
    return vector(kind, d)


def cases(whole: bool) -> Iterator[tuple[str, Tensor, EncodeContext]]:
    for d, kinds in CASES.items():
        for kind in KINDS if whole else kinds:
            yield kind, of_kind(kind, d), EncodeContext(ratio=0.03, seed=3, round=d, lr=0.1)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_unless(sorted(PORTED.keys() - TWINS)[::2], PORTED))
def test_the_same_bytes_and_the_same_vector(name: str, whole: bool) -> None:
    row: Any = PORTED[name]
    for kind, x, context in cases(whole):
        d, where = len(x), (kind, len(x))
        body = row.encode(None, x, context)[1]
        with guarded():
            same = row.encode(None, there(x), context)[1]
            assert isinstance(same, There), where
            same, found = (
                to_host(same),
                None if row.traits.reduces else to_host(decoded(row, there(body), d)),
            )
        assert (same.dtype, len(same)) == (body.dtype, len(body)), where
        if kind != "nan" and name not in LAST_BIT:
            assert bits(same) == bits(body), where
        if found is not None:
            expected = decoded(row, body, d)
            assert (
                bits(found) == bits(expected)
                if kind != "nan"
                else torch.equal(found.isnan(), expected.isnan())
            )


@pytest.mark.parametrize("name", KEEPS)
def test_residuals_are_identical(name: str) -> None:
    """Over four messages, of which one is dropped; of small moves, so that something is
    left out.
    """
    row, d = codec_for_layers(KEEPS[name], (Layer("a", (20, 30)), Layer("b", (400,)))), 1000
    sender = sender_there = receiver = receiver_there = None
    for i in range(4):
        x = vector("heavy", d, seed=i) + 10 * vector("normal", d, seed=9)
        params, squares = (
            vector("normal", d, seed=9) * (1 + i / 1000),
            vector("normal", d, seed=i) ** 2,
        )
        context = EncodeContext(ratio=0.1, seed=3, round=i, lr=-0.1, params=params, squares=squares)
        sender, body = row.encode(sender, x, context)
        kept = row.residual(sender)
        with guarded():
            moved = context._replace(params=there(params), squares=there(squares))
            sender_there, same = row.encode(sender_there, there(x), moved)
            kept_there = row.residual(sender_there)
            assert (kept is None) == (kept_there is None)
            if kept is not None and kept_there is not None:
                assert bits(to_host(kept_there)) == bits(kept)
            if i == 2:
                sender, sender_there = (
                    row.restore_dropped(sender, body),
                    row.restore_dropped(sender_there, same),
                )
                continue
            if not row.traits.reduces:
                receiver_there, found = row.decode(receiver_there, same, d)
                same, found = to_host(same), to_host(found)
                receiver, expected = row.decode(receiver, body, d)
                assert bits(found) == bits(expected)
            assert bits(to_host(same)) == bits(body)


def test_lengths_are_right_to_the_last_bits() -> None:
    """Elements rounded by these lengths agree, except a few on the edge."""
    row, d = PORTED["qsgd-127"], 70_001
    here = row.encode(None, vector("heavy", d), EncodeContext())[1]
    with guarded():
        same = to_host(row.encode(None, there(vector("heavy", d)), EncodeContext())[1])
    ends = HEADER.size + 4 * -(-d // row.bucket)
    norms, others = (body[HEADER.size : ends].view(torch.int32) for body in (here, same))
    assert (norms - others).abs().max() <= 8  # of those that the host adds up in float32
    assert (here[ends:] != same[ends:]).float().mean() < 1e-3
    assert (here[ends:].int() - same[ends:]).abs().max() <= 1


OTHERS = [
    "dryden",
    "adacomp",
    "sbc",
    "strom",
    "sparse_loco-16",
    "demo",
    "grid-11",
    "block_coordinate",
    "variance",
    "topk-int8",
]


@pytest.mark.parametrize(
    "name",
    [
        "topk-int32",
        "topk-bitmap",
        "random_k-seed",
        "qsgd-max",
        "terngrad",
        "sign",
        "qsgd-elias",
        *OTHERS,
    ],
)
def test_what_is_no_body_is_refused_there_too(name: str) -> None:
    row, d = PORTED[name], 1000
    body = row.encode(None, vector("normal", d), EncodeContext(ratio=0.03))[1]
    with guarded():
        for wrong in (body[:-1], torch.cat([body, body[-1:]]), body[:10]):
            with pytest.raises(PayloadError):
                row.decode(None, there(wrong), d)
        if name == "topk-int32":
            places = body.clone()
            places[-1] = 127
            with pytest.raises(PayloadError, match="ascending numbers below 1000"):
                row.decode(None, there(places), d)


def test_numbers_of_a_few_bits_are_packed_identically() -> None:
    for width in range(1, 33):
        for count in (1, 7, 33, 1000):
            numbers = np.random.default_rng(width).integers(0, 2 ** min(width, 31), count)
            stream = pack(numbers, width)
            with guarded():
                same = pack(there(torch.from_numpy(numbers)), width)
                found = to_host(unpack(same, width, count))
                assert torch.equal(to_host(same), stream)
            assert found.tolist() == numbers.tolist()


@pytest.mark.parametrize("terms", [0, 1, 2, 5])
def test_sums_of_outer_products_are_identical(terms: int) -> None:
    left, right = (
        vector("heavy", 40 * terms).view(terms, 40),
        vector("normal", 70 * terms).view(terms, 70),
    )
    found = torch.ones(40, 70)
    outer_sum(left, right, found)
    with guarded():
        same = there(torch.ones(40, 70))
        outer_sum(there(left), there(right), same)
        assert torch.equal(to_host(same), found)
