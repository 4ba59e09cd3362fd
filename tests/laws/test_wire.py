"""The header of a message: decoding returns the encoded values, and other bytes raise WireError
before memory is allocated.
"""

import queue
import struct
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ashl.runtime import framing
from ashl.runtime.transport import PeerConnections, ReceivedMessage
from ashl.size_only import SizeOnly

MAX_BYTES = 10_000
INT64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=16)
tags = st.tuples(names, st.integers(0, 2**31 - 1), st.integers(0, 2**62 - 1))
metas = st.lists(st.floats(), max_size=2 * framing.NUMBERS_IN_HEADER).map(tuple)
bodies = st.one_of(
    st.none(),
    st.builds(
        lambda dtype, n: torch.zeros(n, dtype=dtype),
        st.sampled_from(framing.DTYPES),
        st.integers(0, MAX_BYTES // 8),
    ),
)


def read(raw: torch.Tensor) -> framing.Header:
    """Decode a header and the bytes after it."""

    def rest(count: int) -> torch.Tensor:
        assert 0 < count <= framing.MAX_NUMBERS - framing.NUMBERS_IN_HEADER, (
            "checked before memory is taken"
        )
        return torch.cat(
            [raw[framing.HEADER_WORDS :], torch.zeros(framing.MAX_NUMBERS, dtype=torch.int64)]
        )[:count]

    return framing.decode(raw[: framing.HEADER_WORDS], MAX_BYTES, rest)


def bits(meta: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(meta)}d", *meta)


@given(st.sampled_from([framing.MESSAGE, framing.BYE]), tags, bodies, metas)
def test_round_trip(kind, tag, body, meta) -> None:
    raw = framing.encode(kind, tag, body, meta)
    assert (raw.dtype, tuple(raw.shape)) == (
        torch.int64,
        (framing.HEADER_WORDS + max(0, len(meta) - framing.NUMBERS_IN_HEADER),),
    )
    header = read(raw)
    assert header[:3] == (kind, tag, 0 if body is None else body.nbytes)
    assert header.dtype == (None if body is None else body.dtype), "an empty body is a body"
    assert bits(header.meta) == bits(meta)  # also of NaNs


@given(
    st.lists(INT64, min_size=framing.HEADER_WORDS, max_size=framing.HEADER_WORDS).filter(
        lambda words: words[0] != framing.MAGIC
    )
)
def test_noise_is_refused(words) -> None:
    with pytest.raises(framing.FramingError):
        read(torch.tensor(words))


@given(
    tags,
    bodies,
    metas,
    st.dictionaries(st.integers(1, framing.HEADER_WORDS - 1), INT64, max_size=4),
)
def test_a_header_with_words_replaced_is_refused_or_within_bounds(
    tag, body, meta, replaced
) -> None:
    raw = framing.encode(framing.MESSAGE, tag, body, meta)
    for index, word in replaced.items():
        raw[index] = word
    try:
        header = read(raw)
    except framing.FramingError:
        return
    name, stage, iteration = header.tag
    assert header.kind in (framing.MESSAGE, framing.BYE)
    assert 0 <= header.nbytes <= MAX_BYTES
    assert header.nbytes % header.dtype.itemsize == 0 if header.dtype else header.nbytes == 0
    assert len(name) <= 16
    assert name.isascii()
    assert min(stage, iteration) >= 0
    assert len(header.meta) <= framing.MAX_NUMBERS


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (0, 0),
        (0, framing.MAGIC + 1),  # another version
        (1, -1),  # a name that is not ASCII
        (3, -1),
        (3, 2**31),
        (4, -1),
        (4, 2**62),
        (5, 3),
        (5, -1),
        (6, -4),
        (6, 3),  # not a whole number of float32
        (6, MAX_BYTES + 4),
        (6, 2**62),  # would be an allocation of exabytes
        (7, -1),
        (7, len(framing.DTYPES)),
        (8, -1),
        (9, -1),
        (9, framing.MAX_NUMBERS + 1),
        (9, 2**40),
        (framing.RECEIPT, -1),
        (framing.RECEIPT + 1, -1),
    ],
)
def test_each_word_is_checked(index: int, word: int) -> None:
    raw = framing.encode(framing.MESSAGE, ("push", 0, 0), torch.zeros(8), (1.0,))
    raw[index] = word
    with pytest.raises(framing.FramingError):
        read(raw)


def test_what_does_not_fit_is_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        framing.encode(framing.MESSAGE, ("a-name-of-17-char", 0, 0))
    with pytest.raises(ValueError, match="does not fit"):
        framing.encode(framing.MESSAGE, ("push", 0, 0), meta=(0.0,) * (framing.MAX_NUMBERS + 1))


class Pipe:
    """A group of two in one process, as strict about lengths as gloo, for the sender and for the
    receiver.
    """

    def __init__(self) -> None:
        self.lines = {
            plane: queue.SimpleQueue[torch.Tensor]()
            for plane in (framing.HEADERS, framing.PAYLOADS)
        }

    def send(self, tensors: list[torch.Tensor], _place: int, plane: int) -> Any:
        self.lines[plane].put(tensors[0].clone())
        return self

    def recv(self, tensors: list[torch.Tensor], _place: int, plane: int) -> Any:
        came = self.lines[plane].get(timeout=10)
        assert came.shape == tensors[0].shape
        tensors[0].copy_(came)
        return self

    def wait(self) -> None:
        pass


def test_more_numbers_than_a_header_holds_arrive_and_what_comes_after_them_too() -> None:
    """An answer after a redistribution of data names the failed workers: of 300 in more numbers
    than a header has.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    links = PeerConnections(
        {1: (cast("Any", Pipe()), 1, 0)}, inbox, lambda: 0, lambda *_: 0, MAX_BYTES
    )  # it receives its own message
    body, metas = (
        torch.arange(5.0),
        [
            tuple(map(float, range(n)))
            for n in (framing.NUMBERS_IN_HEADER, framing.NUMBERS_IN_HEADER + 1, 400, 2)
        ],
    )
    for round_, meta in enumerate(metas):
        links.post(1, ("pull", 0, round_), body, meta, (0, 0), lambda _: None)
    came = [
        next(item for item in iter(inbox.get, None) if isinstance(item, ReceivedMessage)).message
        for _ in metas
    ]
    assert [(message.tag[2], message.meta) for message in came] == list(enumerate(metas))
    assert all(torch.equal(message.payload, body) for message in came)
    links.close(5.0)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_size_alone_is_kept_through_arithmetic(nbytes: int, other: int) -> None:
    size_only, factor = SizeOnly(nbytes), 0.5
    for result in (
        size_only + SizeOnly(other),
        size_only - SizeOnly(other),
        size_only * factor,
        factor * size_only,
        sum([size_only]),
    ):
        assert result.nbytes == nbytes
