"""Priorities: gradients travel in slices, those that the next forward pass needs first before the
others.

Rule: each message (see `ashl.overlap.crossing`) is cut into slices of so many parameters, and of
those that are ready on all workers the lowest layer's goes first; one that has begun is not
interrupted. At most `credit` slices are committed at once, and a committed slice is not overtaken:
one at a time is P3. A larger credit gives priority away, and on real processes the workers then
agree less often. The optimizer steps group by group, and the forward pass waits for each group by
itself, so that sums go on under it. With ever smaller slices and no latency a step takes max_k (q_k
+ R_k + S_k), with q_k the forward time from k on and S_k what the sums of the layers up to k take:
no order can take less, and it is less than that of `wfbp` by at most the forward time. With
slice=auto and credit=auto the simulated time of a step decides: the slices with which it is
shortest, and the largest credit that costs no more than 0.1 % of it.

At a parameter server a slice is committed until the worker knows that the server has it; what has
come from all is merged, and sent back at once, and a step takes max_k (q_k + D_k), with D_k the
moment at which the last slice of the layers up to k is back. A step that all have computed when
`stop.seconds` is over still counts.

Limits: a forward pass that takes no time gives `wfbp` with slices; one group, `none` with slices.
The order is that of the layers, and there is no other to choose: a forward pass is a chain, on
which TicTac's TAC and, but for a tie of the first two layers, TIC are this one; without latency no
order takes less by more than one slice.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3),
MLSys 2019, released with slices of 40,000 parameters, one at a time; Peng et al., "A Generic
Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019, whose
credit this is (under all-reduce released with slices of 8 million parameters and a credit of 16
million, two slices), tuned there by trial runs; TIC and TAC, Hashemi et al., "TicTac", MLSys 2019.
Differs: ByteScheduler counts its credit in parameters, so that short slices let more of them go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.overlap.crossing import Crossing
from ashl.overlap.merged import Counts
from ashl.overlap.timeline import Bucket, StepTimeline

LEAST, MOST = 1_000, 500  # parameters in a slice, and slices of a model, that are tried
CREDITS = (1, 2, 4, 8)  # slices
WORTH = 1.001


@option
class Priority(Crossing):
    """Slices by the layer that needs them first, under the next forward pass."""

    untimed: ClassVar[str] = "plan=layers overlap.slice=40000 overlap.credit=1"
    plan: Literal["layers", "bytes", "tuned"] | Counts
    slice: Count | Literal["auto"]
    credit: Count | Literal["auto"]

    @property
    def timed(self) -> bool:
        return self.plan == "tuned" or "auto" in (self.slice, self.credit)

    @property
    def most_committed(self) -> int:
        assert self.credit != "auto"
        return self.credit

    def cuts(self, message: Bucket) -> list[tuple[int, int]]:
        assert self.slice != "auto"
        return cut_into_slices(message, self.slice)

    def step_ns(self, timeline: StepTimeline) -> int:
        assert self.slice != "auto"
        messages = self.messages(timeline)
        return timeline.period_ns(
            done_ns(timeline, messages, 4 * self.slice, self.most_committed), messages
        )

    def whole_ns(self, timeline: StepTimeline, messages: tuple[int, ...]) -> int:
        return timeline.period_ns(
            done_ns(timeline, messages, longest_message(timeline, messages), 1), messages
        )

    def with_plan(self, timeline: StepTimeline) -> Priority:
        made = replace(self, plan=self.messages(timeline))
        if made.slice != "auto":
            return made._with_credit(timeline)
        sizes = candidate_sizes(timeline, made.messages(timeline))
        return min(
            (replace(made, slice=n)._with_credit(timeline) for n in sizes),
            key=lambda one: one.step_ns(timeline),
        )

    def _with_credit(self, timeline: StepTimeline) -> Priority:
        """With the largest credit that costs next to nothing."""
        if self.credit != "auto" or self.slice == "auto":
            return self
        made = [replace(self, credit=count) for count in CREDITS]
        least = min(one.step_ns(timeline) for one in made)
        return max(
            (one for one in made if one.step_ns(timeline) <= WORTH * least),
            key=lambda one: one.most_committed,
        )


def cut_into_slices(message: Bucket, size: int) -> list[tuple[int, int]]:
    """The elements [start, stop) of a message in slices of so many parameters, counted from its
    beginning.
    """
    count = message.stop - message.start
    return [(start, min(count, start + size)) for start in range(0, count, size)]


def candidate_sizes(timeline: StepTimeline, messages: Sequence[int]) -> list[int]:
    """Parameters of a slice, the largest first."""
    sizes = [longest_message(timeline, messages) // 4]
    while sizes[-1] > max(2 * LEAST, sum(timeline.nbytes) // (2 * MOST)):
        sizes.append(sizes[-1] // 2)
    return sizes


def longest_message(timeline: StepTimeline, messages: Sequence[int]) -> int:
    """Bytes of the longest message."""
    return max(
        sum(timeline.nbytes[end - count : end])
        for end, count in zip(accumulate(messages), messages, strict=True)
    )


def done_ns(
    timeline: StepTimeline, messages: Sequence[int], slice_bytes: int, credit: int
) -> list[int]:
    """When each message is in, of a step that has begun at 0: as the simulator has it, slice by
    slice, of which at most `credit` are committed at once. A server sends each slice back, and its
    word that it has one, which gives the credit back, behind those that are on their way.
    """
    ends = list(accumulate(messages))
    sizes = [
        sum(timeline.nbytes[end - count : end]) for end, count in zip(ends, messages, strict=True)
    ]
    down_ns, word_ns = (
        (timeline.half_ns, 2 * timeline.latency_ns) if timeline.answer_ns else (lambda nbytes: 0, 0)
    )
    waiting: list[tuple[int, int, int]] = []  # heap: (place in forward, start, bytes)
    coming = [
        (timeline.ready_ns[end - 1], k, 0) for k, end in enumerate(ends)
    ]  # heap: (when, message, slices given back)
    done, up, down, held = [0] * len(ends), 0, 0, 0
    while coming:
        now = coming[0][0]
        while coming and coming[0][0] == now:
            _, k, back = heappop(coming)
            held -= back
            for start in range(0, 0 if back else sizes[k], slice_bytes):
                heappush(waiting, (-k, start, min(slice_bytes, sizes[k] - start)))
        while waiting and held < credit:
            place, _, nbytes = heappop(waiting)
            held += 1
            up = max(up, now) + timeline.cost_ns(nbytes)
            heappush(coming, (max(up, down) + word_ns, -place, 1))
            done[-place] = down = max(up, down) + down_ns(nbytes)
    return done
