"""Merged-gradient wait-free backpropagation: neighbouring layer groups share one message if the
step then ends earlier.

Use when: gradients are exchanged at every step and the exchange is noticeable: the first overlap to
try.
Avoid when: transfers take much longer than a step: compression helps then.
Alternatives: `wfbp`; `priority` and `dear`, which overlap the next forward pass, too.

Rule: a message of s bytes takes c(s), with the latency c(0). Merging two groups saves one latency,
but their message begins only when both are ready. `plan` decides which groups share a message:
    greedy   from the output to the input, group l joins l − 1 if R(l − 1) < start(l) + c(0), with
             start(l) the time at which the message of l could begin (MG-WFBP as published);
    optimal  the exact minimum over all partitions, E[j] = min_i max(E[i], R of the last group in
             (i, j]) + c((i, j]), for any cost function; the greedy rule misses it if the waits of
             several merges add up. With compute–communication contention the search keeps, for
             the first j groups, every end with the most computing done by then. One message,
             `none`, may be best;
    bytes    by size alone: 1 MiB, then 25 MiB each, as torch's DistributedDataParallel does;
    [2, 3]   as listed: the number of layer groups in each message, last layers first.
Failures: the plan remains. Survivors repeat the round in which a worker failed, with all of its
messages.

Limits: without latency optimal and greedy take as long as `wfbp`. If latency is the whole cost, one
message is best, which is `none`.
Source: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms", INFOCOM 2019; bytes: Li et al., "PyTorch Distributed", VLDB 2020. The exact minimum is
ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.overlap.contract import Overlap
from ashl.overlap.timeline import StepTimeline

MIB = 2**20
CAPS = (MIB, 25 * MIB)  # size of a full message: of the first one, and of the others
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]  # layer groups in each message


@option
class Merged(Overlap):
    """One message per run of layer groups."""

    plan: Literal["greedy", "optimal", "bytes"] | Counts

    @property
    def needs_costs(self) -> bool:
        return self.plan in ("greedy", "optimal")

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        if not isinstance(self.plan, str):
            return plan_as_listed(self.plan, len(timeline.ready_ns))
        return {"greedy": plan_greedily, "optimal": plan_optimally, "bytes": plan_by_bytes}[
            self.plan
        ](timeline)

    def with_plan(self, timeline: StepTimeline) -> Merged:
        return replace(self, plan=self.messages(timeline))


def plan_as_listed(plan: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return a plan from the configuration. Raises: UsageError if it does not hold `groups` layer
    groups.
    """
    if sum(plan) != groups:
        raise UsageError(
            f"overlap.plan={list(plan)}: holds {sum(plan)} layer groups, and the model has"
            f" {groups}; give numbers that add up to {groups}, or remove it"
        )
    return plan


def plan_greedily(timeline: StepTimeline) -> tuple[int, ...]:
    """Return MG-WFBP's plan."""
    latency = timeline.cost_ns(0)
    messages = []
    first = 0  # first group of the present message
    free = 0  # time at which the channel is free for it, ns
    for group in range(1, len(timeline.ready_ns)):
        start = max(free, timeline.ready_ns[group - 1])
        if timeline.ready_ns[group] >= start + latency:
            free = start + timeline.cost(first, group)
            messages.append(group - first)
            first = group
    return (*messages, len(timeline.ready_ns) - first)


def plan_optimally(timeline: StepTimeline) -> tuple[int, ...]:
    """Return the plan that ends first; of several, the one whose last messages hold most.

    For the first j groups the search keeps the plans that no other plan beats in both numbers of
    `Ending`: `end`, and `behind`, the computing that is missing at the end. A plan with a smaller
    end and no more missing is at least as good for all later groups. If a message that begins later
    may end earlier, `behind` is the computing done by the end instead, as a negative number.
    """
    n = len(timeline.ready_ns)
    # True if a message that begins later may end earlier, as it slows computing down by less
    waits = timeline.pace_reduction * timeline.collective_slowdown > 1
    fronts = [[Ending(0.0, 0.0, 0, 0, 0.0)]]  # the plans kept for the first j groups, by j
    for j in range(1, n + 1):
        found = list[Ending]()
        for i in range(j):
            cost = timeline.cost(i, j)
            for place, own in enumerate(fronts[i]):
                end, done = timeline.end_message(own.end, own.done, j, cost)
                found.append(Ending(end, -done if waits else end - done, i, place, done))
        front = list[Ending]()
        for own in sorted(found):
            if not front or own.behind < front[-1].behind - 1e-3:
                front.append(own)
        fronts.append(front)
    plan = []
    j, place = n, 0
    while j:
        own = fronts[j][place]
        plan.append(j - own.first)
        j, place = own.first, own.place
    return tuple(reversed(plan))


class Ending(NamedTuple):
    """The end of a plan for the first groups, and its predecessor in the search."""

    end: float  # ns
    behind: float  # computing that is missing at the end, see `plan_optimally`
    first: int  # first group of the last message
    place: int  # index of the plan before the last message, in the front of `first` groups
    done: float  # computing done by the end, ns without contention


def plan_by_bytes(timeline: StepTimeline, caps: tuple[int, int] = CAPS) -> tuple[int, ...]:
    """Return a plan in which a message is closed once it has reached its size in `caps`."""
    messages = []
    count = held = 0  # layer groups and bytes of the present message
    for nbytes in timeline.nbytes:
        count += 1
        held += nbytes
        if held >= caps[min(len(messages), 1)]:
            messages.append(count)
            count = held = 0
    return (*messages, count) if count else tuple(messages)
