"""How bodies get from one rank to another: by gloo through the host's memory, or from device to device as a server
grants them.

NCCL wants all operations of a device begun by one thread and in one order, and what has begun on one side spins on its
device until the other side begins it, too. So with `Granted` headers go by gloo, as ever, and a body goes once it is
granted: the server takes what it is to receive and what it has to send in the order in which that came up, tells the
worker by a header of kind GRANT, and both begin this one body; the next is granted when it is through. A worker has the
server for its only peer and at most one granted body, the server one under way. So nobody waits for what is not begun
on both sides, and nothing spins for longer than a header takes.

A communicator for each worker carries both ways, which never overlap: `Carrier`. That they are begun in one order, by
one thread, and one at a time, holds on gloo as well, where tests look at it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.learn.device import HOST, to_device
from ashl.learn.staging import filled, in_host
from ashl.runtime import wire

if TYPE_CHECKING:
    from ashl.runtime.plane import Pair

UP, DOWN = "up", "down"  # which way a granted body goes
AT_ONCE_S = 10.0  # a body is asked for before its header leaves, or right after
UNASKED = "a grant that nobody asked for"


class Bodies(Protocol):
    """What a pair's threads ask of what carries its bodies; each call returns when it is done."""

    @property
    def last_to_leave(self) -> bool:
        """Whether goodbyes of the others are waited for before this rank says its own."""
        ...

    def placed(self, body: Tensor) -> Tensor:
        """Where it can be sent from."""
        ...

    def send(self, pair: Pair, body: Tensor) -> None:
        """uint8, whose header has left."""
        ...

    def recv(self, pair: Pair, nbytes: int, device: str) -> Tensor:
        """uint8, whose header has come, and which is to lie there."""
        ...

    def granted(self, pair: Pair, way: str) -> None:
        """A header says that this pair's next body is to go."""
        ...


class Direct:
    """By gloo, on the plane beside the headers."""

    last_to_leave = False

    def placed(self, body: Tensor) -> Tensor:
        return body  # the sender's thread brings it to the host

    def send(self, pair: Pair, body: Tensor) -> None:
        with in_host(body) as flat:
            pair.group.send([flat], pair.place, wire.BODIES).wait()

    def recv(self, pair: Pair, nbytes: int, device: str) -> Tensor:
        return filled(nbytes, device, lambda flat: pair.group.recv([flat], pair.place, wire.BODIES).wait())

    def granted(self, pair: Pair, way: str) -> None:
        raise wire.WireError(UNASKED)


class Carrier:
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


class Granted:
    """From device to device, as the server grants it."""

    def __init__(self, carrier: Carrier, grants: bool) -> None:
        """`grants`: this rank is the server."""
        self.last_to_leave = grants
        self._carrier, self._grants = carrier, grants
        self._turns = ThreadPoolExecutor(1, "bodies")
        self._asked: queue.SimpleQueue[tuple[Tensor, Future[None]]] = queue.SimpleQueue()  # what waits for a grant

    def placed(self, body: Tensor) -> Tensor:
        return to_device(body, self._carrier.device)

    def send(self, pair: Pair, body: Tensor) -> None:
        if self._grants:
            return self._grant(pair, DOWN, lambda: self._carrier.send(pair.peer, body))
        through = Future[None]()
        self._asked.put((body, through))
        return through.result()

    def recv(self, pair: Pair, nbytes: int, device: str) -> Tensor:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._carrier.device)
        if self._grants:
            self._grant(pair, UP, lambda: self._carrier.recv(pair.peer, flat))
            return flat
        while (grant := pair.header()).kind == wire.GRANT and grant.tag[0] == UP:
            self.granted(pair, UP)
        if grant.kind != wire.GRANT or grant.tag[0] != DOWN:
            raise wire.WireError("a header came where a body was to be granted")
        self._turn(lambda: self._carrier.recv(pair.peer, flat))
        return flat

    def granted(self, pair: Pair, way: str) -> None:
        if way != UP or self._grants:
            raise wire.WireError(UNASKED)
        try:
            body, through = self._asked.get(timeout=AT_ONCE_S)
        except queue.Empty as error:
            raise wire.WireError(UNASKED) from error
        try:
            self._turn(lambda: self._carrier.send(pair.peer, body))
        except RuntimeError as error:
            through.set_exception(error)
            raise
        through.set_result(None)

    def _grant(self, pair: Pair, way: str, begin: Callable[[], None]) -> None:
        def granting() -> None:
            pair.say(wire.encode(wire.GRANT, (way, 0, 0)))
            begin()

        self._turn(granting)

    def _turn(self, begin: Callable[[], None]) -> None:
        self._turns.submit(begin).result()


def granted_by_nccl(rank: int, workers: Sequence[int], server: int, device: str) -> Granted:
    """To be made by all ranks alike: a communicator for each worker, each warmed up, in rank order."""
    groups = dict[int, tuple[dist.ProcessGroup, int]]()
    carrier = Carrier(groups, device)
    for worker in workers:
        group = dist.new_group([worker, server], backend="nccl")
        if rank in (worker, server):
            peer, place = (server, 1) if rank == worker else (worker, 0)
            groups[peer] = group, place
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            (carrier.send if rank == worker else carrier.recv)(peer, first)
    return Granted(carrier, rank == server)
