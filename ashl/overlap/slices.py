"""Slices that a server merges one by one: each goes back as soon as it has come from all.

Rule: a gradient leaves in slices of so many parameters as backward comes to them, the last layers
first. Of a slice that has come from all workers a server takes the weighted sum, makes the
optimizer's step on these elements alone, and sends them to everybody at once. So pulls go on beside
pushes: with pushes that take u_i from R_i on and pulls that take d_i, a step takes max_{i ≤ j} (R_i
+ u_i + … + u_j + d_j + … + d_m) and the latencies. The bits are those of `none`. With slice=auto
the size is taken with which that is shortest.

Limits: one slice is `none`. This is P3 without its priorities: a slice that the next forward pass
needs first does not overtake those that left before it, so that no push goes on under that, as it
does with `priority`.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3),
MLSys 2019, released with slices of 40,000 parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from ashl.option import Count, option
from ashl.overlap.contract import Overlap
from ashl.overlap.crossing import one_message_each
from ashl.overlap.priority import candidate_sizes, cut_into_slices
from ashl.overlap.timeline import Bucket, StepTimeline


@option
class Slices(Overlap):
    """Slices of a gradient that come back as slices of the model."""

    pulls: ClassVar[bool] = True
    by_slice: ClassVar[bool] = True
    untimed: ClassVar[str] = "slice=40000"
    slice: Count | Literal["auto"]

    @property
    def timed(self) -> bool:
        return self.slice == "auto"

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return one_message_each(timeline)

    def cuts(self, message: Bucket) -> list[tuple[int, int]]:
        assert self.slice != "auto"
        return cut_into_slices(message, self.slice)

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
