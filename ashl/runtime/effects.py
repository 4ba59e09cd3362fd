"""Effects: the closed set of operations that an algorithm may await.

An algorithm is a coroutine. It yields an effect; a kernel performs it, in virtual time or on a real
process, and sends the result back. Effects are named tuples, so that a simulator can pass hundreds
of thousands a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

ANY = -1  # a receive from whoever is first
Tag = tuple[str, int, int]  # (name, stage, iteration)
PEER_FAILED: Tag = (
    "lost",
    0,
    0,
)  # from a peer that is gone: comes to each rank that has a link to it, from the kernel
JOIN: Tag = ("join", 0, 0)  # from a worker that has come, or come back: it asks to take part


class Message(NamedTuple):
    """What a receive returns. `start_ns`: when the transfer began; before it, a receiver that
    blocked was waiting.
    """

    src: int
    tag: Tag
    body: Any
    meta: tuple[float, ...]
    start_ns: int


class Encoding(NamedTuple):
    """What becomes of each part that a `Compute` hands out: fn(k, tensor), as compression, before
    the compute goes on; after part k, `work[k]` units of it have been done in all.
    """

    fn: Callable[[int, Any], Any]
    work: tuple[float, ...]


class Compute(NamedTuple):
    """Run `fn()`; returns its result. `work` is in samples, or in units of `kind` where that is not
    "compute". A rank computes one thing at a time, of whatever kind, in the order in which its
    tasks ask.

    With `parts` it is `fn(hand_out)`, which calls `hand_out(k, tensor)` once for each part. When
    the part's share of the cost has passed, the tensor is there as a message of this rank to
    itself, with the part's tag, at no cost; with `encoding` what was made of it, as much later as
    that took.

    With `needs` it is `fn(hand_out, take)`, and stands still before the share of a need until a
    message with the need's tag has come, from whoever; `take(k)` is the body of the k-th. All of
    them come before the first part.
    """

    fn: Callable[..., Any]
    work: float
    kind: str = "compute"
    parts: tuple[
        tuple[float, Tag], ...
    ] = ()  # the share of the cost until it is there, and its tag
    encoding: Encoding | None = None
    needs: tuple[
        tuple[float, Tag], ...
    ] = ()  # the share of the cost up to which it can do without, and its tag

    @property
    def booked(self) -> str:
        """The kind of time that it counts as."""
        return "compress" if self.kind in ("compress", "decode") else "compute"

    def __await__(self) -> Generator[Any, Any, Any]:
        answer = yield self
        if self.needs and isinstance(answer, Generator):  # the kernel does it in steps
            return (yield from answer)
        return answer


class Send(NamedTuple):
    """Post `body` (a flat tensor that nobody changes any more, or None) and a few numbers; returns
    at once. To itself a rank sends at no cost.
    """

    dst: int
    tag: Tag
    body: Any = None
    meta: tuple[float, ...] = ()

    def __await__(self) -> Generator[Send, Any, None]:
        return (yield self)


class Recv(NamedTuple):
    """The next message with one of `tags`; None when `before_s` on the clock comes first.

    That a peer is gone is a message, too, with the tag LOST, after all that had come from it, which
    says how often it had been gone before. Raises PeerLostError where LOST is not among the tags,
    and what is waited for would come from that peer, or from whoever is first.
    """

    tags: tuple[Tag, ...]
    src: int = ANY
    before_s: float = math.inf

    def __await__(self) -> Generator[Recv, Any, Any]:
        return (yield self)


class Discard(NamedTuple):
    """Forget messages with these tags, those that have come and those that will."""

    tags: tuple[Tag, ...]

    def __await__(self) -> Generator[Discard, Any, None]:
        return (yield self)


class AllReduce(NamedTuple):
    """Sum or maximum over `group` (sorted ranks), in rank order. The last `piggybacked` elements
    are scalars that ride along and count for neither bytes nor time. `op` may be half a sum, for
    half the cost: "scatter" gives each member its chunk of the sum, of equal length and filled up
    with zeros, and "gather" all members' tensors in rank order.

    Several collectives of a group may be under way at once, from tasks of their own. All members
    post them in the same order, kind, `key` and `credit` alike; of those that all have posted the
    lowest key goes first, at most `credit` of them committed at once
    (`ashl.runtime.collective_queue`). Key 0 is the next one. What has been posted is carried out,
    also when its task is cancelled.

    `epoch`: how many losses had been noticed when the group was formed. Where a member is lost
    after that, the others have
    `CollectiveAborted` instead of the result.
    `incarnations`: how often each member had been lost by then, where one had, and all of them do
    not agree on who is there by themselves.
    """

    tensor: Any
    group: tuple[int, ...]
    op: str = "sum"
    piggybacked: int = 0
    key: int = 0
    credit: int = 0
    epoch: int = 0
    incarnations: tuple[int, ...] = ()

    def __await__(self) -> Generator[AllReduce, Any, Any]:
        return (yield self)


class AllGather(NamedTuple):
    """Every member's bytes (uint8 tensors of any lengths), as a list in rank order. The last
    `piggybacked` bytes ride along and count for neither bytes nor time. Order, `key` and `epoch` as
    of `AllReduce`.
    """

    tensor: Any
    group: tuple[int, ...]
    piggybacked: int = 0
    key: int = 0
    credit: int = 0
    epoch: int = 0

    def __await__(self) -> Generator[AllGather, Any, Any]:
        return (yield self)


class CollectiveAborted(NamedTuple):
    """What comes of a collective instead of its result: this member of its group is gone."""

    rank: int


class Regroup(NamedTuple):
    """Agree with all who are left of a team how to go on; returns `Formed` once all of them ask. A
    worker that has come asks, too, with a version below 0, and is let in where the others all are
    `open` to that, or the run ends.
    """

    version: int  # of the model that this rank would go on from
    signal: int = 0  # 1 or 2: it ends the stage or the run there
    open: bool = False

    def __await__(self) -> Generator[Regroup, Any, Formed]:
        return (yield self)


COLLECTIVES = (AllReduce, AllGather, Regroup)  # what all members of a team come to


class Formed(NamedTuple):
    """A new team. Who is ahead of its version goes back to it."""

    epoch: int
    ranks: tuple[int, ...]
    version: int  # the lowest
    signal: int  # why all asked; 0 where some had come further than others
    failed: tuple[int, ...]  # who is gone of the team before
    joined: tuple[int, ...]  # who of the ranks is new, and knows nothing yet
    time_ns: int  # when all had asked
    incarnations: tuple[int, ...] = ()  # how often each of its ranks had been lost by then


class Sleep(NamedTuple):
    """Come back after `seconds` of the experiment's clock."""

    seconds: float

    def __await__(self) -> Generator[Sleep, Any, None]:
        return (yield self)


class Join(NamedTuple):
    """Wait for a spawned task; returns its result (None if it was cancelled)."""

    task: Any

    def __await__(self) -> Generator[Join, Any, Any]:
        return (yield self)


class Cancel(NamedTuple):
    """End a spawned task where it stands; a compute or a collective that it has posted is carried
    out all the same, and the result is thrown away.
    """

    task: Any

    def __await__(self) -> Generator[Cancel, Any, None]:
        return (yield self)


class PeerFailedError(Exception):
    """A peer that a receive depends on is gone."""

    def __init__(self, rank: int, why: str = "", incarnation: int = 0) -> None:
        super().__init__(f"rank {rank} has failed{': ' + why if why else ''}")
        self.rank, self.why, self.incarnation = rank, why, incarnation
