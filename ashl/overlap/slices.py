"""Slices: a server merges each slice of a gradient by itself, and returns it once it has it from
all workers.

Use when: a server with a barrier: the server returns slices while others are in flight.
Avoid when: the mode is asynchronous.
Alternatives: `priority` with a server; `merged`.

Rule: a gradient is sent in slices of `slice` parameters as the backward pass computes them, last
layers first. Once the server has a slice from all workers, it takes the optimizer's step on these
elements alone, along their weighted sum. Then it sends them to all workers. So pulls travel during
pushes. With slice=auto the slice size with the shortest step is taken.
Waiting: the next forward pass waits for all slices.
Time: number the m slices in the order in which they are sent. With pushes that take u_i from R_i on
and pulls that take d_i, a step takes F + max_{i ≤ j} (R_i + u_i + … + u_j + d_j + … + d_m) plus the
latencies.

Limits: one slice is `none`, and any number has the bits of `none`. This is P3 without its
priorities: slices do not overtake each other, so no push continues under the next forward pass, as
with `priority`.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3),
MLSys 2019, released with slices of 40,000 parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.overlap.contract import Overlap
from ashl.overlap.next_forward import one_message_each
from ashl.overlap.priority import candidate_sizes, cut_into_slices
from ashl.overlap.timeline import Bucket, StepTimeline


@option
class Slices(Overlap):
    """Slices of a gradient in pushes, slices of the model in pulls."""

    pulls: ClassVar[bool] = True
    by_slice: ClassVar[bool] = True
    costless_choice: ClassVar[str] = "slice=40000"
    slice: Count | Literal["auto"]

    @property
    def needs_costs(self) -> bool:
        return self.slice == "auto"

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return one_message_each(timeline)

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        assert self.slice != "auto"
        return [
            part._replace(merged_alone=True)
            for bucket in super().plan_buckets(timeline)
            for part in cut_into_slices(bucket, self.slice)
        ]

    def step_ns(self, timeline: StepTimeline) -> int:
        assert self.slice != "auto"
        pushed = back = 0
        for ready, nbytes in zip(timeline.ready_ns, timeline.nbytes, strict=True):
            for start in range(0, nbytes, 4 * self.slice):
                size = min(4 * self.slice, nbytes - start)
                pushed = max(pushed, ready) + timeline.cost_ns(size)
                back = max(back, pushed) + timeline.half_ns(size)
        return back + timeline.latency_ns

    def with_plan(self, timeline: StepTimeline) -> Slices:
        if self.slice != "auto":
            return self
        made = [
            replace(self, slice=n) for n in candidate_sizes(timeline, one_message_each(timeline))
        ]
        return min(made, key=lambda one: one.step_ns(timeline))
