"""Timeline of a step: a chain of layer groups whose gradients travel during the backward pass, and
the time that the step takes.

Model: time counts from the start of a step. The forward pass takes F. Then the backward pass
computes the groups one after another, the last layers first: group k is ready at R_k. A message
holds one or more neighbouring groups. Messages share one channel, in that order: each begins when
it is ready and the message before has ended, and takes c(bytes). So a step ends at max(R, max_k
(R_k + Σ of the messages from k on)). If the next forward pass begins before all messages have
ended, it reaches group k at N_k and waits until the sum of k arrives, at D_k. In the long run a
step then takes max_k (D_k − N_k).

Contention: while a sum is in flight during the backward pass, computing loses a fraction
`pace_reduction` of its speed and the sum takes `collective_slowdown` times as long. So R_k is later
by the time that earlier sums took from it. `ashl.sync.timing.contention` measures both, with sums
of the whole model; without a measurement they are 0 and 1. The slowdown of a next forward pass is
not modelled, nor any contention at a server.

Each sum except the last takes `start_ns` longer, because a thread executes it that shares a core.
`ashl.sync.timing.contention` measures this, too; without a measurement it is 0.

Groups are runs of whole tensors in the order of the model's parameters, which is assumed to be the
order of its forward pass. Forward is assumed to take a third of a step, and multiply-adds divide
the rest among the tensors. A tensor below a hundredth of the backward pass shares a group with its
neighbour.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; Shi, Chu and Li, "MG-WFBP", INFOCOM 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

FORWARD = 1 / 3  # fraction of a step: backward takes two products where forward takes one
LEAST = 0.01  # smallest layer group, as a fraction of backward


ALL_STEPS = math.inf  # `Bucket.delay`: all local steps of a piece of work


class Bucket(NamedTuple):
    """A part of the model that is exchanged as one message; a layer group is the finest one.

    See docs/contributing/overlap.md.
    """

    start: int  # elements [start, stop) of the flat vector
    stop: int
    ready: float = 1.0  # fraction of a step after which backward has computed its gradient
    # fraction of the next step after which forward needs it; 1 = the next step begins with it
    needed: float = 1.0
    priority: int = 0  # rank among ready buckets; the lowest is sent first
    credit: int = 0  # largest number of buckets in flight that none may overtake; 0 = no limit
    merged_alone: bool = False  # True if a server merges it by itself, and returns it at once
    reduce_scattered: bool = False  # True if all are reduce-scattered first, and then gathered
    ratio: float | None = None  # density, if the codec encodes it by itself; None = as planned
    runs: tuple[tuple[int, int], ...] = ()  # its elements, if it is a fragment
    share: float | None = None  # fraction of its elements, drawn at random for each exchange
    # it is exchanged in each round whose number is `offset` modulo `every`
    every: int = 1
    offset: int = 0
    # local steps of the next piece of work that workers take before its exchange is applied
    delay: float = 0


@dataclass(frozen=True)
class StepTimeline:
    """Times and costs of a step for planning its messages; groups are in backward order."""

    ready_ns: tuple[int, ...]  # R_k, on the slowest worker
    nbytes: tuple[int, ...]  # bytes of each group
    cost_ns: Callable[[int], int]  # time of a message of that many bytes, without contention
    # time of a reduce-scatter, an all-gather, or a pull, of that many bytes
    half_ns: Callable[[int], int] = lambda nbytes: 0
    needed_ns: tuple[int, ...] = ()  # N_k, on the slowest worker
    answer_ns: int = 0  # time of a server's reply with the whole model
    pace_reduction: float = (
        0.0  # fraction of its speed that computing loses while a sum is in flight
    )
    collective_slowdown: float = 1.0  # factor on the time of a sum during computing
    start_ns: float = 0.0  # extra time of each sum except the last
    groups: tuple[Bucket, ...] = ()  # the layer groups, if buckets are planned
    # time of a compressed message with the groups [first, last) at a density; None = not compressed
    body_ns: Callable[[int, int, float | None], int] | None = None
    ratio: float | None = None  # planned density; None = not compressed, or a codec without one

    @property
    def has_contention(self) -> bool:
        """Return True if sums and computing slow each other down, or messages cost extra time."""
        return self.pace_reduction > 0 or self.collective_slowdown > 1 or self.start_ns > 0

    @property
    def latency_ns(self) -> int:
        """Latency of a message to or from a server."""
        return self.answer_ns - self.half_ns(sum(self.nbytes))

    def end_ns(self, messages: Sequence[int], shares: Sequence[float] | None = None) -> int:
        """Return the time at which the last of these messages ends.

        Args: `shares` are the densities of the messages; None takes the planned one.
        """
        end = done = 0.0
        first = 0
        for k, count in enumerate(messages):
            last = first + count
            end, done = self.end_message(
                end, done, last, self.cost(first, last, shares[k] if shares else None)
            )
            first = last
        return round(end)

    def end_message(self, end: float, done: float, last: int, cost: float) -> tuple[float, float]:
        """Return (time at which a message ends, computing done by then), both in ns.

        Args: the message before ended at `end`, with `done` computed by then; this one holds the
        groups up to `last` and costs `cost`.
        """
        ready = self.ready_ns[last - 1]
        cost += self.start_ns * (last < len(self.ready_ns))
        if done < ready:
            end = end + ready - done
            done = ready
        pace, slowdown = 1 - self.pace_reduction, self.collective_slowdown
        # time during which the message and backward overlap
        both = min(slowdown * cost, (self.ready_ns[-1] - done) / pace)
        return end + cost + both * (1 - 1 / slowdown), done + pace * both

    def period_ns(self, done_ns: Sequence[int], messages: Sequence[int]) -> int:
        """Return the time of a step in the long run whose messages end at `done_ns`, under the next
        forward pass.
        """
        return max(
            done - self.needed_ns[end - 1]
            for done, end in zip(done_ns, accumulate(messages), strict=True)
        )

    def cost(self, first: int, last: int, share: float | None = None) -> int:
        """Return the time of one message with the groups [first, last), at the density `share`."""
        if self.body_ns is not None:
            return self.body_ns(first, last, share or self.ratio)
        return self.cost_ns(sum(self.nbytes[first:last]))


def buckets_of_tensors(
    shapes: Sequence[tuple[int, ...]], work: Sequence[float]
) -> tuple[Bucket, ...]:
    """Return the layer groups of tensors of these shapes, in backward order.

    Args: `work` is the work of each tensor, in any unit.
    """
    sizes = [math.prod(shape) for shape in shapes]
    whole = sum(work)
    shares = [w / whole for w in work] if whole else [size / sum(sizes) for size in sizes]
    bounds = [0, *accumulate(sizes)]
    parts: list[Bucket] = []
    stop = bounds[-1]
    share = done = 0.0  # work of the present group, and of all finished groups
    for i in reversed(range(len(sizes))):
        share += shares[i]
        if share >= LEAST:
            done += share
            parts.append(
                Bucket(bounds[i], stop, FORWARD + (1 - FORWARD) * done, FORWARD * (1 - done))
            )
            stop, share = bounds[i], 0.0
    last = parts.pop()  # the group of the first layers, which takes the remaining tensors
    return (*parts, last._replace(start=0, ready=1.0, needed=0.0))


def end_shares(parts: Sequence[Bucket]) -> tuple[float, ...]:
    """Return the fractions of a step after which forward has ended with each group, first layers
    first, then those of backward.

    The forward pass is divided among the groups as the backward pass is.
    """
    forward = min(FORWARD, parts[0].ready)
    before = [forward, *(part.ready for part in parts[:-1])]
    backward = [part.ready - at for part, at in zip(parts, before, strict=True)]
    ends = accumulate(forward * share / sum(backward) for share in reversed(backward))
    return (*(min(end, forward) for end in ends), *(part.ready for part in parts))


def untimed_timeline(parts: Sequence[Bucket]) -> StepTimeline:
    """Return a timeline without costs."""
    nbytes = tuple(4 * (part.stop - part.start) for part in parts)
    return StepTimeline((0,) * len(parts), nbytes, lambda _: 0, groups=tuple(parts))


def merge_buckets(parts: Sequence[Bucket], messages: Sequence[int]) -> tuple[Bucket, ...]:
    """Return the layer groups of each message as one bucket."""
    ends = list(accumulate(messages))
    return tuple(
        parts[end - 1]._replace(stop=parts[end - count].stop)
        for end, count in zip(ends, messages, strict=True)
    )
