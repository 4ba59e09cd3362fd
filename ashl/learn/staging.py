"""How vectors pass between a CUDA device's memory and the host's while the device computes: through
buffers of the host that the device reaches by itself (pinned), which are used again, and on a
stream of their own.

Rule. Out: the side stream waits for what the device has been asked for, copies into a free buffer,
and the thread that asks waits for the copy's event before it reads. In: a buffer is filled, the
side stream copies it, and the thread waits before the vector is handed on. Only then a buffer is
free again; one that a failed reader or writer had is not. What waits is the thread that sends,
receives or reports, never the device.

In the host's memory, and on anything that is not CUDA, a tensor comes and goes by the doors of
`ashl.learn.device`.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ashl.learn.device import to_host

LEAST = 2**16  # bytes of a buffer


class Event(Protocol):
    """Of a copy."""

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


class Streams(Protocol):
    """What is asked of a device."""

    def pinned(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] in the host's memory."""
        ...

    def catch_up(self) -> None:
        """What is copied from here on is as it is once all is done that the device has been asked
        for.
        """
        ...

    def copy(self, to: Tensor, x: Tensor) -> Event:
        """Begin to copy, on the side stream."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, to be copied to."""
        ...

    def hand_over(self, x: Tensor) -> None:
        """x came by the side stream, and is computed with from here on."""
        ...


class Cuda:
    """The streams of a CUDA device."""

    def __init__(self, device: str) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def catch_up(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: Tensor, x: Tensor) -> Event:
        with torch.cuda.stream(self._side):
            to.copy_(x, non_blocking=True)
            return self._side.record_event()

    def empty(self, nbytes: int) -> Tensor:
        with torch.cuda.stream(
            self._side
        ):  # its memory is the side stream's: nothing else may still be writing there
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def hand_over(self, x: Tensor) -> None:
        x.record_stream(torch.cuda.current_stream(self._device))


class Staging:
    """The buffers of one device. Threads may share it."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._lock = streams, threading.Lock()
        self._free: list[Tensor] = []

    @contextmanager
    def out(self, x: Tensor) -> Generator[Tensor]:
        """x in the host's memory, to be read inside, and not kept."""
        with self._buffer(x.nbytes) as buffer:
            here = buffer.view(x.dtype).view(x.shape)
            self._streams.catch_up()
            self._streams.copy(here, x).synchronize()
            yield here

    def into(self, nbytes: int, fill: Callable[[Tensor], object]) -> Tensor:
        """uint8 on the device: what `fill` writes into a buffer of that size."""
        with self._buffer(nbytes) as buffer:
            fill(buffer)
            x = self._streams.empty(nbytes)
            self._streams.copy(x, buffer).synchronize()
        self._streams.hand_over(x)
        return x

    @contextmanager
    def _buffer(self, nbytes: int) -> Generator[Tensor]:
        with self._lock:
            fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= nbytes]
            whole = self._free.pop(fitting[0]) if fitting else None
        if whole is None:
            whole = self._streams.pinned(max(LEAST, 1 << (nbytes - 1).bit_length()))
        yield whole[:nbytes]
        with (
            self._lock
        ):  # not where what was done inside has failed: somebody may still write there
            self._free.append(whole)
            self._free.sort(key=len)


@cache
def staging(device: str) -> Staging:
    """That of a CUDA device, in this process."""
    return Staging(Cuda(device))


@contextmanager
def in_host(x: Tensor) -> Generator[Tensor]:
    """x in the host's memory, itself where it is there, to be read inside."""
    if not x.is_cuda or not x.numel():
        yield to_host(x)
        return
    with staging(str(x.device)).out(x.detach().contiguous()) as here:
        yield here


def filled(nbytes: int, device: str, fill: Callable[[Tensor], object]) -> Tensor:
    """uint8 [nbytes]: what `fill` writes in the host's memory; on the device where that is CUDA."""
    if torch.device(device).type == "cuda":
        return staging(device).into(nbytes, fill)
    flat = torch.empty(nbytes, dtype=torch.uint8)
    fill(flat)
    return flat
