"""Run the computations of one real rank, one after the other, throttled to their declared cost.

A computation runs in the main thread while no other task could run meanwhile, and otherwise on one
compute thread. It may emit parts of its result early; they arrive as messages of the rank to
itself. It may pause for messages that it needs. Every run reports its spans: computing, encoding,
waiting, pulling or idle.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ashl.runtime.effects import Compute, Message, PeerFailedError, Recv, Tag
from ashl.runtime.kernel import Mailbox
from ashl.runtime.throttle import Throttle
from ashl.runtime.time_accounting import TimeAccounting

IDLE = "idle"


class Ran(NamedTuple):
    """A result, and what was done in turn: (kind, when it counts as ended), `IDLE` where it stood
    still.
    """

    value: Any
    spans: list[tuple[str, int]]

    @property
    def end_ns(self) -> int:
        return self.spans[-1][1]

    def attribute_to(self, time_accounting: TimeAccounting, start: int) -> None:
        """Enter it into the books of the main task, where it began then."""
        time_accounting.attribute_until("wait", start)
        for kind, end in self.spans:
            if kind == IDLE:
                time_accounting.attribute_idle(end)
            else:
                time_accounting.attribute_until(kind, end)


class ComputeUnit:
    """That of one rank. What a computation hands out goes to the inbox, as messages of the rank to
    itself.
    """

    def __init__(
        self, rank: int, throttle: Throttle, inbox: queue.SimpleQueue, mail: Mailbox
    ) -> None:
        self._rank, self._throttle, self._inbox, self._mail = rank, throttle, inbox, mail
        self.busy = 0  # how many computations the thread has not finished
        self.standing: Recv | None = None  # what the thread waits for now
        self._needed: dict[Tag, Future] = {}  # messages that the thread waits for, or will
        self._free_ns = 0  # when the last one on it counts as ended
        self._thread: ThreadPoolExecutor | None = None

    def run(self, effect: Compute, start: int, needed: Sequence[Future] = ()) -> Ran:
        """A computation that began then, on this thread; `needed` will be the bodies that it takes
        on its way.
        """
        cost, kind, encoding = (
            self._throttle.cost_ns(effect.kind, effect.work, start),
            effect.booked,
            effect.encoding,
        )
        if not effect.parts and not effect.needs:
            return Ran(
                effect.fn(), [(kind, self._throttle.finish_compute(effect.kind, cost, start))]
            )
        spans: list[tuple[str, int]] = []
        began = (
            start  # had nothing come between; without a declared cost, when the last part was there
        )

        def reached(share: float) -> int:
            nonlocal began
            if cost is not None:
                return self._throttle.wait_until(began + round(share * cost))
            began = self._throttle.finish_compute(effect.kind, None, began)
            return began

        def hand_out(k: int, tensor: Any) -> None:
            nonlocal began
            share, tag = effect.parts[k]
            now = reached(share)
            if encoding is not None:
                spans.append((kind, now))
                tensor = encoding.fn(k, tensor)
                work = encoding.work[k] - (encoding.work[k - 1] if k else 0)
                end = self._throttle.finish_compute(
                    "compress", self._throttle.cost_ns("compress", work, now), now
                )
                spans.append(("compress", end))
                now, began = end, began + end - now
            self._inbox.put(Message(self._rank, tag, tensor, (), now))

        def take(k: int) -> Any:
            nonlocal began
            share, tag = effect.needs[k]
            since = reached(share)
            if not needed[k].done():
                self.standing = Recv((tag,))
                needed[k].exception()  # waits
                self.standing, now = None, max(since, self._throttle.clock())
                message = needed[k].result()
                spans.extend([(kind, since), *self._stall_spans(message, since, now)])
                began += now - since
            return needed[k].result().body

        value = effect.fn(*([hand_out] if effect.parts else []), *([take] if effect.needs else []))
        return Ran(value, [*spans, (kind, self._throttle.finish_compute(effect.kind, cost, began))])

    def post(
        self, effect: Compute, asked_ns: int, done: Callable[[Ran | Exception, int], None]
    ) -> None:
        """Leave a computation to the thread; `done` is called from the main thread, with when it
        began.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.busy += 1
        needed = [self._await_message(tag) for _, tag in effect.needs]

        def work() -> None:
            start = max(asked_ns, self._free_ns)
            try:
                ran: Ran | Exception = self.run(effect, start, needed)
                self._free_ns = ran.end_ns
            except (
                Exception
            ) as raised:  # what is raised here would end in the thread, and nobody would hear of it
                ran = raised
            self._inbox.put(lambda: finished(ran, start))

        def finished(ran: Ran | Exception, start: int) -> None:
            self.busy -= 1
            done(ran, start)

        self._thread.submit(work)

    def deliver(self, message: Message) -> bool:
        """A message has come: whether a computation needs it."""
        future = self._needed.pop(message.tag, None) if self._needed else None
        if future is not None:
            future.set_result(message)
        return future is not None

    def mark_peer_failed(self, loss: PeerFailedError) -> None:
        """A peer is gone, and what a computation needs of it will not come."""
        for tag in [*self._needed]:
            self._needed.pop(tag).set_exception(loss)

    def close(self) -> None:
        """Nothing more will be asked, nor come."""
        for future in self._needed.values():
            future.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _await_message(self, tag: Tag) -> Future:
        """The one with this tag, once it has come."""
        future: Future = Future()
        message = self._mail.receive(Recv((tag,)))
        if isinstance(message, Message):
            future.set_result(message)
        elif isinstance(message, PeerFailedError):
            future.set_exception(message)
        else:
            self._needed[tag] = future
        return future

    def _stall_spans(self, message: Message, since_ns: int, now_ns: int) -> list[tuple[str, int]]:
        """What standing still for a message was: of one's own, whatever other tasks moved
        meanwhile.
        """
        if message.src == self._rank:
            return [(IDLE, now_ns)]
        return [("wait", min(max(since_ns, message.start_ns), now_ns)), ("pull", now_ns)]
