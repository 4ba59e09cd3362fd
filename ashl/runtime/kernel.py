"""Tasks and mailboxes, which both kernels share.

A task is a coroutine with the effect that it is blocked in. `Task.send` gives it the result of that
effect and returns its next effect. `TaskKernel` performs the effects that neither compute nor
move data; each kernel performs the others. A mailbox holds the messages of one rank that no receive
has taken yet, and the tasks that wait for one.

After a peer has failed, messages of it that have arrived can still be received. Then a receive from
this peer, or from any rank, raises PeerFailedError. A receive that also asks for the tag
PEER_FAILED returns a message with this tag instead, once for each failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from ashl.runtime.effects import (
    ANY,
    JOIN,
    PEER_FAILED,
    AllGather,
    AllReduce,
    Cancel,
    Discard,
    Join,
    Message,
    PeerFailedError,
    Recv,
    Save,
    Sleep,
    Tag,
)
from ashl.runtime.rank_context import RankContext

UNNAMED_TAGS = (PEER_FAILED[0], JOIN[0])  # names of tags that a description of a wait leaves out


class Task:
    """A coroutine on one rank, with the effect that it waits for."""

    __slots__ = (
        "coro",
        "ctx",
        "done",
        "joiner",
        "main",
        "result",
        "send",
        "waiting",
    )

    def __init__(self, ctx: RankContext, coro: Coroutine, main: bool) -> None:
        self.ctx = ctx
        self.coro = coro
        self.main = main
        # bound method, looked up once because it is called for every effect
        self.send: Callable[[Any], Any] = coro.send
        self.waiting: Any = None  # the effect that it is blocked in
        self.done = False
        self.result: Any = None
        self.joiner: Task | None = None  # the task that waits for the end of this one

    def describe(self) -> str:
        """Return the rank and what it waits for, in words."""
        return f"rank {self.ctx.rank} {describe_wait(self.waiting)}"


def describe_wait(effect: Any) -> str:
    """Return in words what a task that is blocked in this effect waits for."""
    if isinstance(effect, Recv):
        names = " or ".join(
            f"{name!r} (stage {stage}, iteration {k})"
            for name, stage, k in effect.tags
            if name not in UNNAMED_TAGS
        )
        return f"waits for {names} from {'anyone' if effect.src == ANY else f'rank {effect.src}'}"
    if isinstance(effect, AllReduce | AllGather):
        key = f", key {effect.key}" if effect.key else ""
        return f"is in {type(effect).__name__} with ranks {list(effect.group)}{key}"
    return f"is in {type(effect).__name__}"


class TaskKernel(ABC):
    """The part of a kernel that performs effects which neither compute nor move data."""

    @abstractmethod
    def mail_of(self, task: Task) -> Mailbox:
        """Return the mailbox of a task's rank."""

    @abstractmethod
    def wake_at(self, time_ns: int, task: Task) -> None:
        """Resume a task with None at this run time."""

    @abstractmethod
    def wake(self, task: Task, value: Any) -> None:
        """Resume a task with this value at the present time, after all tasks and events that are
        due already.
        """

    @abstractmethod
    def save_rank(self, task: Task, save: Save) -> tuple[bool, Any]:
        """Save the rank of a task in a checkpoint.

        Returns: (True if the task blocks, value of the effect), as `perform_infrequent`.
        """

    def perform_infrequent(self, task: Task, effect: Any) -> tuple[bool, Any]:
        """Perform an effect that neither computes nor moves data.

        Returns: (True if the task blocks, value of the effect). The value of a task that blocks
        comes later, by `wake` or `wake_at`.
        Raises: TypeError if it is none of these effects.
        """
        if isinstance(effect, Sleep):
            self.wake_at(task.ctx.now_ns + round(effect.seconds * 1e9), task)
            return True, None
        if isinstance(effect, Join):
            if effect.task.done:
                return False, effect.task.result
            effect.task.joiner = task
            return True, None
        if isinstance(effect, Save):
            return self.save_rank(task, effect)
        if isinstance(effect, Cancel):
            self.cancel_task(effect.task)
        elif isinstance(effect, Discard):
            self.mail_of(task).discard(effect.tags)
        else:
            raise TypeError(f"{effect!r} is not an effect")
        return False, None

    def cancel_task(self, task: Task) -> None:
        """End a task where it is blocked, with the result None. A task that has ended stays as it
        is.
        """
        if task.done:
            return
        waiters = self.mail_of(task).waiters
        if task in waiters:
            waiters.remove(task)
        task.coro.close()
        task.waiting = None
        self.end_task(task)

    def end_task(self, task: Task, result: Any = None) -> None:
        """End a task with this result, and resume the task that waits for it, if there is one."""
        task.done = True
        task.result = result
        if task.joiner is not None:
            self.wake(task.joiner, result)


class Mailbox:
    """Messages that have arrived at one rank, and the tasks that wait for one."""

    __slots__ = ("arrived", "discarded", "failed_peers", "messages", "waiters")

    def __init__(self) -> None:
        # each with its number in order of arrival
        self.messages: dict[Tag, deque[tuple[int, Message]]] = {}
        self.arrived = 0  # number of the latest stored message
        self.waiters: list[Task] = []
        # tags whose messages are deleted when they arrive, unless a task waits for them
        self.discarded: set[Tag] = set()
        self.failed_peers: dict[int, PeerFailedError] = {}  # by rank

    def receive(self, recv: Recv) -> Message | PeerFailedError | None:
        """Take the first message that has already arrived and matches.

        Returns: the message. If there is none, the failure of a peer that it could come from,
        unless the receive asks for the tag PEER_FAILED; else None: the task has to wait.
        """
        if self.messages and (message := self._pop_first(recv)) is not None:
            return message
        if self.failed_peers and PEER_FAILED not in recv.tags:
            return next(
                (failure for rank, failure in self.failed_peers.items() if recv.src in (ANY, rank)),
                None,
            )
        return None

    def _pop_first(self, recv: Recv) -> Message | None:
        first: tuple[int, Tag, int] | None = None
        for tag in recv.tags:
            if queue := self.messages.get(tag):
                for i, (number, message) in enumerate(queue):
                    if recv.src in (ANY, message.src):
                        if first is None or number < first[0]:
                            first = (number, tag, i)
                        break
        if first is None:
            return None
        _, tag, i = first
        queue = self.messages[tag]
        message = queue[i][1]
        del queue[i]
        if not queue:
            del self.messages[tag]
        return message

    def undelivered_messages(self) -> list[Message]:
        """Return all messages that have arrived and were not taken, in order of arrival."""
        return [
            message
            for _, message in sorted(pair for queue in self.messages.values() for pair in queue)
        ]

    def put(self, message: Message) -> Task | None:
        """Add a message that has arrived.

        Returns: the task that was waiting for it, which the kernel has to resume with it. If there
        is none, the message is stored (or deleted, if its tag is discarded), and None is returned.
        """
        tag, src = message.tag, message.src
        for i, task in enumerate(self.waiters):
            recv = task.waiting
            if (recv.src == ANY or recv.src == src) and tag in recv.tags:
                del self.waiters[i]
                return task
        if tag not in self.discarded:
            self.arrived += 1
            queue = self.messages.get(tag)
            if queue is None:
                queue = self.messages[tag] = deque()
            queue.append((self.arrived, message))
        return None

    def mark_failed(
        self, failure: PeerFailedError, failed_ns: int
    ) -> list[tuple[Task, Message | PeerFailedError]]:
        """Record that a peer has failed.

        Args: failed_ns, the run time of the failure; the message with the tag PEER_FAILED starts
        then.
        Returns: the tasks to resume, each with its value. Tasks that wait for this peer, or for any
        rank, are resumed with the error. One task that asks for the tag PEER_FAILED is resumed with
        the message; if none waits, the message is stored. A peer that is marked already changes
        nothing.
        """
        if failure.rank in self.failed_peers:
            return []
        self.failed_peers[failure.rank] = failure
        peer = (ANY, failure.rank)
        stuck = [
            task
            for task in self.waiters
            if task.waiting.src in peer and PEER_FAILED not in task.waiting.tags
        ]
        self.waiters = [task for task in self.waiters if task not in stuck]
        message = Message(failure.rank, PEER_FAILED, None, (failure.incarnation,), failed_ns)
        resumed: list[tuple[Task, Message | PeerFailedError]] = [(task, failure) for task in stuck]
        if (task := self.put(message)) is not None:
            resumed.append((task, message))
        return resumed

    def has_unread_failure(self, peer: int) -> bool:
        """Return True if no receive has taken the message that this peer has failed.

        Until then, all messages to the peer are for its earlier incarnation.
        """
        return any(message.src == peer for _, message in self.messages.get(PEER_FAILED, ()))

    def clear(self) -> None:
        """Delete all messages and all waiting tasks."""
        self.__init__()  # type: ignore[misc]

    def reset_after_pause(self, save: Save, is_strict: bool) -> None:
        """Accept discarded tags again, because the loop begins again after this pause. Delete all
        messages except those with the tag PEER_FAILED: requests to join, which are sent again, and
        messages to an earlier incarnation of this rank.

        Args: is_strict, True if no rank has failed in this run.
        Raises: AssertionError if `is_strict` and a message of the stage remains.
        """
        remaining = self.messages.keys() - {PEER_FAILED, JOIN}
        assert not (remaining and is_strict), (
            f"stage {save.stage} pauses before the messages {remaining} are received"
        )
        for tag in (*remaining, JOIN):
            self.messages.pop(tag, None)
        self.discarded.clear()

    def discard(self, tags: tuple[Tag, ...]) -> None:
        """Delete messages with these tags, both arrived ones and future ones."""
        self.discarded.update(tags)
        for tag in tags:
            self.messages.pop(tag, None)


def deadline_ns(before_s: float) -> int:
    """Return the run time in nanoseconds at which a receive gives up, from seconds (finite)."""
    return round(before_s * 1e9)
