"""Copy vectors between CUDA memory and host memory while the device computes.

Copies use a stream of their own and pinned host buffers, which the device accesses directly.
Buffers are used again.

Rule: to the host, the side stream waits for the work that the device has received and copies into a
free buffer. The thread waits for the copy's event before it reads. To the device, a buffer is
filled, the side stream copies it, and the thread waits before it returns the vector. Only then the
buffer is free again; the buffer of a failed reader or writer is not used again. The thread that
sends, receives or reports waits, never the device.

Limits: on devices other than CUDA, tensors are moved by `ashl.device`.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ashl.device import to_host

LEAST = 2**16  # least bytes of a buffer


class Event(Protocol):
    """The completion of a copy."""

    def synchronize(self) -> None:
        """Wait until the copy is complete."""
        ...


class Streams(Protocol):
    """The operations of a device that staging uses."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return a pinned buffer in host memory, uint8 [nbytes]."""
        ...

    def catch_up(self) -> None:
        """Make later copies wait for the work that the device has received so far."""
        ...

    def copy(self, to: Tensor, x: Tensor) -> Event:
        """Start to copy on the side stream."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """Return memory on the device to copy to, uint8 [nbytes]."""
        ...

    def hand_over(self, x: Tensor) -> None:
        """Make `x`, copied by the side stream, available to the computing stream."""
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
        # The memory belongs to the side stream, so that no other kernel still writes to it.
        with torch.cuda.stream(self._side):
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
        """Yield x in host memory; it may be read inside only."""
        with self._buffer(x.nbytes) as buffer:
            here = buffer.view(x.dtype).view(x.shape)
            self._streams.catch_up()
            self._streams.copy(here, x).synchronize()
            yield here

    def into(self, nbytes: int, fill: Callable[[Tensor], object]) -> Tensor:
        """Return uint8 [nbytes] on the device, with the content that `fill` writes into a
        buffer.
        """
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
        # A buffer whose user failed stays out: a thread may still write to it.
        with self._lock:
            self._free.append(whole)
            self._free.sort(key=len)


@cache
def staging(device: str) -> Staging:
    """Return the staging buffers of a CUDA device in this process."""
    return Staging(Cuda(device))


@contextmanager
def in_host(x: Tensor) -> Generator[Tensor]:
    """Yield x in host memory, itself if it is there; it may be read inside only."""
    if not x.is_cuda or not x.numel():
        yield to_host(x)
        return
    with staging(str(x.device)).out(x.detach().contiguous()) as here:
        yield here


def filled(nbytes: int, device: str, fill: Callable[[Tensor], object]) -> Tensor:
    """Return uint8 [nbytes] with the content that `fill` writes in host memory.

    The result is on the device if that is CUDA.
    """
    if torch.device(device).type == "cuda":
        return staging(device).into(nbytes, fill)
    flat = torch.empty(nbytes, dtype=torch.uint8)
    fill(flat)
    return flat
