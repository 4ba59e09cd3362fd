"""Merged-gradient wait-free backpropagation: neighbouring layer groups travel as one message where
that ends earlier.

Rule: a message of s bytes costs c(s), with a latency c(0) that merging saves and waiting for the
merged group's ready time pays for. By `plan`:
    greedy   from the output to the input, l is merged into l − 1 while R(l − 1) < start(l) + c(0),
             with start(l) the
             moment at which the message of l could begin (MG-WFBP as published)
    optimal  the exact minimum over all cuts, E[j] = min_i max(E[i], R of the last group in (i, j])
             + c((i, j]), for
             any cost function; the greedy rule misses it where the waits of several merges add up.
             Where sums slow
             computing down, of the first j groups all ends are kept at which it had come furthest,
             and where parts
             cost a step something, of each number of messages; that may well leave one, which is
             `none`
    bytes    by size alone: 1 MiB, then 25 MiB each, as torch's DistributedDataParallel does
    [2, 3]   as given: how many groups each message holds, the last layers first
The plan stays where a worker is lost: that round is done once more without it, all of its messages.

Limits: without latency optimal = greedy = `wfbp` in time; with all latency one message is best,
which is `none`.
Source: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms", INFOCOM 2019; bytes, Li et al., "PyTorch Distributed", VLDB 2020. The exact minimum is
our own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.overlap.contract import Overlap
from ashl.overlap.timeline import StepTimeline

MIB = 2**20
CAPS = (MIB, 25 * MIB)  # of the first message, and of the others
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]  # layer groups in each message


@option
class Merged(Overlap):
    """A message for each run of groups that is better sent at once."""

    plan: Literal["greedy", "optimal", "bytes"] | Counts

    @property
    def timed(self) -> bool:
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
    """A plan that somebody gave for so many layer groups. Raises UsageError."""
    if sum(plan) != groups:
        raise UsageError(
            f"overlap.plan={list(plan)} holds {sum(plan)} layer groups, and the model has {groups};"
            " give numbers that add up to that, or drop it"
        )
    return plan


def plan_greedily(timeline: StepTimeline) -> tuple[int, ...]:
    """MG-WFBP's plan."""
    latency, messages = timeline.cost_ns(0), []
    first = free = 0  # where the message under way begins, and when the channel is free for it
    for group in range(1, len(timeline.ready_ns)):
        start = max(free, timeline.ready_ns[group - 1])
        if timeline.ready_ns[group] >= start + latency:
            free = start + timeline.cost(first, group)
            messages.append(group - first)
            first = group
    return (*messages, len(timeline.ready_ns) - first)


def plan_optimally(timeline: StepTimeline) -> tuple[int, ...]:
    """The plan that ends first; of several the one whose last messages hold most.

    Where each message costs the step something, those of two messages, of three and so on are
    tried, until no plan ends sooner by what so many cost, or the best does with no more.
    """
    n = len(timeline.ready_ns)
    if not (timeline.split_ns or timeline.part_ns):
        return fastest_plan(timeline)
    best: tuple[int, ...] = (n,)
    for count in range(2, n + 1):
        split = timeline.split(count)
        bound = fastest_plan(split)
        if split.end_ns(bound) >= timeline.end_ns(best):
            break
        if len(bound) <= count or not timeline.part_ns:
            return bound
        best = min(best, fastest_plan(split, count), key=timeline.end_ns)
    return best


def fastest_plan(timeline: StepTimeline, messages: int | None = None) -> tuple[int, ...]:
    """The plan of so many messages, or of any number, that ends first; what their number costs is
    in the chain.

    Who ends no later and lets computing stand no further back is no worse however it goes on, so
    that of the first j groups only plans count which no other is better than in both. How far back
    it stands is what it lacks at that end of the time until then, which who ends later computes
    meanwhile; where a message that begins later may end earlier, as it slows computing down by
    less, it is what it has still to do.
    """
    n, waits = len(timeline.ready_ns), timeline.lost * timeline.slowed > 1
    counted, count = messages is not None, messages or 0
    fronts = {
        (0, 0): [Ending(0.0, 0.0, 0, 0, 0.0)]
    }  # of the first j groups in k messages; 0 = in any number
    costs = {(i, j): timeline.cost(i, j) for j in range(1, n + 1) for i in range(j)}
    for j, k in product(range(1, n + 1), range(counted, count + 1)):
        found = list[Ending]()
        for i in range(j):
            for place, own in enumerate(fronts.get((i, k - counted), ())):
                end, done = timeline.after(own.end, own.done, j, costs[i, j])
                found.append(Ending(end, -done if waits else end - done, i, place, done))
        front = fronts[j, k] = list[Ending]()
        for own in sorted(found):
            if not front or own.behind < front[-1].behind - 1e-3:
                front.append(own)
    plan, j, place = [], n, 0
    while j:
        own = fronts[j, count][place]
        plan.append(j - own.first)
        j, place, count = own.first, own.place, count - counted
    return tuple(reversed(plan))


class Ending(NamedTuple):
    """How a plan of the first groups ends, and from where its last message begins."""

    end: float
    behind: float  # how far back computing stands then
    first: int
    place: int  # of the plan before it in the front there
    done: float  # how far computing has come by then, in its own time


def plan_by_bytes(timeline: StepTimeline, caps: tuple[int, int] = CAPS) -> tuple[int, ...]:
    """A message is full once it has reached its cap."""
    messages, count, held = [], 0, 0
    for nbytes in timeline.nbytes:
        count, held = count + 1, held + nbytes
        if held >= caps[min(len(messages), 1)]:
            messages.append(count)
            count = held = 0
    return (*messages, count) if count else tuple(messages)
