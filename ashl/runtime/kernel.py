"""Tasks and mailboxes, which both kernels share.

A task is a coroutine with the effect that it is blocked in. `resume_task` gives it a result and
returns its next effect. A mailbox holds the messages of one rank that no receive has taken yet, and
the tasks that wait for one. After a peer has failed, a receive that depends on it raises
PeerFailedError, or returns a message with the tag PEER_FAILED.
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


def resume_task(task: Task, value: Any) -> Any:
    """Resume a task with the result of what it awaited; returns its next effect, or None when it
    has ended.
    """
    try:
        return (
            task.send(value) if value.__class__ is not PeerFailedError else task.coro.throw(value)
        )
    except StopIteration as end:
        task.done = True
        task.result = end.value
        return None


class TaskKernel(ABC):
    """The part of a kernel that performs effects which move no data."""

    @abstractmethod
    def mail_of(self, task: Task) -> Mailbox:
        """Return the mailbox of a task's rank."""

    @abstractmethod
    def wake_at(self, time_ns: int, task: Task) -> None:
        """Resume a task at this time."""

    @abstractmethod
    def wake(self, task: Task, value: Any) -> None:
        """Resume a task now, after all that is posted before."""

    @abstractmethod
    def save_rank(self, task: Task, save: Save) -> tuple[bool, Any]:
        """Save the rank of a task; return as `perform_infrequent`."""

    def perform_infrequent(self, task: Task, effect: Any) -> tuple[bool, Any]:
        """Perform an effect that moves no data; return whether the task blocks, and the effect's
        value.
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
        """End a task where it is blocked."""
        if task.done:
            return
        waiters = self.mail_of(task).waiters
        if task in waiters:
            waiters.remove(task)
        task.coro.close()
        task.done = True
        task.waiting = None
        self.end_task(task)

    def end_task(self, task: Task) -> None:
        """Resume the task that waits for the end of this one."""
        if task.joiner is not None:
            self.wake(task.joiner, task.result)


class Mailbox:
    """Messages that have arrived at one rank, and the tasks that wait for one."""

    __slots__ = ("arrived", "dropped", "failed_peers", "messages", "waiters")

    def __init__(self) -> None:
        # each with its number in order of arrival
        self.messages: dict[Tag, deque[tuple[int, Message]]] = {}
        self.arrived = 0  # number of the latest stored message
        self.waiters: list[Task] = []
        self.dropped: set[Tag] = set()  # tags whose messages are deleted when they arrive
        self.failed_peers: dict[int, PeerFailedError] = {}

    def receive(self, recv: Recv) -> Message | PeerFailedError | None:
        """Return the first message that has already arrived and matches, else the failure of the
        peer that it would come from, else None.
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
        """Return the task that was waiting for the message; if there is none, store the message and
        return None.
        """
        tag, src = message.tag, message.src
        for i, task in enumerate(self.waiters):
            recv = task.waiting
            if (recv.src == ANY or recv.src == src) and tag in recv.tags:
                del self.waiters[i]
                return task
        if tag not in self.dropped:
            self.arrived += 1
            queue = self.messages.get(tag)
            if queue is None:
                queue = self.messages[tag] = deque()
            queue.append((self.arrived, message))
        return None

    def mark_failed(
        self, failure: PeerFailedError, since_ns: int
    ) -> list[tuple[Task, Message | PeerFailedError]]:
        """Record that a peer failed; return the tasks to resume, each with the value to resume it
        with.

        A task that asks for the tag PEER_FAILED receives a message. A receive that can no longer
        end is resumed with the error.
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
        message = Message(failure.rank, PEER_FAILED, None, (failure.incarnation,), since_ns)
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
        """Accept discarded tags again, because the loop begins again after this pause. Messages to
        an earlier incarnation of this rank are deleted, as are requests to join, which are sent
        again.

        Args: is_strict: True if no rank has failed, so that no message may remain.
        """
        remaining = self.messages.keys() - {PEER_FAILED, JOIN}
        assert not (remaining and is_strict), (
            f"stage {save.stage} pauses before the messages {remaining} are received"
        )
        for tag in (*remaining, JOIN):
            self.messages.pop(tag, None)
        self.dropped.clear()

    def discard(self, tags: tuple[Tag, ...]) -> None:
        """Delete messages with these tags, both arrived ones and future ones."""
        self.dropped.update(tags)
        for tag in tags:
            self.messages.pop(tag, None)


def deadline_ns(before_s: float) -> int:
    return round(before_s * 1e9)
