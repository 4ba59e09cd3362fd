"""Priorities: gradients travel in slices, and those that the next forward pass needs first overtake
the others.

Use when: the next forward pass can begin before all gradients have arrived.
Avoid when: latency is high or links are fast: slices cost more than they hide.
Alternatives: `merged`; `dear`.

Rule: each message (see `ashl.overlap.next_forward`) is partitioned into slices of `slice`
parameters. Of the slices that are ready on all workers, one of the lowest layer goes first; a slice
in flight is not interrupted. At most `credit` slices are committed at once, and no slice overtakes
a committed one; P3 commits one at a time. A larger credit gives away priority, but on real
processes the workers then agree less often. The optimizer steps group by group.
With slice=auto and credit=auto the time of a step in virtual time decides: the slice size with the
shortest step, and the largest credit that costs at most 0.1 % of it.
Waiting: the forward pass waits for each group by itself, so sums continue under it. At a parameter
server a slice is committed until its worker knows that the server has it. The server merges a slice
once it has it from all workers, and returns it at once. A step that all workers have computed when
`stop.seconds` is over still counts.
Time: with very small slices and no latency a step takes max_k (q_k + R_k + S_k), with S_k the time
of the sums of the layers up to k. No order takes less, and `wfbp` takes at most the forward time
longer. At a parameter server a step takes max_k (q_k + D_k), with D_k the time at which the last
slice of the layers up to k has returned.

Limits: with a forward pass of no time it is `wfbp` with slices; one group is `none` with slices.
The order of slices is that of the layers. A forward pass is a chain of layers: there TicTac's TAC
is this order, and so is TIC, except for a tie of the first two layers. Without latency no order is
faster by more than one slice.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3),
MLSys 2019, released with slices of 40,000 parameters, one at a time; Peng et al., "A Generic
Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019, for
the credit; TIC and TAC: Hashemi et al., "TicTac", MLSys 2019.
Differs: ByteScheduler counts its credit in parameters, so more slices of a smaller size are
committed. It tunes both by trial runs; for all-reduce it was released with slices of 8 million
parameters and a credit of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.overlap.merged import Counts
from ashl.overlap.next_forward import NextForward
from ashl.overlap.timeline import Bucket, StepTimeline

LEAST, MOST = 1_000, 500  # slice=auto: fewest parameters in a slice, most slices of a model
CREDITS = (1, 2, 4, 8)  # credit=auto: slices that may be committed at once
WORTH = 1.001  # credit=auto: longest step allowed, as a multiple of the shortest


@option
class Priority(NextForward):
    """Slices in the order of the next forward pass, which begins before all have arrived."""

    costless_choice: ClassVar[str] = "plan=layers overlap.slice=40000 overlap.credit=1"
    plan: Literal["layers", "bytes", "tuned"] | Counts
    slice: Count | Literal["auto"]
    credit: Count | Literal["auto"]

    @property
    def needs(self) -> dict[str, str]:
        return super().needs | {"merges_of_slices": ""}

    @property
    def needs_costs(self) -> bool:
        return self.plan == "tuned" or "auto" in (self.slice, self.credit)

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        assert self.slice != "auto"
        assert self.credit != "auto"
        merged = super().plan_buckets(timeline)
        last = len(merged)
        return [
            part._replace(priority=last - k, credit=self.credit, merged_alone=True)
            for k, bucket in enumerate(merged)
            for part in cut_into_slices(bucket, self.slice)
        ]

    def step_ns(self, timeline: StepTimeline) -> int:
        assert self.slice != "auto"
        assert self.credit != "auto"
        messages = self.messages(timeline)
        return timeline.period_ns(
            arrival_ns(timeline, messages, 4 * self.slice, self.credit), messages
        )

    def unsliced_step_ns(self, timeline: StepTimeline, messages: tuple[int, ...]) -> int:
        return timeline.period_ns(
            arrival_ns(timeline, messages, longest_message(timeline, messages), 1), messages
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
        """Return this overlap with the largest credit whose step takes at most `WORTH` times the
        shortest.
        """
        if self.credit != "auto" or self.slice == "auto":
            return self
        made = [replace(self, credit=count) for count in CREDITS]
        least = min(one.step_ns(timeline) for one in made)
        return [one for one in made if one.step_ns(timeline) <= WORTH * least][-1]


def cut_into_slices(bucket: Bucket, size: int) -> list[Bucket]:
    """Return the slices of a bucket, of `size` parameters each."""
    return [
        bucket._replace(start=start, stop=min(bucket.stop, start + size))
        for start in range(bucket.start, bucket.stop, size)
    ]


def candidate_sizes(timeline: StepTimeline, messages: Sequence[int]) -> list[int]:
    """Return the slice sizes in parameters that slice=auto tries, the largest first."""
    sizes = [longest_message(timeline, messages) // 4]
    while sizes[-1] > max(2 * LEAST, sum(timeline.nbytes) // (2 * MOST)):
        sizes.append(sizes[-1] // 2)
    return sizes


def longest_message(timeline: StepTimeline, messages: Sequence[int]) -> int:
    """Return the bytes of the longest message."""
    return max(
        sum(timeline.nbytes[end - count : end])
        for end, count in zip(accumulate(messages), messages, strict=True)
    )


def arrival_ns(
    timeline: StepTimeline, messages: Sequence[int], slice_bytes: int, credit: int
) -> list[int]:
    """Return the time at which each message has arrived, in a step that begins at 0 ns.

    The order is that of the simulator, slice by slice, with at most `credit` slices committed. A
    server returns each slice and an acknowledgement, which frees the credit, behind those that it
    is already sending.
    """
    ends = list(accumulate(messages))
    sizes = [
        sum(timeline.nbytes[end - count : end]) for end, count in zip(ends, messages, strict=True)
    ]
    down_ns = timeline.half_ns if timeline.answer_ns else (lambda nbytes: 0)
    acknowledge_ns = 2 * timeline.latency_ns if timeline.answer_ns else 0
    waiting: list[tuple[int, int, int]] = []  # heap: (index in forward order, start, bytes)
    # heap: (time, message, slices whose credit is freed)
    coming = [(timeline.ready_ns[end - 1], k, 0) for k, end in enumerate(ends)]
    done = [0] * len(ends)
    up = down = 0  # times at which the channels to and from the server are free, ns
    held = 0  # slices committed
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
            heappush(coming, (max(up, down) + acknowledge_ns, -place, 1))
            done[-place] = down = max(up, down) + down_ns(nbytes)
    return done
