"""Send and receive messages between processes over torch.distributed: a sender and a listener
thread for each peer.

Headers and payloads use different tags of gloo, so that another transport may carry the payloads.
Threads are needed because an `irecv` on gloo never reports completion until it is waited for.
Process groups get a timeout that never expires, since a receive that times out closes every pair of
its group; the controller detects late ranks instead.

A vector of floats is moved to the rank's device when it arrives; an encoded payload stays in the
host's memory.

A sender is done with a payload when the operating system has it. Only the receiver can measure how
long the payload was in flight. Therefore each header carries the receipt of the latest payload in
the other direction.

Payloads go by gloo through the host's memory (`HostPayloads`), or from device to device as they are
granted (`GrantedPayloads`). NCCL requires that one thread begins all operations of a device, in one
order. An operation that has begun on one side occupies its device until the other side begins it,
too. Therefore headers always go by gloo, and a payload goes only after a grant. Of two peers the
one with the higher rank grants, so a server grants to its workers. It takes the payloads of all its
connections one at a time, in the order in which they came up. For each it tells the peer by a
header of kind GRANT, and begins. The peer begins too, once its device is free. No ranks wait for
each other in a circle: a rank that has begun waits only for lower ranks that it has granted a
payload, and the lowest rank grants none. `PairwiseGroups` has one communicator per pair, used for
both directions, which never overlap. A peer without a communicator, for example a coordinator, is
reached by gloo. The order holds on gloo as well, where tests check it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.device import HOST, to_device, to_host
from ashl.errors import AshlError
from ashl.runtime import framing
from ashl.runtime.effects import Message, PeerFailedError, Tag

NO_TIMEOUT = timedelta(days=30)


class OutgoingMessage(NamedTuple):
    """A message to send. The header leaves at `header_ns` and the payload at `payload_ns` of the
    rank's clock; `sent` is called with the time when the operating system has both.
    """

    header: torch.Tensor
    payload: Any
    header_ns: int
    payload_ns: int
    sent: Callable[[int], None]


class ReceivedMessage(NamedTuple):
    """A message of a peer."""

    message: Message
    pauses: int  # number of the peer's next pause when it sent the message


class DeliveryReceipt(NamedTuple):
    """A payload of this rank was in flight from `start_ns` to `end_ns`."""

    start_ns: int
    end_ns: int


class PeerConnection:
    """The connection to one peer, in a process group in which the peer has rank `group_rank`: a
    sender and a listener thread. `PeerConnections` holds the settings that all connections share.
    """

    def __init__(
        self,
        connections: PeerConnections,
        peer: int,
        group: dist.ProcessGroup,
        group_rank: int,
        incarnation: int,
    ) -> None:
        self.connections = connections
        self.peer = peer
        self.incarnation = incarnation
        self.group = group
        self.group_rank = group_rank
        self.failed = False  # a failed peer may never receive what was sent to it
        self.outbox: queue.SimpleQueue[OutgoingMessage | None] = queue.SimpleQueue()
        # payloads received from the peer, and nanoseconds that the last one took
        self._received = 0, 0
        self._unacknowledged: deque[int] = deque()  # ns: begin of each payload without a receipt
        self._acknowledged = 0  # payloads with a receipt
        self._lock = threading.Lock()
        self._header_lock = threading.Lock()
        # a sender and a listener thread, in this order
        self._threads = [
            threading.Thread(target=loop, daemon=True, name=f"{loop.__name__}-{peer}")
            for loop in (self._send_loop, self._listen_loop)
        ]
        for thread in self._threads:
            thread.start()

    def mark_failed(self, why: str) -> None:
        """Count the peer as failed: discard all later messages of this connection."""
        with self._lock:
            if not self.failed:
                self.connections.inbox.put(PeerFailedError(self.peer, why, self.incarnation))
            self.failed = True

    def abandon(self) -> None:
        """Discard all later messages of this connection, because another epoch has begun."""
        with self._lock:
            self.failed = True
        self.outbox.put(None)

    def join(self, until: float, listen_only: bool = False) -> None:
        """Wait until the threads have ended, or only the listener thread."""
        for thread in self._threads[1:] if listen_only else self._threads:
            if not self.failed:
                thread.join(max(0.0, until - time.monotonic()))

    def send_header(self, header: torch.Tensor) -> None:
        """Send a header with the numbers that follow it, without another header between them."""
        words = framing.HEADER_WORDS
        parts = [header] if header.numel() == words else [header[:words], header[words:]]
        with self._header_lock:
            for part in parts:
                self.group.send([part], self.group_rank, framing.HEADERS).wait()

    def recv_header(self) -> framing.Header:
        """Receive the next header. Raises FramingError."""
        return framing.decode(
            self._recv_words(framing.HEADER_WORDS), self.connections.max_bytes, self._recv_words
        )

    def _recv_words(self, count: int) -> torch.Tensor:
        raw = torch.empty(count, dtype=torch.int64)
        self.group.recv([raw], self.group_rank, framing.HEADERS).wait()
        return raw

    def _put(self, item: ReceivedMessage | DeliveryReceipt) -> None:
        with self._lock:
            if not self.failed:
                self.connections.inbox.put(item)

    def _send_loop(self) -> None:
        clock = self.connections.clock
        try:
            while (message := self.outbox.get()) is not None:
                self._wait_until(message.header_ns)
                message.header[framing.RECEIPT : framing.HEADER_WORDS] = torch.tensor(
                    self._received
                )
                self.send_header(message.header)
                if message.payload is not None and message.payload.numel():
                    self._unacknowledged.append(clock())
                    self._wait_until(message.payload_ns)
                    self.connections.payload_transport.send(self, message.payload.view(torch.uint8))
                message.sent(clock())
            self.send_header(framing.encode(framing.BYE, ("bye", 0, 0)))
        except RuntimeError as error:
            self.mark_failed(first_line(error))

    def _listen_loop(self) -> None:
        connections, peer = self.connections, self.peer
        try:
            while True:
                header = self.recv_header()
                start = connections.clock()
                if header.kind == framing.BYE:
                    return
                if header.kind == framing.GRANT:
                    connections.payload_transport.handle_grant(self, header.tag[0])
                    continue
                self._note_receipt(*header.receipt)
                payload = None
                if header.dtype is not None:
                    payload = torch.empty(0, dtype=header.dtype)
                    if header.nbytes:
                        device = connections.device if header.dtype.is_floating_point else HOST
                        payload = connections.payload_transport.recv(
                            self, header.nbytes, device
                        ).view(header.dtype)
                        self._wait_until(
                            connections.due(peer, header.nbytes, start, connections.clock())
                        )
                        self._received = self._received[0] + 1, connections.clock() - start
                    if payload.is_floating_point():
                        payload = to_device(payload, connections.device)
                message = Message(peer, header.tag, payload, header.meta, start)
                self._put(ReceivedMessage(message, header.pauses))
        except (RuntimeError, framing.FramingError) as error:
            self.mark_failed(first_line(error))

    def _note_receipt(self, received: int, took_ns: int) -> None:
        """Record that the peer has received this many payloads, the last one within `took_ns`."""
        for _ in range(min(received - self._acknowledged, len(self._unacknowledged))):
            self._acknowledged += 1
            start_ns = self._unacknowledged.popleft()
            if self._acknowledged == received:
                self._put(
                    DeliveryReceipt(start_ns, min(start_ns + took_ns, self.connections.clock()))
                )

    def _wait_until(self, due_ns: int) -> None:
        if (remaining_ns := due_ns - self.connections.clock()) > 0:
            time.sleep(remaining_ns / 1e9)


class PeerConnections:
    """The connections of this rank to its peers.

    Messages are put into `inbox` as ReceivedMessage, failures as a PeerFailedError, and receipts
    as a DeliveryReceipt.
    """

    def __init__(
        self,
        routes: Mapping[int, tuple[dist.ProcessGroup, int, int]],
        inbox: queue.SimpleQueue,
        clock_ns: Callable[[], int],
        due_ns: Callable[[int, int, int, int], int],
        max_bytes: int,
        device: str = HOST,
        payload_transport: HostPayloads | None = None,
    ) -> None:
        """Prepare connections to peers; each is made when the first message is posted or expected.
        `routes`: for each peer the process group that reaches it, its rank there, and its
        incarnation.

        `due_ns(src, nbytes, header, now)` returns when a paced message counts as delivered. gloo
        transports payloads unless `payload_transport` is given.
        """
        self.payload_transport = payload_transport or HostPayloads()
        self.inbox = inbox
        self.clock = clock_ns
        self.due = due_ns
        self.max_bytes = max_bytes
        self.device = device
        self._pairs = dict[int, PeerConnection]()
        self._routes = routes

    def open(self, peer: int) -> None:
        """Connect to a peer, if there is no connection yet."""
        if peer not in self._pairs and peer in self._routes:
            self._pairs[peer] = PeerConnection(self, peer, *self._routes[peer])

    def abandon(self) -> None:
        """Discard all later messages, because another epoch has begun."""
        for connection in self._pairs.values():
            connection.abandon()

    def post(
        self,
        dst: int,
        tag: Tag,
        payload: Any,
        meta: tuple[float, ...],
        times: tuple[int, int],
        sent: Callable,
        pauses: int = 0,
    ) -> None:
        """Queue a message for a peer. Raises AshlError if the payload is longer than the plan
        allows.
        """
        if payload is not None:
            if payload.nbytes > self.max_bytes:
                raise AshlError(
                    f"a message has {payload.nbytes} bytes, but the stages of the plan send at most"
                    f" {self.max_bytes}; make `encoded_nbytes` of the codec an upper bound"
                )
            payload = payload.contiguous()
        self.open(dst)
        header = framing.encode(framing.MESSAGE, tag, payload, meta, pauses)
        self._pairs[dst].outbox.put(OutgoingMessage(header, payload, *times, sent))

    def mark_failed(self, peer: int, why: str) -> None:
        """Count a peer as failed, even if its connection did not break."""
        if peer in self._pairs:
            self._pairs[peer].mark_failed(why)

    def reconnect(
        self, peer: int, incarnation: int, group: dist.ProcessGroup, group_rank: int
    ) -> None:
        """Connect to a peer that rejoined, by this group."""
        self._pairs[peer] = PeerConnection(self, peer, group, group_rank, incarnation)

    def close(self, timeout_s: float) -> None:
        """Send all queued messages, then a goodbye to each peer, and wait for the peers'
        goodbyes.
        """
        until = time.monotonic() + timeout_s
        for connection in self._pairs.values():
            if not self.payload_transport.grants_to(connection.peer):
                connection.outbox.put(None)
        for connection in self._pairs.values():
            if self.payload_transport.grants_to(connection.peer):
                # payloads that the peer still sends have to be granted
                connection.join(until, listen_only=True)
                connection.outbox.put(None)
        for connection in self._pairs.values():
            connection.join(until)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]


# --- transports of payloads

UP, DOWN = "up", "down"  # direction of a granted payload: to or from the rank that grants it
# seconds to wait for a payload that was granted; it is queued before its header leaves, or right
# after
GRANT_WAIT_S = 10.0
UNEXPECTED_GRANT = "received a grant without a payload that waits for one"


class HostPayloads:
    """Payloads through the host's memory, by gloo, with another tag than headers.

    The threads of a connection call it, and each call returns when it is done. Other transports
    extend it.
    """

    def grants_to(self, peer: int) -> bool:
        """Return True if this rank grants the payloads between it and a peer, and so waits for the
        peer's goodbye before it sends its own.
        """
        return False

    def send(self, connection: PeerConnection, payload: Tensor) -> None:
        """Send a payload of uint8 whose header has left."""
        connection.group.send([to_host(payload)], connection.group_rank, framing.PAYLOADS).wait()

    def recv(self, connection: PeerConnection, nbytes: int, device: str) -> Tensor:
        """Receive a payload of uint8 on `device`, after its header."""
        flat = torch.empty(nbytes, dtype=torch.uint8)
        connection.group.recv([flat], connection.group_rank, framing.PAYLOADS).wait()
        return to_device(flat, device)

    def handle_grant(self, connection: PeerConnection, direction: str) -> None:
        """Handle a grant for the next payload of this connection."""
        raise framing.FramingError(UNEXPECTED_GRANT)


class PairwiseGroups:
    """Payloads between two ranks, by a process group of the two."""

    def __init__(self, groups: Mapping[int, tuple[dist.ProcessGroup, int]], device: str) -> None:
        """Set the process group that reaches each peer, and the peer's rank there."""
        self.device = device
        self.groups = groups

    def send(self, peer: int, payload: Tensor) -> None:
        group, group_rank = self.groups[peer]
        self._finish(group.send([payload], group_rank, 0))

    def recv(self, peer: int, flat: Tensor) -> None:
        group, group_rank = self.groups[peer]
        self._finish(group.recv([flat], group_rank, 0))

    def _finish(self, work: dist.Work) -> None:
        work.wait()  # on a device this waits only until the operation is queued there
        if self.device != HOST:
            torch.cuda.current_stream(self.device).synchronize()


class GrantedPayloads(HostPayloads):
    """Payloads from device to device, in the order in which the higher rank of two peers grants
    them.
    """

    def __init__(self, carrier: PairwiseGroups, rank: int) -> None:
        """Set up the transport of a rank. Payloads of peers that the carrier does not reach go by
        gloo.
        """
        self._carrier = carrier
        self._rank = rank
        self._one_at_a_time = ThreadPoolExecutor(1, "payloads")
        # payloads that wait for a grant, by peer
        self._waiting: dict[int, queue.SimpleQueue[tuple[Tensor, Future[None]]]] = {
            peer: queue.SimpleQueue() for peer in carrier.groups
        }

    def grants_to(self, peer: int) -> bool:
        return peer in self._carrier.groups and peer < self._rank

    def send(self, connection: PeerConnection, payload: Tensor) -> None:
        peer = connection.peer
        if peer not in self._carrier.groups:
            return super().send(connection, payload)
        payload = to_device(payload, self._carrier.device)
        if self.grants_to(peer):
            return self._grant(connection, DOWN, lambda: self._carrier.send(peer, payload))
        sent = Future[None]()
        self._waiting[peer].put((payload, sent))
        return sent.result()

    def recv(self, connection: PeerConnection, nbytes: int, device: str) -> Tensor:
        peer = connection.peer
        if peer not in self._carrier.groups:
            return super().recv(connection, nbytes, device)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._carrier.device)
        if self.grants_to(peer):
            self._grant(connection, UP, lambda: self._carrier.recv(peer, flat))
            return flat
        while (grant := connection.recv_header()).kind == framing.GRANT and grant.tag[0] == UP:
            self.handle_grant(connection, UP)
        if grant.kind != framing.GRANT or grant.tag[0] != DOWN:
            raise framing.FramingError("received a header in place of a grant")
        self._run_in_turn(lambda: self._carrier.recv(peer, flat))
        return flat

    def handle_grant(self, connection: PeerConnection, direction: str) -> None:
        peer = connection.peer
        if direction != UP or peer not in self._carrier.groups or self.grants_to(peer):
            raise framing.FramingError(UNEXPECTED_GRANT)
        try:
            payload, sent = self._waiting[peer].get(timeout=GRANT_WAIT_S)
        except queue.Empty as error:
            raise framing.FramingError(UNEXPECTED_GRANT) from error
        try:
            self._run_in_turn(lambda: self._carrier.send(peer, payload))
        except RuntimeError as error:
            sent.set_exception(error)
            raise
        sent.set_result(None)

    def _grant(self, connection: PeerConnection, direction: str, begin: Callable[[], None]) -> None:
        def grant_and_begin() -> None:
            connection.send_header(framing.encode(framing.GRANT, (direction, 0, 0)))
            begin()

        self._run_in_turn(grant_and_begin)

    def _run_in_turn(self, begin: Callable[[], None]) -> None:
        self._one_at_a_time.submit(begin).result()


def make_nccl_payloads(rank: int, pairs: Sequence[tuple[int, int]], device: str) -> GrantedPayloads:
    """Return the NCCL transport: one communicator per pair (lower rank, higher rank), each warmed
    up. All ranks must call it, with the same pairs in ascending order.
    """
    groups = dict[int, tuple[dist.ProcessGroup, int]]()
    carrier = PairwiseGroups(groups, device)
    for pair in pairs:
        group = dist.new_group(list(pair), backend="nccl")
        if rank in pair:
            place = pair.index(rank)
            peer = pair[1 - place]
            groups[peer] = group, 1 - place
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            (carrier.recv if place else carrier.send)(peer, first)
    return GrantedPayloads(carrier, rank)
