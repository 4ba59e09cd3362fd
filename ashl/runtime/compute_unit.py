"""Run the computations of one real rank, one after the other, throttled to their declared cost.

A computation runs in the main thread if no other task could run meanwhile, and otherwise on one
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


class ComputeOutcome(NamedTuple):
    """A result, and its spans in order: (kind, end in ns), with `IDLE` for a pause."""

    value: Any
    spans: list[tuple[str, int]]

    @property
    def end_ns(self) -> int:
        return self.spans[-1][1]

    def attribute_to(self, time_accounting: TimeAccounting, start: int) -> None:
        """Attribute the spans to the main task's time; the computation began at `start`."""
        time_accounting.attribute_until("wait", start)
        for kind, end in self.spans:
            if kind == IDLE:
                time_accounting.attribute_idle(end)
            else:
                time_accounting.attribute_until(kind, end)


class ComputeUnit:
    """The compute unit of one rank. Parts that a computation emits go to the inbox, as messages of
    the rank to itself.
    """

    def __init__(
        self, rank: int, throttle: Throttle, inbox: queue.SimpleQueue, mail: Mailbox
    ) -> None:
        self._rank = rank
        self._throttle = throttle
        self._inbox = inbox
        self._mail = mail
        self.busy = 0  # computations that the thread has not finished
        self.paused_in: Recv | None = None  # the receive that the thread is paused in, or None
        self._needed: dict[Tag, Future] = {}  # by tag: messages that queued computations need
        self._free_ns = 0  # ns: throttled end of the latest computation on the thread
        self._thread: ThreadPoolExecutor | None = None

    def run(self, effect: Compute, start: int, needed: Sequence[Future] = ()) -> ComputeOutcome:
        """Run a computation on the calling thread; return its result and spans.

        Args: start, its begin in ns; needed, a future per entry of `effect.needs`, in that order.
        Raises: PeerFailedError if a peer failed before it sent a needed message; errors of the
        computation itself.
        """
        cost = self._throttle.cost_ns(effect.kind, effect.work, start)
        kind = effect.time_class
        encoding = effect.encoding
        if not effect.parts and not effect.needs:
            value = effect.fn()
            end = self._throttle.finish_compute(effect.kind, cost, start)
            return ComputeOutcome(value, [(kind, end)])
        spans: list[tuple[str, int]] = []
        # ns: begin without the pauses and encodings so far; without a declared cost, the end of the
        # last part
        began = start

        def wait_for_share(share: float) -> int:
            """Wait until this share of the declared cost has passed, if one is declared; return the
            end in ns.
            """
            nonlocal began
            if cost is not None:
                return self._throttle.wait_until(began + round(share * cost))
            began = self._throttle.finish_compute(effect.kind, None, began)
            return began

        def emit(k: int, tensor: Any) -> None:
            nonlocal began
            share, tag = effect.parts[k]
            now = wait_for_share(share)
            if encoding is not None:
                spans.append((kind, now))
                tensor = encoding.fn(k, tensor)
                work = encoding.work[k] - (encoding.work[k - 1] if k else 0)
                encode_ns = self._throttle.cost_ns("compress", work, now)
                end = self._throttle.finish_compute("compress", encode_ns, now)
                spans.append(("compress", end))
                began += end - now
                now = end
            self._inbox.put(Message(self._rank, tag, tensor, (), now))

        def receive_need(k: int) -> Any:
            nonlocal began
            share, tag = effect.needs[k]
            since = wait_for_share(share)
            if not needed[k].done():
                self.paused_in = Recv((tag,))
                needed[k].exception()  # blocks until the message has arrived or its sender failed
                self.paused_in = None
                now = max(since, self._throttle.clock())
                message = needed[k].result()
                spans.extend([(kind, since), *self._stall_spans(message, since, now)])
                began += now - since
            return needed[k].result().payload

        arguments: list[Callable[..., Any]] = [emit] if effect.parts else []
        if effect.needs:
            arguments.append(receive_need)
        value = effect.fn(*arguments)
        end = self._throttle.finish_compute(effect.kind, cost, began)
        return ComputeOutcome(value, [*spans, (kind, end)])

    def post(
        self,
        effect: Compute,
        asked_ns: int,
        done: Callable[[ComputeOutcome | Exception, int], None],
    ) -> None:
        """Queue a computation for the compute thread, which runs them in order of posting.

        Args: asked_ns, the earliest begin in ns; done, called from the main thread with the result
        or the error, and with the begin in ns.
        """
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.busy += 1
        needed = [self._await_message(tag) for _, tag in effect.needs]

        def work() -> None:
            start = max(asked_ns, self._free_ns)
            # the main thread raises an error, because this thread would end without a message
            try:
                outcome: ComputeOutcome | Exception = self.run(effect, start, needed)
                self._free_ns = outcome.end_ns
            except Exception as raised:
                outcome = raised
            self._inbox.put(lambda: report_end(outcome, start))

        def report_end(outcome: ComputeOutcome | Exception, start: int) -> None:
            self.busy -= 1
            done(outcome, start)

        self._thread.submit(work)

    def deliver(self, message: Message) -> bool:
        """Give a message to the computation that needs it; return False if none does."""
        future = self._needed.pop(message.tag, None) if self._needed else None
        if future is not None:
            future.set_result(message)
        return future is not None

    def mark_peer_failed(self, failure: PeerFailedError) -> None:
        """Raise the failure in all computations that still wait for a message, from any sender."""
        for tag in [*self._needed]:
            self._needed.pop(tag).set_exception(failure)

    def finish(self) -> None:
        """Wait for the running computation and cancel queued ones, because their tasks have ended.

        Afterwards the unit accepts computations again.
        """
        self.close(wait=True)
        self._needed.clear()
        self._thread, self.busy, self.paused_in = None, 0, None

    def close(self, wait: bool = False) -> None:
        """Cancel queued computations and release the thread; `wait` waits for the running one."""
        for future in self._needed.values():
            future.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=wait, cancel_futures=True)

    def _await_message(self, tag: Tag) -> Future:
        """Return a future of the next message with this tag."""
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
        """Return the spans of a pause for a message: idle for a message of the rank itself, else
        waiting and then pulling.
        """
        if message.src == self._rank:
            return [(IDLE, now_ns)]
        return [("wait", min(max(since_ns, message.start_ns), now_ns)), ("pull", now_ns)]
