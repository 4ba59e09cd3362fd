"""Send and receive messages between processes over torch.distributed: a sender and a listener
thread for each peer.

Headers and payloads use different tags of gloo, so that another transport may carry the payloads.
Threads are needed because an `irecv` on gloo never reports completion until it is waited for.
Process groups get a timeout that never expires, since a receive that times out closes every pair of
its group; the monitor detects late ranks instead.

A vector of floats is moved to the rank's device when it arrives; an encoded payload stays in the
host's memory.

A sender is done with a payload when the operating system has it. Only the receiver can measure how
long the payload was in flight. Therefore each header carries the receipt of the latest payload in
the other direction.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.learn.device import HOST, to_device
from ashl.learn.staging import filled, in_host
from ashl.runtime import framing
from ashl.runtime.effects import Message, PeerFailedError, Tag

NEVER = timedelta(days=30)


class OutgoingMessage(NamedTuple):
    """A message on its way out. The header leaves at `header_ns` and the body at `body_ns` of the
    rank's clock.
    """

    header: torch.Tensor
    body: Any
    header_ns: int
    body_ns: int
    sent: Callable[[int], None]


class Delivered(NamedTuple):
    """A body that this rank sent was on its way from here to there."""

    start_ns: int
    end_ns: int


class PeerConnection:
    """The link to one peer, over a group in which the peer has this place: a sender and a listener
    thread. Where what comes is to be taken for something, and when, `PeerConnections` says.
    """

    def __init__(
        self,
        links: PeerConnections,
        peer: int,
        group: dist.ProcessGroup,
        place: int,
        incarnation: int,
    ) -> None:
        self.links, self.peer, self.incarnation, self.group, self.place = (
            links,
            peer,
            incarnation,
            group,
            place,
        )
        self.lost = False  # what is sent there may never come back
        self.out: queue.SimpleQueue[OutgoingMessage | None] = queue.SimpleQueue()
        self._came = 0, 0  # bodies from there, and what the last one took
        self._left: deque[int] = deque()  # when the others left, still unanswered
        self._known = 0  # how many of them are answered
        self._lock, self._saying = threading.Lock(), threading.Lock()
        self._threads = [
            threading.Thread(target=loop, daemon=True, name=f"{loop.__name__}-{peer}")
            for loop in (self._send_loop, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def mark_failed(self, why: str) -> None:
        """The peer is gone: from here on nothing comes of this link, whatever still arrives."""
        with self._lock:
            if not self.lost:
                self.links.inbox.put(PeerFailedError(self.peer, why, self.incarnation))
            self.lost = True

    def join(self, until: float, heard: bool = False) -> None:
        """Wait until all is said; or heard."""
        for thread in self._threads[1:] if heard else self._threads:
            if not self.lost:
                thread.join(max(0.0, until - time.monotonic()))

    def send_header(self, header: torch.Tensor) -> None:
        """Send a header with what follows it, one at a time."""
        words = framing.HEADER_WORDS
        parts = [header] if header.numel() == words else [header[:words], header[words:]]
        with self._saying:
            for part in parts:
                self.group.send([part], self.place, framing.HEADERS).wait()

    def recv_header(self) -> framing.Header:
        """The next one that comes. Raises WireError."""
        return framing.decode(
            self._recv_words(framing.HEADER_WORDS), self.links.max_bytes, self._recv_words
        )

    def _recv_words(self, count: int) -> torch.Tensor:
        raw = torch.empty(count, dtype=torch.int64)
        self.group.recv([raw], self.place, framing.HEADERS).wait()
        return raw

    def _put(self, item: Message | Delivered) -> None:
        with self._lock:
            if not self.lost:
                self.links.inbox.put(item)

    def _send_loop(self) -> None:
        clock = self.links.clock
        try:
            while (parcel := self.out.get()) is not None:
                self._wait_until(parcel.header_ns)
                parcel.header[framing.RECEIPT : framing.HEADER_WORDS] = torch.tensor(self._came)
                self.send_header(parcel.header)
                if parcel.body is not None and parcel.body.numel():
                    self._left.append(clock())
                    self._wait_until(parcel.body_ns)
                    self.links.bodies.send(self, parcel.body.view(torch.uint8))
                parcel.sent(clock())
            self.send_header(framing.encode(framing.BYE, ("bye", 0, 0)))
        except RuntimeError as error:
            self.mark_failed(first_line(error))

    def _listen(self) -> None:
        links, peer = self.links, self.peer
        try:
            while True:
                header = self.recv_header()
                start = links.clock()
                if header.kind == framing.BYE:
                    return
                if header.kind == framing.GRANT:
                    links.bodies.granted(self, header.tag[0])
                    continue
                self._note_receipt(*header.receipt)
                body = None
                if header.dtype is not None:
                    body = torch.empty(0, dtype=header.dtype)
                    if header.nbytes:
                        device = links.device if header.dtype.is_floating_point else HOST
                        body = links.bodies.recv(self, header.nbytes, device).view(header.dtype)
                        self._wait_until(links.due(peer, header.nbytes, start, links.clock()))
                        self._came = self._came[0] + 1, links.clock() - start
                    body = to_device(body, links.device) if body.is_floating_point() else body
                self._put(Message(peer, header.tag, body, header.meta, start))
        except (RuntimeError, framing.FramingError) as error:
            self.mark_failed(first_line(error))

    def _note_receipt(self, bodies: int, took_ns: int) -> None:
        """So many have come there, the last one within that time."""
        for _ in range(min(bodies - self._known, len(self._left))):
            self._known += 1
            start_ns = self._left.popleft()
            if self._known == bodies:
                self._put(Delivered(start_ns, min(start_ns + took_ns, self.links.clock())))

    def _wait_until(self, due_ns: int) -> None:
        if (left := due_ns - self.links.clock()) > 0:
            time.sleep(left / 1e9)


class PeerConnections:
    """The peers of this rank. What comes is put into `inbox` as a Message, or as a PeerLostError,
    and what is learned of what was sent as a Delivered.
    """

    def __init__(
        self,
        pairs: Mapping[int, tuple[dist.ProcessGroup, int, int]],
        inbox: queue.SimpleQueue,
        clock_ns: Callable[[], int],
        due_ns: Callable[[int, int, int, int], int],
        max_bytes: int,
        device: str = HOST,
        bodies: PayloadTransport | None = None,
    ) -> None:
        """`pairs`: by which group each peer is reached, its place there, and its life. `due_ns(src,
        nbytes, header, now)` says when a paced message counts as delivered. `bodies` are carried by
        gloo unless something else is given.
        """
        self.bodies = bodies or HostPayloads()
        self.inbox, self.clock, self.due, self.max_bytes, self.device = (
            inbox,
            clock_ns,
            due_ns,
            max_bytes,
            device,
        )
        self._pairs = {peer: PeerConnection(self, peer, *way) for peer, way in pairs.items()}

    def post(
        self,
        dst: int,
        tag: Tag,
        body: Any,
        meta: tuple[float, ...],
        times: tuple[int, int],
        sent: Callable,
    ) -> None:
        if body is not None:
            if body.nbytes > self.max_bytes:
                raise AshlError(
                    f"a message of {body.nbytes} bytes, where the stages of the plan send"
                    f" {self.max_bytes} at most: a codec writes more than its payload says"
                )
            body = self.bodies.placed(body).contiguous()
        if dst in self._pairs:  # else it was lost before this rank came
            self._pairs[dst].out.put(
                OutgoingMessage(
                    framing.encode(framing.MESSAGE, tag, body, meta), body, *times, sent
                )
            )

    def mark_failed(self, peer: int, why: str) -> None:
        """The peer counts as gone, whether or not its connection broke."""
        if peer in self._pairs:
            self._pairs[peer].mark_failed(why)

    def reconnect(
        self,
        peer: int,
        incarnation: int,
        group: dist.ProcessGroup,
        place: int,
        back: Callable[[], object],
    ) -> None:
        """The peer has come anew, and is reached by this group. Into the inbox go its loss, if it
        is not known, then `back`, then what it says.
        """
        self.mark_failed(peer, "it has come anew")
        self.inbox.put(back)
        self._pairs[peer] = PeerConnection(self, peer, group, place, incarnation)

    def close(self, timeout_s: float) -> None:
        """Send what is still queued, then send each peer that nothing more will come, and wait for
        the same from it.
        """
        until = time.monotonic() + timeout_s
        for pair in self._pairs.values() if self.bodies.last_to_leave else ():
            pair.join(until, heard=True)  # what they still send has to be granted
        for pair in self._pairs.values():
            pair.out.put(None)
        for pair in self._pairs.values():
            pair.join(until)


def first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]


# --- what carries the payloads of messages
# ----------------------------------------------------------------------------  How bodies get from
# one rank to another: by gloo through the host's memory, or from device to device as a server
# grants them.  NCCL wants all operations of a device begun by one thread and in one order, and what
# has begun on one side spins on its device until the other side begins it, too. So with
# `GrantedPayloads` headers go by gloo, as ever, and a body goes once it is granted: the server
# takes what it is to receive and what it has to send in the order in which that came up, tells the
# worker by a header of kind GRANT, and both begin this one body; the next is granted when it is
# through. A worker has the server for its only peer and at most one granted body, the server one
# under way. So nobody waits for what is not begun on both sides, and nothing spins for longer than
# a header takes.  `PairwiseGroups` has one communicator for each worker, for both directions, which
# never overlap. That they are begun
# in one order, by one thread, and one at a time, holds on gloo as well, where tests look at it.


UP, DOWN = "up", "down"  # which way a granted body goes
AT_ONCE_S = 10.0  # a body is asked for before its header leaves, or right after
UNASKED = "a grant that nobody asked for"


class PayloadTransport(Protocol):
    """What a pair's threads ask of what carries its bodies; each call returns when it is done."""

    @property
    def last_to_leave(self) -> bool:
        """Whether goodbyes of the others are waited for before this rank says its own."""
        ...

    def placed(self, body: Tensor) -> Tensor:
        """Where it can be sent from."""
        ...

    def send(self, pair: PeerConnection, body: Tensor) -> None:
        """uint8, whose header has left."""
        ...

    def recv(self, pair: PeerConnection, nbytes: int, device: str) -> Tensor:
        """uint8, whose header has come, and which is to lie there."""
        ...

    def granted(self, pair: PeerConnection, way: str) -> None:
        """A header says that this pair's next body is to go."""
        ...


class HostPayloads:
    """By gloo, on the plane beside the headers."""

    last_to_leave = False

    def placed(self, body: Tensor) -> Tensor:
        return body  # the sender's thread brings it to the host

    def send(self, pair: PeerConnection, body: Tensor) -> None:
        with in_host(body) as flat:
            pair.group.send([flat], pair.place, framing.BODIES).wait()

    def recv(self, pair: PeerConnection, nbytes: int, device: str) -> Tensor:
        return filled(
            nbytes, device, lambda flat: pair.group.recv([flat], pair.place, framing.BODIES).wait()
        )

    def granted(self, pair: PeerConnection, way: str) -> None:
        raise framing.FramingError(UNASKED)


class PairwiseGroups:
    """Bodies between a server and each of its workers, by a group of the two."""

    def __init__(self, groups: Mapping[int, tuple[dist.ProcessGroup, int]], device: str) -> None:
        """By which group each peer is reached, and its place there."""
        self.device, self._groups = device, groups

    def send(self, peer: int, body: Tensor) -> None:
        group, place = self._groups[peer]
        self._through(group.send([body], place, 0))

    def recv(self, peer: int, flat: Tensor) -> None:
        group, place = self._groups[peer]
        self._through(group.recv([flat], place, 0))

    def _through(self, work: dist.Work) -> None:
        work.wait()  # on a device: until it is queued there
        if self.device != HOST:
            torch.cuda.current_stream(self.device).synchronize()


class GrantedPayloads:
    """From device to device, as the server grants it."""

    def __init__(self, carrier: PairwiseGroups, grants: bool) -> None:
        """`grants`: this rank is the server."""
        self.last_to_leave = grants
        self._carrier, self._grants = carrier, grants
        self._turns = ThreadPoolExecutor(1, "bodies")
        self._asked: queue.SimpleQueue[tuple[Tensor, Future[None]]] = (
            queue.SimpleQueue()
        )  # what waits for a grant

    def placed(self, body: Tensor) -> Tensor:
        return to_device(body, self._carrier.device)

    def send(self, pair: PeerConnection, body: Tensor) -> None:
        if self._grants:
            return self._grant(pair, DOWN, lambda: self._carrier.send(pair.peer, body))
        through = Future[None]()
        self._asked.put((body, through))
        return through.result()

    def recv(self, pair: PeerConnection, nbytes: int, device: str) -> Tensor:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._carrier.device)
        if self._grants:
            self._grant(pair, UP, lambda: self._carrier.recv(pair.peer, flat))
            return flat
        while (grant := pair.recv_header()).kind == framing.GRANT and grant.tag[0] == UP:
            self.granted(pair, UP)
        if grant.kind != framing.GRANT or grant.tag[0] != DOWN:
            raise framing.FramingError("a header came where a body was to be granted")
        self._turn(lambda: self._carrier.recv(pair.peer, flat))
        return flat

    def granted(self, pair: PeerConnection, way: str) -> None:
        if way != UP or self._grants:
            raise framing.FramingError(UNASKED)
        try:
            body, through = self._asked.get(timeout=AT_ONCE_S)
        except queue.Empty as error:
            raise framing.FramingError(UNASKED) from error
        try:
            self._turn(lambda: self._carrier.send(pair.peer, body))
        except RuntimeError as error:
            through.set_exception(error)
            raise
        through.set_result(None)

    def _grant(self, pair: PeerConnection, way: str, begin: Callable[[], None]) -> None:
        def granting() -> None:
            pair.send_header(framing.encode(framing.GRANT, (way, 0, 0)))
            begin()

        self._turn(granting)

    def _turn(self, begin: Callable[[], None]) -> None:
        self._turns.submit(begin).result()


def make_nccl_payloads(
    rank: int, workers: Sequence[int], server: int, device: str
) -> GrantedPayloads:
    """To be made by all ranks alike: a communicator for each worker, each warmed up, in
    rank order.
    """
    groups = dict[int, tuple[dist.ProcessGroup, int]]()
    carrier = PairwiseGroups(groups, device)
    for worker in workers:
        group = dist.new_group([worker, server], backend="nccl")
        if rank in (worker, server):
            peer, place = (server, 1) if rank == worker else (worker, 0)
            groups[peer] = group, place
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            (carrier.send if rank == worker else carrier.recv)(peer, first)
    return GrantedPayloads(carrier, rank == server)
