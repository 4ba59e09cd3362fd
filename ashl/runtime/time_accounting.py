"""Attribute every instant of a rank's main task to exactly one class, so that the classes add up to
the run's time.

A span starts where the last one ended, so nothing is counted twice or left out. Spans are folded
into the totals two rounds later, because a worker learns only from its next reply that the run has
ended; `close` then truncates what lies past the end. `reclassify_as_push` and
`reclassify_as_wait` correct spans when a later message tells more.
"""

import math

KINDS = ("compute", "compress", "push", "pull", "wait", "down")
MANY_SPANS = 64  # spans and transfers that a rank without reported rounds keeps at most
Span = tuple[str, int, int]


class TimeAccounting:
    """The spans of one rank in integer nanoseconds, and its bytes."""

    __slots__ = (
        "_background",
        "_messages",
        "_old",
        "_old_traffic",
        "_parts",
        "_spans",
        "_start",
        "_traffic",
        "bytes_down",
        "bytes_up",
        "collective_ns",
        "cursor",
        "limit_ns",
        "totals",
    )

    def __init__(self) -> None:
        self.totals = dict.fromkeys(KINDS, 0)
        self.bytes_up = self.bytes_down = 0
        # ns with a collective in flight, also while the main task did other work
        self.collective_ns = 0
        self.cursor = 0  # ns: end of the last span
        self.limit_ns: float = math.inf  # ns: time budget of the run; later time does not count
        self._start = 0  # ns: start of this round
        self._spans: list[Span] = []
        self._old: list[Span] = []
        self._traffic: list[tuple[int, int, int]] = []  # (start, up, down)
        self._old_traffic: list[tuple[int, int, int]] = []
        # (begin, end) of collectives of background tasks
        self._background: list[tuple[int, int]] = []
        # ns: when parts of a computation were ready, since the last round
        self._parts: list[int] = []
        # (begin, end) of collectives, if some overlap with other work
        self._messages: list[tuple[int, int]] = []

    def set_start(self, now_ns: int) -> None:
        """Start the accounting at `now_ns`; a joining worker starts later than the others."""
        self.cursor = self._start = now_ns

    def attribute_until(self, kind: str, end_ns: int) -> None:
        """Attribute the time up to `end_ns` to this class."""
        if end_ns > self.limit_ns:
            end_ns = int(self.limit_ns)
        if end_ns > self.cursor:
            self._spans.append((kind, self.cursor, end_ns))
            self.cursor = end_ns

    def attribute_blocked(self, now_ns: int, push_end_ns: int, pull_start_ns: int) -> None:
        """Attribute the time up to now, in which the task was blocked: first to pushing, then
        waiting, then pulling.
        """
        at = self.cursor
        spans = self._spans
        end = now_ns if now_ns <= self.limit_ns else int(self.limit_ns)
        if end <= at:
            return
        if push_end_ns > at:
            until = push_end_ns if push_end_ns < end else end
            spans.append(("push", at, until))
            at = until
        if at < pull_start_ns and at < end:
            until = pull_start_ns if pull_start_ns < end else end
            spans.append(("wait", at, until))
            at = until
        if at < end:
            spans.append(("pull", at, end))
        self.cursor = end

    def record_collective(self, begin_ns: int, end_ns: int, main: bool) -> None:
        """Record a collective in flight from `begin_ns` to `end_ns`. A collective of a background
        task counts as the main task's time only while the main task is idle.
        """
        if begin_ns < self.limit_ns:
            self.collective_ns += (
                end_ns if end_ns <= self.limit_ns else int(self.limit_ns)
            ) - begin_ns
        if not main or self._parts:
            self._messages.append((begin_ns, end_ns))
        if main:
            self._attribute_transfer(begin_ns, end_ns)
        else:
            self._background.append((begin_ns, end_ns))

    def record_part(self, ready_ns: int) -> None:
        """Record that a part of a computation is ready."""
        self._parts.append(ready_ns)

    def attribute_idle(self, now_ns: int) -> None:
        """Attribute the time up to now, in which the task was idle: to transfers of background
        collectives, and the rest to waiting.
        """
        if self._background:
            for begin_ns, end_ns in self._background:
                if self.cursor < end_ns <= now_ns:
                    self._attribute_transfer(begin_ns, end_ns)
            self._background = [span for span in self._background if span[1] > now_ns]
        self.attribute_until("wait", now_ns)

    def _attribute_transfer(self, begin_ns: int, end_ns: int) -> None:
        """Attribute a transfer: waiting until its begin, then half of the rest to pushing and half
        to pulling.
        """
        at, spans = self.cursor, self._spans
        if end_ns > self.limit_ns:
            self.attribute_until("wait", begin_ns)
            return self.attribute_blocked(end_ns, (self.cursor + end_ns) // 2, 0)
        if begin_ns > at:
            spans.append(("wait", at, begin_ns))
            at = begin_ns
        if end_ns > at:
            half = (at + end_ns) // 2
            if half > at:
                spans.append(("push", at, half))
            spans.append(("pull", half, end_ns))
            at = end_ns
        self.cursor = at

    def record_traffic(self, start_ns: int, up: int, down: int) -> None:
        if start_ns <= self.limit_ns:
            self._traffic.append((start_ns, up, down))

    def reclassify_as_push(self, start_ns: int, end_ns: int) -> None:
        """Reclassify waiting as pushing while a message of this rank was in flight, once its
        receipt has arrived.
        """
        if start_ns < self.cursor:
            add_push(self._spans, start_ns, end_ns)  # in place, because a round may have many spans
            if start_ns < self._start:
                self._old = [*self._old]  # a copy, because a record holds the old list
                add_push(self._old, start_ns, end_ns)

    def reclassify_as_wait(self, *each_ns: int) -> None:
        """Reclassify transfer time as waiting, by how long each collective waited for its last
        member.
        """
        for waited_ns in each_ns:
            self.totals["push"] -= waited_ns - waited_ns // 2
            self.totals["pull"] -= waited_ns // 2
            self.totals["wait"] += waited_ns
            self.collective_ns -= waited_ns

    def end_round(self) -> tuple[list[Span], int, int]:
        """End a round; return its spans, start and end."""
        spans, start, cursor = self._spans, self._start, self.cursor
        if self._background:
            self._background = [span for span in self._background if span[1] > cursor]
        totals, up, down = self.totals, self.bytes_up, self.bytes_down
        for kind, begun, ended in self._old:
            totals[kind] += ended - begun
        for _, sent, received in self._old_traffic:
            up += sent
            down += received
        self.bytes_up = up
        self.bytes_down = down
        self._old = spans
        self._old_traffic = self._traffic
        self._spans = []
        self._traffic = []
        self._start = cursor
        return spans, start, cursor

    def fold_if_many(self) -> None:
        """Fold the spans of a rank whose rounds are not reported, once they are many."""
        if len(self._spans) + len(self._traffic) > MANY_SPANS:
            self.end_round()

    def take_overlapped(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return, since the last call, when parts were ready, and (begin, end) of collectives."""
        found = self._parts, self._messages
        if self._parts or self._messages:
            self._parts = []
            self._messages = []
        return found

    def abort_collectives(self, now_ns: int) -> None:
        """End background collectives in flight now, because they are aborted."""
        self._background = [
            (begin, min(end, now_ns)) for begin, end in self._background if begin < now_ns
        ]

    def truncate(self, now_ns: int, push_end_ns: int, pull_start_ns: int) -> None:
        """Remove the time after `now_ns` that was attributed ahead."""
        for begin_ns, end_ns in self._background:
            if begin_ns < now_ns and end_ns > self.cursor < now_ns:
                self._attribute_transfer(begin_ns, min(end_ns, now_ns))
        self.attribute_blocked(now_ns, push_end_ns, pull_start_ns)
        self._spans, self.cursor = clip_spans(self._spans, now_ns), min(self.cursor, now_ns)

    def close(self, end_ns: int, time_class: str = "wait") -> None:
        """End the accounting at `end_ns`: remove later time, and attribute missing time to this
        class.
        """
        self.attribute_until(time_class, end_ns)
        self._old = clip_spans(self._old, end_ns)
        self._spans = clip_spans(self._spans, end_ns)
        self._old_traffic = [t for t in self._old_traffic if t[0] <= end_ns]
        self._traffic = [t for t in self._traffic if t[0] <= end_ns]
        self.cursor, self._start = end_ns, min(self._start, end_ns)

    def fold_pending(self) -> None:
        """Fold the remaining rounds into the totals, when the rank has ended."""
        self.end_round()
        self.end_round()

    def totals_until(self, end_ns: int) -> dict[str, int]:
        """Return totals up to an instant within the last two rounds."""
        totals = dict(self.totals)
        for kind, start, end in clip_spans(self._old + self._spans, end_ns):
            totals[kind] += end - start
        return totals

    def current_totals(self) -> dict[str, int]:
        """Return the totals so far, for the monitor. Unlike the totals after `close` they may
        extend past the end of the run.
        """
        totals = dict(self.totals)
        for kind, start, end in self._old + self._spans:
            totals[kind] += end - start
        return totals

    def bytes_so_far(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        pending = self._old_traffic + self._traffic
        return self.bytes_up + sum(t[1] for t in pending), self.bytes_down + sum(
            t[2] for t in pending
        )


def clip_spans(spans: list[Span], end_ns: int) -> list[Span]:
    return [(kind, start, min(end, end_ns)) for kind, start, end in spans if start < end_ns]


def add_push(spans: list[Span], start_ns: int, end_ns: int) -> None:
    """Reclassify waiting as pushing between two instants, in consecutive spans, in place."""
    first = len(spans)
    while first and spans[first - 1][2] > start_ns:
        first -= 1
    spans[first:] = [part for span in spans[first:] for part in split_push(span, start_ns, end_ns)]


def split_push(span: Span, start_ns: int, end_ns: int) -> list[Span]:
    """Return a span in pieces, with the part between two instants as pushing if the span is
    waiting.
    """
    kind, begin, end = span
    first, last = max(begin, start_ns), min(end, end_ns)
    if kind != "wait" or first >= last:
        return [span]
    parts = [("wait", begin, first), ("push", first, last), ("wait", last, end)]
    return [part for part in parts if part[1] < part[2]]
