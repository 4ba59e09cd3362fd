"""Point-to-point links of one rank over torch.distributed: a sender and a listener thread for each peer.

Headers and bodies are separate planes (a tag each on gloo), so that another backend can carry the bodies. Threads, and
not polling: on gloo an `irecv` never reports completion until it is waited for. Groups get a timeout that never
strikes, because a receive that times out closes every pair of its group; who is late is found by the monitor instead.

What travels lies in the host's memory; a vector of floats is on the rank's device again when it has come.

A sender has done with a body when the kernel has it; how long that took to arrive, only the receiver knows, by its own
clock. So each header says it of the last body that came the other way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ashl.errors import AshlError
from ashl.learn.device import HOST, to_device, to_host
from ashl.runtime import wire
from ashl.runtime.effects import Message, PeerLostError, Tag

NEVER = timedelta(days=30)
HEADER, BODY = 1, 2  # tags of the two planes


class Parcel(NamedTuple):
    """A message on its way out. The header leaves at `header_ns` and the body at `body_ns` of the rank's clock."""

    header: torch.Tensor
    body: Any
    header_ns: int
    body_ns: int
    sent: Callable[[int], None]


class Delivered(NamedTuple):
    """A body that this rank sent was on its way from here to there."""

    start_ns: int
    end_ns: int


class Links:
    """The peers of this rank. What comes is put into `inbox` as a Message, or as a PeerLostError, and what is learned
    of what was sent as a Delivered."""

    def __init__(
        self,
        peers: tuple[int, ...],
        inbox: queue.SimpleQueue,
        clock_ns: Callable[[], int],
        due_ns: Callable[[int, int, int, int], int],
        max_bytes: int,
        device: str = HOST,
    ) -> None:
        """`due_ns(src, nbytes, header, now)` says when a paced message counts as delivered."""
        self._inbox, self._clock, self._due, self._max_bytes = inbox, clock_ns, due_ns, max_bytes
        self._device = device
        self._came = dict.fromkeys(peers, (0, 0))  # bodies from each peer, and what the last one took
        self._left: dict[int, deque[int]] = {peer: deque() for peer in peers}  # when the others left, still unanswered
        self._known = dict.fromkeys(peers, 0)  # how many of them are answered
        self._out: dict[int, queue.SimpleQueue[Parcel | None]] = {peer: queue.SimpleQueue() for peer in peers}
        self._lost: set[int] = set()  # peers that are gone: what is sent to them may never come back
        self._threads = [
            (peer, threading.Thread(target=loop, args=(peer,), daemon=True, name=f"{loop.__name__}-{peer}"))
            for peer in peers
            for loop in (self._send_loop, self._listen)
        ]
        for _, thread in self._threads:
            thread.start()

    def post(
        self, dst: int, tag: Tag, body: Any, meta: tuple[float, ...], times: tuple[int, int], sent: Callable
    ) -> None:
        if body is not None:
            if body.nbytes > self._max_bytes:
                raise AshlError(
                    f"a message of {body.nbytes} bytes, where the stages of the plan send {self._max_bytes} at most: a "
                    "codec writes more than its payload says"
                )
            body = to_host(body).contiguous()
        self._out[dst].put(Parcel(wire.encode(wire.MESSAGE, tag, body, meta), body, *times, sent))

    def goodbye(self, timeout_s: float) -> None:
        """Send what is still queued, then tell each peer that nothing more will come, and wait to be told the same."""
        for out in self._out.values():
            out.put(None)
        end = time.monotonic() + timeout_s
        for peer, thread in self._threads:
            if peer not in self._lost:
                thread.join(max(0.0, end - time.monotonic()))

    def _lose(self, peer: int, error: Exception) -> None:
        self._lost.add(peer)
        self._inbox.put(PeerLostError(peer, first_line(error)))

    def _send_loop(self, peer: int) -> None:
        try:
            while (parcel := self._out[peer].get()) is not None:
                self._wait_until(parcel.header_ns)
                parcel.header[wire.RECEIPT :] = torch.tensor(self._came[peer])
                dist.send(parcel.header, peer, tag=HEADER)
                if parcel.body is not None and parcel.body.numel():
                    self._left[peer].append(self._clock())
                    self._wait_until(parcel.body_ns)
                    dist.send(parcel.body.view(torch.uint8), peer, tag=BODY)
                parcel.sent(self._clock())
            dist.send(wire.encode(wire.BYE, ("bye", 0, 0)), peer, tag=HEADER)
        except RuntimeError as error:
            self._lose(peer, error)

    def _listen(self, peer: int) -> None:
        try:
            while True:
                raw = torch.empty(wire.HEADER_WORDS, dtype=torch.int64)
                dist.recv(raw, peer, tag=HEADER)
                start = self._clock()
                header = wire.decode(raw, self._max_bytes)
                if header.kind == wire.BYE:
                    return
                self._answered(peer, *header.receipt)
                body = None
                if header.dtype is not None:
                    flat = torch.empty(header.nbytes, dtype=torch.uint8)
                    body = flat.view(header.dtype)
                if header.nbytes:
                    dist.recv(flat, peer, tag=BODY)
                    self._wait_until(self._due(peer, header.nbytes, start, self._clock()))
                    self._came[peer] = self._came[peer][0] + 1, self._clock() - start
                if body is not None and body.is_floating_point():
                    body = to_device(body, self._device)
                self._inbox.put(Message(peer, header.tag, body, header.meta, start))
        except (RuntimeError, wire.WireError) as error:
            self._lose(peer, error)

    def _answered(self, peer: int, bodies: int, took_ns: int) -> None:
        """So many have come there, the last one within that time."""
        for _ in range(min(bodies - self._known[peer], len(self._left[peer]))):
            self._known[peer] += 1
            start_ns = self._left[peer].popleft()
            if self._known[peer] == bodies:
                self._inbox.put(Delivered(start_ns, min(start_ns + took_ns, self._clock())))

    def _wait_until(self, due_ns: int) -> None:
        if (left := due_ns - self._clock()) > 0:
            time.sleep(left / 1e9)


def first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
