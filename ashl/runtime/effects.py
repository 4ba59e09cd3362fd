"""Effects: the closed set of operations that an algorithm may await.

An algorithm is a coroutine. It yields an effect; a kernel performs it, in virtual time or on a real
process, and sends the result back. Times are on the experiment's clock. Effects are named tuples,
so that a simulator can perform hundreds of thousands per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

ANY = -1  # source of a receive that accepts a message from any rank
Tag = tuple[str, int, int]  # (name, stage, iteration)
# tag of the message that the kernel delivers to a rank when a peer of it has failed
PEER_FAILED: Tag = ("failed", 0, 0)
JOIN: Tag = ("join", 0, 0)  # tag of the message by which a worker asks to join or rejoin


class Message(NamedTuple):
    """The result of a receive."""

    src: int  # rank of the sender
    tag: Tag
    payload: Any  # a flat tensor, or None
    meta: tuple[float, ...]  # the numbers beside the payload
    # when the transfer began; a receiver that blocked before that instant was waiting
    start_ns: int


class Encoding(NamedTuple):
    """The encoding of each part that a `Compute` emits: `fn(k, tensor)`, for example compression,
    runs before the compute continues.

    `work[k]`: units of encoding work done after part k, cumulative over the parts.
    """

    fn: Callable[[int, Any], Any]
    work: tuple[float, ...]


class Compute(NamedTuple):
    """Run `fn()` and return its result. A rank runs one computation at a time, in the order in
    which its tasks ask.

    `kind` is "compute" (gradients and steps), "compress", "decode" or "apply" (merging at a
    server). `work` is in samples for "compute", else a multiple of the cost of that kind.

    With `parts` the function is `fn(emit)` and calls `emit(k, tensor)` once per part. When the
    part's share of the cost has passed, the rank receives the tensor as a message to itself with
    the part's tag, at no cost. With `encoding` the rank receives the encoded tensor, later by the
    cost of encoding.

    With `needs` the function is `fn(emit, receive_need)`. The computation pauses before the share
    of a need until a message with the need's tag has arrived, from any rank; `receive_need(k)`
    returns the payload of the k-th. All needs come before the first part.
    """

    fn: Callable[..., Any]
    work: float
    kind: str = "compute"
    # for each part: the share of the cost after which it is ready, and its tag
    parts: tuple[tuple[float, Tag], ...] = ()
    encoding: Encoding | None = None
    # for each need: the share of the cost that can run without it, and its tag
    needs: tuple[tuple[float, Tag], ...] = ()

    @property
    def time_class(self) -> str:
        """Return the class of time to which it is attributed."""
        return "compress" if self.kind in ("compress", "decode") else "compute"

    def __await__(self) -> Generator[Any, Any, Any]:
        answer = yield self
        if self.needs and isinstance(answer, Generator):  # the kernel performs it in steps
            return (yield from answer)
        return answer


class Send(NamedTuple):
    """Post `payload` (a flat tensor that no task changes any more, or None) and a few numbers;
    return at once. A send to the rank itself costs nothing.
    """

    dst: int
    tag: Tag
    payload: Any = None
    meta: tuple[float, ...] = ()

    def __await__(self) -> Generator[Send, Any, None]:
        return (yield self)


class Recv(NamedTuple):
    """Receive the next message with one of `tags`; return None if the clock reaches `before_s`
    first.

    The failure of a peer is a message with the tag PEER_FAILED. It arrives after all messages of
    that peer, and its `meta` holds the number of earlier failures of the peer.
    Raises: PeerFailedError if PEER_FAILED is not among the tags and the peer that failed is `src`,
    or `src` is ANY.
    """

    tags: tuple[Tag, ...]
    src: int = ANY
    before_s: float = math.inf

    def __await__(self) -> Generator[Recv, Any, Any]:
        message = yield self
        if message.__class__ is PeerFailedError:
            raise message
        return message


class Discard(NamedTuple):
    """Delete messages with these tags, both arrived ones and future ones, until the next pause."""

    tags: tuple[Tag, ...]

    def __await__(self) -> Generator[Discard, Any, None]:
        return (yield self)


class AllReduce(NamedTuple):
    """Combine the tensors of all members of `group` (sorted ranks), and return the result to each.

    `op` is "sum", in rank order; "max"; or half of a sum for half the cost. "scatter" gives each
    member its chunk of the sum, all of equal length and padded with zeros. "gather" gives all
    members' tensors in rank order. The last `piggybacked` elements are scalars that count for
    neither bytes nor time.

    Several collectives of a group may be in flight at once, from tasks of their own. All members
    post them in the same order, with the same kind, `key` and `credit`. Among the collectives that
    all members have posted the lowest key goes first, and at most `credit` of them are committed at
    once (`ashl.runtime.collective_queue`). Key 0 is the next one. A posted collective is carried
    out even if its task is cancelled.
    """

    tensor: Any
    group: tuple[int, ...]
    op: str = "sum"
    piggybacked: int = 0
    key: int = 0
    credit: int = 0

    def __await__(self) -> Generator[AllReduce, Any, Any]:
        return (yield self)


class AllGather(NamedTuple):
    """All members' bytes (uint8 tensors of any lengths), as a list in rank order. The last
    `piggybacked` bytes count for neither bytes nor time. Order and `key` are as in
    `AllReduce`.
    """

    tensor: Any
    group: tuple[int, ...]
    piggybacked: int = 0
    key: int = 0
    credit: int = 0

    def __await__(self) -> Generator[AllGather, Any, Any]:
        return (yield self)


COLLECTIVES = (AllReduce, AllGather)  # effects that all members of a group must post


class Sleep(NamedTuple):
    """Resume the task after `seconds` of the experiment's clock."""

    seconds: float

    def __await__(self) -> Generator[Sleep, Any, None]:
        return (yield self)


class Join(NamedTuple):
    """Wait for a spawned task; returns its result (None if it was cancelled)."""

    task: Any

    def __await__(self) -> Generator[Join, Any, Any]:
        return (yield self)


class Cancel(NamedTuple):
    """End a spawned task where it is blocked. A compute or a collective that it has posted is still
    carried out, and the result is discarded.
    """

    task: Any

    def __await__(self) -> Generator[Cancel, Any, None]:
        return (yield self)


class Epoch(NamedTuple):
    """A period of the run with fixed members. A failure or a rejoin of a worker begins the next
    one.
    """

    number: int  # 0 from the start of the run
    workers: tuple[int, ...]  # the members, in rank order
    incarnations: tuple[int, ...] = ()  # earlier failures of each member


class Save(NamedTuple):
    """Save this rank in a checkpoint: `state` holds all that it needs to continue in `stage`. All
    ranks save once for each pause, with nothing in flight between them. In virtual time they wait
    for each other; on processes the task continues at once.
    """

    stage: int
    state: Any

    def __await__(self) -> Generator[Save, Any, None]:
        return (yield self)


class PeerFailedError(Exception):
    """A peer that a receive depends on has failed."""

    def __init__(self, rank: int, why: str = "", incarnation: int = 0) -> None:
        """Args: rank, of the peer; why, the cause; incarnation, number of its earlier failures."""
        super().__init__(f"rank {rank} has failed{': ' + why if why else ''}")
        self.rank = rank
        self.why = why
        self.incarnation = incarnation
