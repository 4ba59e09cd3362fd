"""Overlaps whose exchange continues under the next forward pass, which waits for each message by
itself.

Messages are runs of layer groups, and the forward pass waits before the first layer of each. `plan`
decides what a message holds:
    layers   one layer group
    bytes    25 MiB, as DeAR was released
    tuned    by the costs: of the partitions by size and the best partition without this overlap,
             the one with the shortest step
    [2, 3]   as listed: the number of layer groups in each message, last layers first

Source: Zhang et al., "DeAR", ICDCS 2023 (messages by size, tuned).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, Literal

from ashl.option import option
from ashl.overlap.contract import Overlap
from ashl.overlap.merged import CAPS, Counts, plan_as_listed, plan_by_bytes, plan_optimally
from ashl.overlap.timeline import Bucket, StepTimeline, merge_buckets


class NextForward(Overlap, contract=True):
    """Base of overlaps whose exchange continues under the next forward pass."""

    overlaps_next_forward: ClassVar[bool] = True
    plan: ClassVar[tuple[int, ...] | str] = "layers"

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        if not isinstance(self.plan, str):
            return plan_as_listed(self.plan, len(timeline.ready_ns))
        if self.plan == "bytes":
            return plan_by_bytes(timeline, (CAPS[1], CAPS[1]))
        if self.plan == "tuned":
            return min(
                candidate_plans(timeline), key=lambda plan: self.unsliced_step_ns(timeline, plan)
            )
        return one_message_each(timeline)

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        merged = merge_buckets(timeline.groups, self.messages(timeline))
        return [
            bucket._replace(reduce_scattered=self.reduce_scatter_all_gather) for bucket in merged
        ]

    def unsliced_step_ns(self, timeline: StepTimeline, messages: tuple[int, ...]) -> int:
        """Return the time of a step in the long run with these messages, none of them in slices."""
        raise NotImplementedError


@option
class TwoWay(NextForward, contract=True):
    """Messages travel up as they are ready and, once all have, return in the order of the forward
    pass.
    """

    plan: Literal["layers", "bytes", "tuned"] | Counts

    @property
    def needs_costs(self) -> bool:
        return self.plan == "tuned"

    def up_ns(self, timeline: StepTimeline, nbytes: int) -> int:
        """Return the time of a message on its way up; its way back takes `timeline.half_ns`."""
        raise NotImplementedError

    def step_ns(self, timeline: StepTimeline) -> int:
        return self.unsliced_step_ns(timeline, self.messages(timeline))

    def unsliced_step_ns(self, timeline: StepTimeline, messages: tuple[int, ...]) -> int:
        return step_with_pulls_ns(timeline, messages, partial(self.up_ns, timeline))

    def with_plan(self, timeline: StepTimeline) -> TwoWay:
        return replace(self, plan=self.messages(timeline))


def step_with_pulls_ns(
    timeline: StepTimeline, messages: Sequence[int], up_ns: Callable[[int], int]
) -> int:
    """Return the time of a step in the long run if messages travel up at the cost `up_ns` and
    return at `timeline.half_ns`.
    """
    ends = list(accumulate(messages))
    now = 0  # end of the latest message on its way up, ns
    sizes = [sum(timeline.nbytes[end - n : end]) for end, n in zip(ends, messages, strict=True)]
    for end, size in zip(ends, sizes, strict=True):
        now = max(now, timeline.ready_ns[end - 1]) + up_ns(size)
    done = accumulate((timeline.half_ns(size) for size in reversed(sizes)), initial=now)
    return timeline.period_ns(list(done)[:0:-1], messages)


def one_message_each(timeline: StepTimeline) -> tuple[int, ...]:
    """Return a plan with one message per layer group."""
    return (1,) * len(timeline.ready_ns)


def candidate_plans(timeline: StepTimeline) -> list[tuple[int, ...]]:
    """Return the plans that `plan=tuned` tries, those with fewest messages first."""
    n = len(timeline.nbytes)
    caps = {sum(timeline.nbytes[i:j]) for i in range(n) for j in range(i + 1, n + 1)}
    return sorted(
        {
            one_message_each(timeline),
            plan_optimally(timeline),
            *(plan_by_bytes(timeline, (cap, cap)) for cap in caps),
        },
        key=lambda p: (len(p), p),
    )
