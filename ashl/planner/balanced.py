"""Balanced planner: equal cycles with integer H, bounds on H, and densities by encoded bytes.

Rule: T_i = t_i · H_i + compress_i + push_i(payload(r_i)) + pull_i. The anchor is the worker with
the longest cycle at H_preset. It keeps H_preset, and so does every worker with the same costs. The
other workers take H_i ∈ [1, h_max] with the least spread max_i T_i − min_i T_i. Among equal spreads
the shorter common cycle T = max_i T_i is taken, with as many steps as fit. D_i = H_i / Σ H.

If the fastest worker cannot fill the anchor's cycle with h_max steps, it becomes the anchor, with H
= h_max. So h_max bounds the cycle of all workers, and a slow worker's H may be below H_preset, down
to 1.

Densities: r_i is the largest density ≥ r_preset whose cycle is at most T. If the dense update costs
no more bytes than the preset density, r_i = 1.

Exact: the spread can only shrink where one more step of some worker just fits. These n + 1
candidates for T are tried, in O(n log n). Without densities and h_max the spread is never larger
than that of `paper`. With densities each candidate is judged by the remaining spread: every cycle
is T, except that of workers that send the dense update and are still earlier.

Source: departs from Shen et al., "ASHL", IEEE TC 73(1), 2024, Algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ashl.option import Count, option
from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, Planner, assignments, costs_of, sent_share

HALVINGS = 16  # bisections of a density: error at most 2e-5


class Load(NamedTuple):
    """Cycle model of one worker: steps · step + base, and up to `room` more for a larger density.

    Nanoseconds.
    """

    step: int
    base: int
    room: int
    most: int | None  # upper bound on the steps

    def cycle(self, steps: int) -> int:
        return steps * self.step + self.base

    def steps_within(self, cycle: int) -> int:
        """Return the largest number of steps that fits into `cycle`, at least 1."""
        fit = max(1, (cycle - self.base) // self.step)
        return fit if self.most is None else min(fit, self.most)

    def longest_cycle(self, steps: int) -> int:
        """Return the cycle with these steps and the dense update."""
        return self.cycle(steps) + self.room


@option
class Balanced(Planner):
    """Planner with the least spread of cycles."""

    h_max: Count | None

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        costs = costs_of(profile, encoded=r_preset is not None)
        whole = sent_share(payload, 1.0)
        least = whole if r_preset is None else min(whole, payload(r_preset))
        loads = [
            Load(c.step, c.cycle(0, least), c.push_of(whole) - c.push_of(least), self.h_max)
            for c in costs
        ]
        cycle, steps = balance_cycles(loads, h_preset)
        ratios = []
        for c, load, h in zip(costs, loads, steps, strict=True):
            spare = max(0, cycle - load.cycle(h))
            if r_preset is None or spare >= load.room:
                ratios.append(1.0)
            else:
                share = least + spare / (c.push - c.empty_push)
                ratios.append(largest_ratio(payload, r_preset, share) if spare else r_preset)
        return assignments(costs, steps, ratios, payload)


def balance_cycles(loads: Sequence[Load], h_preset: int) -> tuple[int, list[int]]:
    """Return the common cycle with the least spread, and each worker's steps in it."""
    anchor, anchor_steps = anchor_of(loads, h_preset)
    loads = [load._replace(most=anchor_steps) if load == loads[anchor] else load for load in loads]
    start = max(loads[anchor].cycle(anchor_steps), *(load.cycle(1) for load in loads))
    at_start = [(load, load.steps_within(start)) for load in loads]
    # shortest of the longest cycles of the workers that are at their bound
    final = min(load.longest_cycle(h) for load, h in at_start if h == load.most)
    more = sorted(
        (load.cycle(h + 1), load.longest_cycle(h), load.room)
        for load, h in at_start
        if h != load.most
    )
    # With one more step of the first k workers: the shortest of the longest cycles of the other
    # workers (behind) and of these k (ahead).
    longest = [own for _, own, _ in reversed(more)]
    behind = [*accumulate(longest, min, initial=final)][::-1]
    ahead = accumulate((cycle + room for cycle, _, room in more), min, initial=final)
    times = [start, *(cycle for cycle, _, _ in more)]
    best = min(
        (max(0, time - min(low)), time) for time, *low in zip(times, behind, ahead, strict=True)
    )
    return best[1], [load.steps_within(best[1]) for load in loads]


def anchor_of(loads: Sequence[Load], h_preset: int) -> tuple[int, int]:
    """Return the worker whose cycle is the measure, and its steps."""
    slowest = max(range(len(loads)), key=lambda i: loads[i].cycle(h_preset))
    if (h_max := loads[0].most) is not None:
        fastest = min(range(len(loads)), key=lambda i: loads[i].cycle(h_max))
        if loads[fastest].cycle(h_max) < loads[slowest].cycle(h_preset):
            return fastest, h_max
    return slowest, h_preset


def largest_ratio(payload: Callable[[float], float], r_preset: float, share: float) -> float:
    """Return the largest density from r_preset with a payload of at most `share` of the dense
    bytes.
    """
    low, high = r_preset, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if payload(middle) <= share else (low, middle)
    return low
