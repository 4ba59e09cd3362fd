"""Vectors between a device and the host: nothing is read before its copy is done, and no buffer is
used before.
"""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ashl.learn.staging import LEAST, Staging, filled, in_host
from ashl.runtime.transport import HostPayloads, PeerConnection


class Late:
    """Streams that copy when a thread waits for them: an earlier read finds the old data."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers: list[Tensor] = []
        self.pending: set[int] = set()

    def pinned(self, nbytes: int) -> Tensor:
        self.buffers.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def catch_up(self) -> None:
        self.log.append("catch up")

    def copy(self, to: Tensor, x: Tensor) -> Any:
        places = {to.data_ptr(), x.data_ptr()}
        assert not places & self.pending, "a buffer is used again before its copy is done"
        self.pending |= places
        self.log.append("copy")

        def synchronize() -> None:
            to.copy_(x)
            self.pending.difference_update(places)
            self.log.append("done")

        return SimpleNamespace(synchronize=synchronize)

    def empty(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def hand_over(self, x: Tensor) -> None:
        self.log.append("hand over")


def test_out() -> None:
    streams = Late()
    staging = Staging(streams)
    first, second = torch.arange(5.0), torch.arange(7, dtype=torch.int32)
    with staging.out(first) as here:
        assert torch.equal(here, first)
        assert streams.log == ["catch up", "copy", "done"]
        with staging.out(second) as other:  # while the first is read
            assert torch.equal(other, second)
            assert torch.equal(here, first)
    for _ in range(3):
        with staging.out(first) as here:
            assert torch.equal(here, first)
    assert [len(buffer) for buffer in streams.buffers] == [LEAST, LEAST]


def test_in() -> None:
    streams = Late()
    staging = Staging(streams)
    found = [staging.into(4, lambda buffer, i=i: buffer.fill_(i)) for i in range(3)]
    assert [x.tolist() for x in found] == [[0] * 4, [1] * 4, [2] * 4]
    assert streams.log == ["copy", "done", "hand over"] * 3
    assert len(streams.buffers) == 1


def test_a_buffer_whose_reader_fails_is_not_used_again() -> None:
    streams = Late()
    staging = Staging(streams)
    with pytest.raises(RuntimeError), staging.out(torch.ones(3)):
        raise RuntimeError("the peer has failed")
    with staging.out(torch.ones(3)):
        pass
    assert len(streams.buffers) == 2


def test_a_larger_vector_gets_a_larger_buffer() -> None:
    streams = Late()
    staging = Staging(streams)
    for size in (10, LEAST, 10):
        with staging.out(torch.ones(size)):
            pass
    assert [len(buffer) for buffer in streams.buffers] == [LEAST, 4 * LEAST]


def test_threads_share_it() -> None:
    streams, wrong = Late(), []
    staging = Staging(streams)

    def go(value: float) -> None:
        for _ in range(50):
            with staging.out(torch.full((100,), value)) as here:
                wrong.extend([value] * bool((here != value).any()))

    threads = [threading.Thread(target=go, args=(float(i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(streams.buffers) <= 3


def test_in_the_hosts_memory_nothing_is_copied() -> None:
    body, sent = torch.arange(8, dtype=torch.uint8), []

    def send(tensors: list[Tensor], place: int, tag: int) -> Any:
        sent.extend(tensors)
        return SimpleNamespace(wait=lambda: True)

    def recv(tensors: list[Tensor], place: int, tag: int) -> Any:
        tensors[0].copy_(body)
        return SimpleNamespace(wait=lambda: True)

    with in_host(body) as here:
        assert here.data_ptr() == body.data_ptr()
    pair = cast(
        PeerConnection, SimpleNamespace(group=SimpleNamespace(send=send, recv=recv), group_rank=0)
    )
    HostPayloads().send(pair, HostPayloads().prepare(body))
    assert [x.data_ptr() for x in sent] == [body.data_ptr()]
    assert torch.equal(HostPayloads().recv(pair, 8, "cpu"), body)
    assert filled(2, "cpu", lambda flat: flat.fill_(1)).tolist() == [1, 1]
