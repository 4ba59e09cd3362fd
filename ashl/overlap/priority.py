"""Priorities: gradients travel in slices, those that the next forward pass needs first before the others.

Rule: each layer group is cut into slices of so many parameters, and of those that are ready on all workers the lowest
layer's goes first; one that has begun is not interrupted. Slices are committed while fewer than `credit` parameters
are, and what is committed is not overtaken: a large credit gives priority away, and on real processes spares the
workers to agree so often. The optimizer steps group by group, and the forward pass waits for each group by itself, so
that sums go on under it. With ever smaller slices and no latency a step takes max_k (q_k + R_k + S_k), with q_k the
forward time from k on and S_k what the sums of the layers up to k take: no order can take less, and it is less than
that of `wfbp` by at most the forward time. With slice=auto and credit=auto the simulated time of a step decides: the
slices with which it is shortest, and the largest credit that costs no more than 1 % of it.

Limits: a forward pass that takes no time gives `wfbp` with slices; one group, `none` with slices.
Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019, released
with slices of 40,000 parameters, one at a time; Peng et al., "A Generic Communication Scheduler for Distributed DNN
Training Acceleration" (ByteScheduler), SOSP 2019, whose credit this is (under all-reduce released with slices of 8
million and a credit of 16 million), tuned there by trial runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from heapq import heappop, heappush
from typing import ClassVar, Literal

from ashl.errors import UsageError
from ashl.option import Count, option
from ashl.overlap.chain import Chain, Part
from ashl.overlap.contract import Overlap

LEAST, MOST = 1_000, 500  # parameters in a slice, and slices of a model, that are tried
CREDITS = (1, 2, 4, 8)  # slices
WORTH = 1.01


@option
class Priority(Overlap):
    """Slices by the layer that needs them first, under the next forward pass."""

    crosses: ClassVar[bool] = True
    untimed: ClassVar[str] = "slice=40000 overlap.credit=40000"
    slice: Count | Literal["auto"]
    credit: Count | Literal["auto"]

    def __post_init__(self) -> None:
        if self.slice != "auto" and self.credit != "auto" and self.slice > self.credit:
            raise UsageError(
                f"overlap.slice={self.slice} is larger than overlap.credit={self.credit}, so that no slice could be "
                "sent; give a credit of at least one slice"
            )

    @property
    def timed(self) -> bool:
        return "auto" in (self.slice, self.credit)

    @property
    def credit_bytes(self) -> int:
        assert self.credit != "auto"
        return 4 * self.credit

    def messages(self, chain: Chain) -> tuple[int, ...]:
        return (1,) * len(chain.ready_ns)

    def cuts(self, message: Part) -> list[tuple[int, int]]:
        size = message.stop - message.start
        assert self.slice != "auto"
        return [(start, min(size, start + self.slice)) for start in range(0, size, self.slice)]

    def step_ns(self, chain: Chain) -> int:
        assert self.slice != "auto"
        assert self.credit != "auto"
        return chain.period_ns(done_ns(chain, 4 * self.slice, 4 * self.credit), self.messages(chain))

    def planned(self, chain: Chain) -> Priority:
        if not self.timed:
            return self
        if self.slice != "auto":
            return self._with_credit(chain)
        size, largest, tried = max(LEAST, sum(chain.nbytes) // (4 * MOST)), max(chain.nbytes) // 4, []
        while size < largest:
            tried.append(size)
            size *= 2
        sizes = [n for n in (*tried, largest) if self.credit == "auto" or n <= self.credit] or [self.credit]
        made = [replace(self, slice=n)._with_credit(chain) for n in sizes]
        return min(reversed(made), key=lambda one: one.step_ns(chain))

    def _with_credit(self, chain: Chain) -> Priority:
        """With the largest credit that costs next to nothing."""
        if self.credit != "auto" or self.slice == "auto":
            return self
        made = [replace(self, credit=self.slice * count) for count in CREDITS]
        least = min(one.step_ns(chain) for one in made)
        return max((one for one in made if one.step_ns(chain) <= WORTH * least), key=lambda one: one.credit_bytes)


def done_ns(chain: Chain, slice_bytes: int, credit_bytes: int) -> list[int]:
    """When the sum of each group is in, of a step that has begun at 0: as the simulator has it, slice by slice."""
    groups, done, now, held, posted = len(chain.ready_ns), [0] * len(chain.ready_ns), 0, 0, 0
    waiting: list[tuple[int, int, int]] = []  # heap: (place in forward, number, bytes)
    committed: deque[tuple[int, int]] = deque()  # (group, bytes)

    def post_until(end_ns: float) -> None:
        """What becomes ready before then, and what can be committed of it."""
        nonlocal posted, held
        while posted < groups and chain.ready_ns[posted] < end_ns:
            nbytes = chain.nbytes[posted]
            for start in range(0, nbytes, slice_bytes):
                heappush(waiting, (-posted, start, min(slice_bytes, nbytes - start)))
            posted += 1
            if posted == groups or chain.ready_ns[posted] > chain.ready_ns[posted - 1]:
                commit()

    def commit() -> None:
        nonlocal held
        while waiting and (not held or held < credit_bytes):
            place, _, nbytes = heappop(waiting)
            committed.append((-place, nbytes))
            held += nbytes

    while posted < groups or committed:
        if not committed:
            now = max(now, chain.ready_ns[posted])
            post_until(now + 1)
        group, nbytes = committed.popleft()
        now += chain.cost_ns(nbytes)
        post_until(now)
        held -= nbytes
        done[group] = now
        post_until(now + 1)
        commit()
    return done
