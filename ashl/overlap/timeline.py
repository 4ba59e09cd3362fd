"""A step as a chain of layer groups, and how long it takes where their gradients travel while
backward goes on.

Model: time counts from the start of a step. Forward takes F, backward then comes to the groups one
after the other, the last layer first: group k is ready at R_k. Messages of one or more neighbouring
groups go through one channel, in that order: each begins when it is ready and the one before has
ended, and takes c(bytes). So a step ends at max(R, max_k (R_k + Σ of the messages from k on)).
Where the next forward pass goes on meanwhile, it comes to group k at N_k and stands still until the
sum of k is in, at D_k: in the long run a step takes max_k (D_k − N_k).

While a sum is under way and backward goes on, backward has lost a share `lost` of its pace, and the
sum takes `slowed` times as long: so R_k is later by what sums before it have taken of it. Both are
measured (`ashl.sync.timing.beside`), with sums of the whole model and without a pause; 0 and 1
where nobody has. What a sum takes of the next forward pass, where it goes on under that, is left
out, and so it is at a server.

A step whose gradient leaves in M > 1 messages also takes longer by itself, by `split_ns` +
M·`part_ns` spread evenly over it, and each sum but the last by `start_ns`: hooks, threads that wake
each other up and take turns on a core. These are measured as well (`ashl.sync.timing.parts`); 0
where nobody has.

Groups are runs of whole tensors, in the order in which the model lists its parameters, which is
taken for the order of its forward pass. Forward is taken for a third of a step, and the rest is
shared out by multiply-adds; tensors below a hundredth of backward are one group with their
neighbour.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; Shi, Chu and Li, "MG-WFBP", INFOCOM 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Self

FORWARD = 1 / 3  # of a step: backward takes two products where forward takes one
LEAST = 0.01  # of backward, for a group of its own


class Bucket(NamedTuple):
    """A run of tensors: elements [start, stop) of the flat vector, there after this share of a
    step.
    """

    start: int
    stop: int
    ready: float
    needed: float = 0.0  # the share after which forward comes to it


@dataclass(frozen=True)
class StepTimeline:
    """What is known of a step when its messages are planned; groups in the order in which backward
    comes to them.
    """

    ready_ns: tuple[int, ...]  # on the slowest worker
    nbytes: tuple[int, ...]
    cost_ns: Callable[[int], int]  # of a message of so many bytes, alone
    half_ns: Callable[[int], int] = lambda nbytes: (
        0
    )  # ... of half a sum, scattered or gathered, or of a pull
    needed_ns: tuple[int, ...] = ()  # when forward comes to each, on the slowest worker
    answer_ns: int = 0  # what a server takes to answer with the model in one piece
    lost: float = 0.0  # the share of its pace that computing loses while a sum is under way
    slowed: float = 1.0  # how many times as long a sum takes meanwhile
    split_ns: float = 0.0  # what a step takes longer whose gradient leaves in several messages
    part_ns: float = 0.0  # ... for each of them
    start_ns: float = 0.0  # what a sum takes longer that is not the last
    reached: tuple[
        float, ...
    ] = ()  # the share of a step after which each group is ready; of no use where these are 0

    @property
    def slows(self) -> bool:
        """Whether sums and computing take something from each other."""
        return self.lost > 0 or self.slowed > 1 or self.in_parts

    @property
    def in_parts(self) -> bool:
        """Whether it costs something that a gradient leaves in parts."""
        return self.split_ns > 0 or self.part_ns > 0 or self.start_ns > 0

    def split(self, messages: int) -> Self:
        """The chain of a step whose gradient leaves in so many."""
        longer = self.split_ns + messages * self.part_ns
        if messages < 2 or not longer:
            return self
        ready = zip(self.ready_ns, self.reached, strict=True)
        return replace(
            self,
            ready_ns=tuple(at + round(longer * share) for at, share in ready),
            split_ns=0.0,
            part_ns=0.0,
        )

    @property
    def latency_ns(self) -> int:
        """Of a message to or from a server."""
        return self.answer_ns - self.half_ns(sum(self.nbytes))

    def end_ns(self, messages: Sequence[int], shares: Sequence[float] | None = None) -> int:
        """When the last of these messages has ended, of which such shares are kept; None = as
        planned.
        """
        end, done, first, timeline = 0.0, 0.0, 0, self.split(len(messages))
        for k, count in enumerate(messages):
            last = first + count
            end, done = timeline.after(
                end, done, last, self.cost(first, last, shares[k] if shares else None)
            )
            first = last
        return round(end)

    def after(self, end: float, done: float, last: int, cost: float) -> tuple[float, float]:
        """When a message has ended that holds the groups up to `last` and costs so much, where the
        one before has at `end`; and how far computing has come by then, in its own time, where it
        had come to `done`.
        """
        ready, cost = self.ready_ns[last - 1], cost + self.start_ns * (last < len(self.ready_ns))
        if done < ready:
            end, done = end + ready - done, ready
        both = min(
            self.slowed * cost, (self.ready_ns[-1] - done) / (1 - self.lost)
        )  # go on for so long
        return end + cost + both * (1 - 1 / self.slowed), done + (1 - self.lost) * both

    def period_ns(self, done_ns: Sequence[int], messages: Sequence[int]) -> int:
        """How long a step takes in the long run whose sums are in then, while the next one's
        forward goes on.
        """
        return max(
            done - self.needed_ns[end - 1]
            for done, end in zip(done_ns, accumulate(messages), strict=True)
        )

    def cost(self, first: int, last: int, share: float | None = None) -> int:
        """Of the groups [first, last) in one message."""
        return self.cost_ns(sum(self.nbytes[first:last]))


@dataclass(frozen=True)
class CompressedTimeline(StepTimeline):
    """The same where messages are compressed: ready once they are encoded."""

    ratio: float | None = field(kw_only=True)  # the density as planned, where there is one
    body_ns: Callable[[int, int, float | None], int] = field(
        kw_only=True
    )  # of [first, last) at a density

    def cost(self, first: int, last: int, share: float | None = None) -> int:
        return self.body_ns(first, last, share or self.ratio)


def buckets_of_tensors(
    shapes: Sequence[tuple[int, ...]], work: Sequence[float]
) -> tuple[Bucket, ...]:
    """The layer groups of tensors of these shapes with these shares of the work, the last one
    first.
    """
    sizes = [math.prod(shape) for shape in shapes]
    whole = sum(work)
    shares = [w / whole for w in work] if whole else [size / sum(sizes) for size in sizes]
    bounds = [0, *accumulate(sizes)]
    parts: list[Bucket] = []
    stop, share, done = bounds[-1], 0.0, 0.0
    for i in reversed(range(len(sizes))):
        share += shares[i]
        if share >= LEAST:
            done += share
            parts.append(
                Bucket(bounds[i], stop, FORWARD + (1 - FORWARD) * done, FORWARD * (1 - done))
            )
            stop, share = bounds[i], 0.0
    last = parts.pop()  # with what is left of the first layers
    return (*parts, last._replace(start=0, ready=1.0, needed=0.0))


def end_shares(parts: Sequence[Bucket]) -> tuple[float, ...]:
    """The shares of a step after which forward has ended with each group, the first layers first,
    and then those after which backward has: of a forward pass that is shared out as backward is.
    """
    forward = min(FORWARD, parts[0].ready)
    before = [forward, *(part.ready for part in parts[:-1])]
    backward = [part.ready - at for part, at in zip(parts, before, strict=True)]
    ends = accumulate(forward * share / sum(backward) for share in reversed(backward))
    return (*(min(end, forward) for end in ends), *(part.ready for part in parts))


def untimed_timeline(parts: Sequence[Bucket]) -> StepTimeline:
    """What is known of a chain without costs."""
    return StepTimeline(
        (0,) * len(parts), tuple(4 * (part.stop - part.start) for part in parts), lambda _: 0
    )


def merge_buckets(parts: Sequence[Bucket], messages: Sequence[int]) -> tuple[Bucket, ...]:
    """What each message holds."""
    ends = list(accumulate(messages))
    return tuple(
        parts[end - 1]._replace(stop=parts[end - count].stop)
        for end, count in zip(ends, messages, strict=True)
    )
