"""Equal cycles by choice of integers instead of rounding, with bounds on H and true bytes.

Rule: T_i = t_i · H_i + compress_i + push_i(payload(r_i)) + pull_i. The worker slowest at H_preset,
the anchor, keeps H_preset, as does every worker of the same costs; the others take H_i ∈ [1, h_max]
so that the spread max_i T_i − min_i T_i is least, of equal spreads the shorter common cycle T =
max_i T_i, and in it as many steps as fit. D_i = H_i / Σ H.

Where the fastest worker cannot fill the anchor's cycle with h_max steps, it is the anchor, at
h_max: h_max bounds everybody's cycle, and a slow worker's H goes below H_preset, down to 1.

Ratios: r_i is the largest ratio ≥ r_preset whose cycle stays within T; where keeping everything
costs no more bytes than the preset ratio does, r_i = 1.

Exact: a spread can only become less where one more step of some worker just fits, so these n + 1
candidates for T are tried, in O(n log n). Without ratios and h_max the spread is never larger than
`paper`'s. With ratios each candidate is judged by the spread that they leave: everybody's cycle is
T, but for those who send everything and are still earlier.

Source: departs from Shen et al., "ASHL", IEEE TC 73(1), 2024, Algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ashl.option import Count, option
from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, Planner, assignments, costs_of, sent

HALVINGS = 16  # a ratio is found to within 2e-5


class Load(NamedTuple):
    """One worker: its cycle takes steps · step + base, and up to `room` more where more is sent.
    Nanoseconds.
    """

    step: int
    base: int
    room: int
    most: int | None  # bound on its steps

    def cycle(self, steps: int) -> int:
        return steps * self.step + self.base

    def fill(self, cycle: int) -> int:
        """The most steps that fit, at least 1."""
        fit = max(1, (cycle - self.base) // self.step)
        return fit if self.most is None else min(fit, self.most)

    def reach(self, steps: int) -> int:
        return self.cycle(steps) + self.room


@option
class Balanced(Planner):
    """The least spread of cycles."""

    h_max: Count | None

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        costs = costs_of(profile, encoded=r_preset is not None)
        whole = sent(payload, 1.0)
        least = whole if r_preset is None else min(whole, payload(r_preset))
        loads = [
            Load(c.step, c.cycle(0, least), c.push_of(whole) - c.push_of(least), self.h_max)
            for c in costs
        ]
        cycle, steps = balance(loads, h_preset)
        ratios = []
        for c, load, h in zip(costs, loads, steps, strict=True):
            spare = max(0, cycle - load.cycle(h))
            if r_preset is None or spare >= load.room:
                ratios.append(1.0)
            else:
                share = least + spare / (c.push - c.empty_push)
                ratios.append(largest_ratio(payload, r_preset, share) if spare else r_preset)
        return assignments(costs, steps, ratios, payload)


def balance(loads: Sequence[Load], h_preset: int) -> tuple[int, list[int]]:
    """The common cycle with the least spread, and everybody's steps in it."""
    anchor, kept = anchor_of(loads, h_preset)
    loads = [load._replace(most=kept) if load == loads[anchor] else load for load in loads]
    start = max(loads[anchor].cycle(kept), *(load.cycle(1) for load in loads))
    now = [(load, load.fill(start)) for load in loads]
    final = min(
        load.reach(h) for load, h in now if h == load.most
    )  # of those who take no step more
    more = sorted(
        (load.cycle(h + 1), load.reach(h), load.room) for load, h in now if h != load.most
    )
    # With k of them one step further: what those who stay behind, and those who have moved, reach
    # at least.
    behind = list(accumulate((reach for _, reach, _ in reversed(more)), min, initial=final))[::-1]
    ahead = accumulate((cycle + room for cycle, _, room in more), min, initial=final)
    times = [start, *(cycle for cycle, _, _ in more)]
    best = min(
        (max(0, time - min(low)), time) for time, *low in zip(times, behind, ahead, strict=True)
    )
    return best[1], [load.fill(best[1]) for load in loads]


def anchor_of(loads: Sequence[Load], h_preset: int) -> tuple[int, int]:
    """Whose cycle is the measure, and the steps that this worker keeps."""
    slowest = max(range(len(loads)), key=lambda i: loads[i].cycle(h_preset))
    if (h_max := loads[0].most) is not None:
        fastest = min(range(len(loads)), key=lambda i: loads[i].cycle(h_max))
        if loads[fastest].cycle(h_max) < loads[slowest].cycle(h_preset):
            return fastest, h_max
    return slowest, h_preset


def largest_ratio(payload: Callable[[float], float], r_preset: float, share: float) -> float:
    """The largest ratio from r_preset up whose message is at most this share of the dense model's
    bytes.
    """
    low, high = r_preset, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if payload(middle) <= share else (low, middle)
    return low
