"""Attribute every instant of a rank's main task to exactly one class, so that the classes add up to
the run's time.

A span starts where the last one ended, so nothing is counted twice or left out. Spans are folded
into the totals two rounds later, because a worker learns only from its next reply that the run has
ended; `close_at` then truncates what lies past the end. `reclassify_as_push` and
`reclassify_as_wait` correct spans when a later message tells more.
"""

import math

KINDS = ("compute", "compress", "push", "pull", "wait", "down")
Span = tuple[str, int, int]


class TimeAccounting:
    """Spans in integer nanoseconds and bytes of one rank."""

    __slots__ = (
        "_aside",
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
        self.collective_ns = (
            0  # how long collectives were under way, whatever the main task did meanwhile
        )
        self.cursor = 0  # the end of the last span
        self.limit_ns: float = math.inf  # of the run's budget: nothing counts that comes later
        self._start = 0  # of this round
        self._spans: list[Span] = []
        self._old: list[Span] = []
        self._traffic: list[tuple[int, int, int]] = []  # (start, up, down)
        self._old_traffic: list[tuple[int, int, int]] = []
        self._aside: list[tuple[int, int]] = []  # (begin, end) of collectives of other tasks
        self._parts: list[int] = []  # when parts of a computation were there, since the last round
        self._messages: list[
            tuple[int, int]
        ] = []  # (begin, end) of collectives, where some overlap

    def start_at(self, now_ns: int) -> None:
        """The clock starts here (a worker that comes later than the others starts later)."""
        self.cursor = self._start = now_ns

    def attribute_until(self, kind: str, end_ns: int) -> None:
        """The time up to `end_ns` was of this kind."""
        if end_ns > self.limit_ns:
            end_ns = int(self.limit_ns)
        if end_ns > self.cursor:
            self._spans.append((kind, self.cursor, end_ns))
            self.cursor = end_ns

    def attribute_blocked(self, now_ns: int, push_end_ns: int, pull_start_ns: int) -> None:
        """The task was blocked until now: pushing first, then waiting, then pulling what it waited
        for.
        """
        at, end, spans = (
            self.cursor,
            now_ns if now_ns <= self.limit_ns else int(self.limit_ns),
            self._spans,
        )
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
        """A collective is under way from here to there; of another task it is the main task's time
        where that is idle meanwhile.
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
            self._aside.append((begin_ns, end_ns))

    def record_part(self, ready_ns: int) -> None:
        """A part of what this rank computes is there."""
        self._parts.append(ready_ns)

    def attribute_idle(self, now_ns: int) -> None:
        """The task did nothing until now: what other tasks moved meanwhile was that, and the rest
        was waiting.
        """
        if self._aside:
            for begin_ns, end_ns in self._aside:
                if self.cursor < end_ns <= now_ns:
                    self._attribute_transfer(begin_ns, end_ns)
            self._aside = [span for span in self._aside if span[1] > now_ns]
        self.attribute_until("wait", now_ns)

    def _attribute_transfer(self, begin_ns: int, end_ns: int) -> None:
        """A wait until then, and half of the rest is pushing, half pulling."""
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
        """It is known now that something this rank sent was on its way from here to there: what was
        called waiting meanwhile was pushing.
        """
        if start_ns < self.cursor:
            add_push(self._spans, start_ns, end_ns)  # in place, as a round may be long
            if start_ns < self._start:
                self._old = [*self._old]  # others have it
                add_push(self._old, start_ns, end_ns)

    def reclassify_as_wait(self, *each_ns: int) -> None:
        """It is known now that collectives waited so long for their last members, of what was
        called a transfer.
        """
        for waited_ns in each_ns:
            self.totals["push"] -= waited_ns - waited_ns // 2
            self.totals["pull"] -= waited_ns // 2
            self.totals["wait"] += waited_ns
            self.collective_ns -= waited_ns

    def end_round(self) -> tuple[list[Span], int, int]:
        """End a round; returns its spans, start and end."""
        spans, start, cursor = self._spans, self._start, self.cursor
        if self._aside:
            self._aside = [span for span in self._aside if span[1] > cursor]
        totals, up, down = self.totals, self.bytes_up, self.bytes_down
        for kind, begun, ended in self._old:
            totals[kind] += ended - begun
        for _, sent, received in self._old_traffic:
            up += sent
            down += received
        self.bytes_up, self.bytes_down = up, down
        self._old, self._old_traffic = spans, self._traffic
        self._spans, self._traffic = [], []
        self._start = cursor
        return spans, start, cursor

    def take_overlapped(self) -> tuple[list[int], list[tuple[int, int]]]:
        """What overlapped since it was asked last: when parts were there, and from when to when
        messages went.
        """
        found = self._parts, self._messages
        if self._parts or self._messages:
            self._parts, self._messages = [], []
        return found

    def abort_collectives(self, now_ns: int) -> None:
        """A collective of another task that was under way comes to nothing."""
        self._aside = [(begin, min(end, now_ns)) for begin, end in self._aside if begin < now_ns]

    def truncate_at(self, now_ns: int, push_end_ns: int, pull_start_ns: int) -> None:
        """Cut off at this instant what was attributed to later times."""
        for begin_ns, end_ns in self._aside:
            if begin_ns < now_ns and end_ns > self.cursor < now_ns:
                self._attribute_transfer(begin_ns, min(end_ns, now_ns))
        self.attribute_blocked(now_ns, push_end_ns, pull_start_ns)
        self._spans, self.cursor = clip_spans(self._spans, now_ns), min(self.cursor, now_ns)

    def close_at(self, end_ns: int, missing: str = "wait") -> None:
        """The experiment ended at `end_ns`: forget what came later, and what is missing up to there
        was waiting.
        """
        self.attribute_until(missing, end_ns)
        self._old = clip_spans(self._old, end_ns)
        self._spans = clip_spans(self._spans, end_ns)
        self._old_traffic = [t for t in self._old_traffic if t[0] <= end_ns]
        self._traffic = [t for t in self._traffic if t[0] <= end_ns]
        self.cursor, self._start = end_ns, min(self._start, end_ns)

    def fold_pending(self) -> None:
        """Nothing more will come: fold what is left."""
        self.end_round()
        self.end_round()

    def totals_until(self, end_ns: int) -> dict[str, int]:
        """Totals up to a moment within the last two rounds."""
        totals = dict(self.totals)
        for kind, start, end in clip_spans(self._old + self._spans, end_ns):
            totals[kind] += end - start
        return totals

    def current_totals(self) -> dict[str, int]:
        """Totals so far, for a person who watches; unlike those after `close` they may run past the
        end.
        """
        totals = dict(self.totals)
        for kind, start, end in self._old + self._spans:
            totals[kind] += end - start
        return totals

    def bytes_so_far(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        pending = self._old_traffic + self._traffic
        return self.bytes_up + sum(t[1] for t in pending), self.bytes_down + sum(
            t[2] for t in pending
        )


def clip_spans(spans: list[Span], end_ns: int) -> list[Span]:
    return [(kind, start, min(end, end_ns)) for kind, start, end in spans if start < end_ns]


def add_push(spans: list[Span], start_ns: int, end_ns: int) -> None:
    """Of spans one after the other in time those that were waiting from here to there were
    pushing.
    """
    first = len(spans)
    while first and spans[first - 1][2] > start_ns:
        first -= 1
    spans[first:] = [part for span in spans[first:] for part in split_push(span, start_ns, end_ns)]


def split_push(span: Span, start_ns: int, end_ns: int) -> list[Span]:
    """A span of which the part from here to there was pushing, if it was waiting."""
    kind, begin, end = span
    first, last = max(begin, start_ns), min(end, end_ns)
    if kind != "wait" or first >= last:
        return [span]
    parts = [("wait", begin, first), ("push", first, last), ("wait", last, end)]
    return [part for part in parts if part[1] < part[2]]
