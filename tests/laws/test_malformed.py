"""Damaged payloads of every codec: d elements or an error, in little memory."""

import queue
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, Layer, size_of
from ashl.compression.payload import Parts, PayloadError, write_payload
from ashl.compression.wrappers import codec_for_layers
from ashl.errors import AshlError, UsageError
from ashl.runtime import collectives
from ashl.runtime.transport import PeerConnections
from tests.laws.codecs import ROWS, codec, vector

LAYOUT = (Layer("weight", (10, 12)), Layer("bias", (10,)), Layer("conv", (4, 3, 3, 3)))
D = size_of(LAYOUT)
CODECS = {name: row for name, row in ROWS.items() if name != "none"} | {
    "laq": codec("laq", bits=11),
    "lag": codec("laq", bits=None),
    "diana": codec("diana", entropy="elias"),
    "diana-pco": codec("diana", quantizer="qsgd", entropy="pco"),
    "diana-natural": codec("diana", quantizer="natural"),
    "ef21": codec("ef21"),
    "econtrol-whole": codec("econtrol", ratio=1.0),
    "power_sgd": codec("power_sgd"),
    "atomo": codec("atomo", atoms="singular"),
    "sketch_sgd": codec("sketch_sgd"),
    "fetch_sgd": codec("fetch_sgd", recovered_fraction=0.1),
    "gtopk": codec("gtopk"),
    "one_bit": codec("one_bit", per="column"),
    "demo": codec("demo"),
    "adacomp": codec("adacomp"),
    "sparse_loco-layers": codec("sparse_loco", per_layer=True),
    "topk-layers": codec("topk", per_layer=True, indices="golomb", values="int4"),
    "rotated-layers": codec("rotated", per_layer=True, entropy="pco"),
    "uniform-layers": codec("uniform", per_layer=True, entropy="pco"),
}
WORDS = (0, 1, D - 1, D, D + 1, 2**16, 2**31, 2**32 - 1)
KINDS = ("bytes", "word", "header", "noise", "shorter", "longer", "gap")
MOST = 2**24  # bytes: some payloads are read by tables of a fixed size


def damaged(body: np.ndarray, rng: random.Random) -> Tensor:
    """Return the payload with a part changed, removed or added."""
    body, kind = body.copy(), rng.choice(KINDS)
    at = rng.randrange(min(body.size, rng.choice((64, body.size))))
    if kind == "bytes":
        body[at : at + rng.randrange(1, 4)] = rng.randrange(256)
    elif kind == "word":
        piece = body[at : at + 4]
        piece[:] = np.frombuffer(rng.choice(WORDS).to_bytes(4, "little"), np.uint8)[: piece.size]
    elif kind == "header":
        body[4:20] = np.array(rng.choices(WORDS, k=4), "<u4").view(np.uint8)
    elif kind == "noise":
        body[20 + at :] = np.frombuffer(rng.randbytes(max(0, body.size - 20 - at)), np.uint8)
    elif kind == "shorter":
        body = body[:at]
    elif kind == "longer":
        body = np.append(body, np.frombuffer(rng.randbytes(rng.randrange(1, 9)), np.uint8))
    else:
        body = np.delete(body, slice(at, at + rng.randrange(1, 9)))
    return torch.from_numpy(body)


def messages(codec: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The receiver's state before each of three messages, and the message."""
    sender = receiver = None
    for context in range(3):
        sender, body = codec.encode(
            sender, vector("normal", D, context), EncodeContext(round=context)
        )
        yield receiver, body.numpy()
        receiver, _ = codec.decode(receiver, body, D)


def check_add(whole: Any, wire: Tensor, refused: bool) -> None:
    """`add` refuses the same payloads, and writes nothing beyond the vector."""
    room = torch.zeros(D + 2)
    if refused:
        with pytest.raises(PayloadError):
            whole.add(room[1:-1], wire)
        assert not room.any()
    else:
        whole.add(room[1:-1], wire)
        assert room[0] == room[-1] == 0


@pytest.mark.parametrize("name", CODECS)
def test_a_damaged_body_is_refused_or_read(name: str) -> None:
    whole, rng, refused = codec_for_layers(CODECS[name], LAYOUT), random.Random(name), 0
    tracemalloc.start()
    try:
        for receiver, body in messages(whole):
            for _ in range(40 if body.size else 0):
                wire = damaged(body, rng)
                try:
                    if whole.traits.reduces:
                        _, got = whole.reduce(None, [wire, torch.from_numpy(body)], [0.5, 0.5], D)
                    else:
                        _, got = whole.decode(receiver, wire, D)
                    assert got.shape == (D,)
                except PayloadError:
                    refused += 1
                    got = None
                if whole.decodes_alone and not whole.traits.reduces:
                    check_add(whole, wire, refused=got is None)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert refused


@pytest.mark.parametrize("name", ["topk", "topk-layers", "diana", "gtopk", "fetch_sgd"])
@pytest.mark.parametrize("bit", range(8))
def test_the_element_type_is_not_believed(name: str, bit: int) -> None:
    """One flipped bit made float64 of a vector, or rounded it to 16 bits."""
    whole = codec_for_layers({**CODECS, "topk": codec("topk")}[name], LAYOUT)
    body = whole.encode(None, vector("normal", D), EncodeContext())[1].clone()
    body[3] ^= 1 << bit
    with pytest.raises(PayloadError, match="an encoded vector of float32"):
        whole.reduce(None, [body], [1.0], D) if whole.traits.reduces else whole.decode(
            None, body, D
        )


def test_what_its_header_cannot_count_is_not_sent() -> None:
    """A declared size is no memory: one byte that claims to be many."""
    many = torch.zeros(1, dtype=torch.uint8).expand(2**32)
    with pytest.raises(
        UsageError, match="4294967296 bytes of values, but its header counts up to 4294967295"
    ):
        write_payload(1, 100, Parts(3, many))
    with pytest.raises(UsageError, match="a message of 4294967296 elements"):
        write_payload(1, 2**32, Parts(3, many[:4]))


def test_a_gathered_body_that_cannot_be_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory was allocated for any length that a peer announced."""
    announced = torch.full((2,), 2**50)
    monkeypatch.setattr(collectives, "gather_equal", lambda *_: announced)
    with pytest.raises(AshlError, match="but at most 1000 are expected"):
        collectives.all_gather(torch.zeros(10, dtype=torch.uint8), (0, 1), None, 1000)


def test_a_message_longer_than_any_can_be_is_not_sent() -> None:
    links = PeerConnections({}, queue.SimpleQueue(), lambda: 0, lambda *_: 0, 1000)
    with pytest.raises(AshlError, match="make `encoded_nbytes` of the codec an upper bound"):
        links.post(1, ("push", 0, 0), torch.zeros(1001, dtype=torch.uint8), (), (0, 0), print)
