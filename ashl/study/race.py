"""Race settings: runs go on to their end one after the other, and clearly inferior settings are
stopped.

No run is begun twice or paused, so a race never does more work than its grid. It begins with the
baseline, which is never dropped, and goes through the settings seed by seed. Of a setting that is
dropped, no other seed is begun.

Rule: settings are compared at times a factor of √2 apart, over the seeds with which both have come
that far. The better third is safe. Another setting is dropped in these cases:
- With every seed its loss is above the best one's at half the time: it needs more than twice the
  time.
- In the second half, after which curves seldom cross: the one-sided `CONFIDENCE` interval of its
  loss minus the best one's lies above zero. With one seed per setting: its loss is higher.
- Another setting has reached the target with the same seeds, and this one has not by `PATIENCE`
  times the slowest of these. While it has only one of several seeds, the factor is `TWICE`.

A setting that was first at the target with some seed, or within `PATIENCE` of the first, is not
judged by its loss any more.

Source: Maron and Moore, "Hoeffding races", NIPS 1994 (dropping by intervals); Jamieson and
Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

KEPT = 1 / 3  # share of the settings that is safe at each comparison
CONFIDENCE = 0.95
PATIENCE, TWICE = 1.2, 2.0  # factors on the time to target of another setting
MOMENTS = 8  # comparisons before the end: the first is at 1/16 of the longest run


class Standing(NamedTuple):
    """The state of a run at a time.

    `loss` is that of the last evaluation before it; infinite if the run diverged or failed.
    """

    loss: float
    reached_s: float | None


class Course(NamedTuple):
    """The progress of a run: its evaluations, its time to target, and whether it has ended."""

    times: Sequence[float]
    losses: Sequence[float]
    reached_s: float | None = None
    ended: bool = False
    failed: bool = False  # failed or diverged

    @property
    def now_s(self) -> float:
        return self.times[-1] if self.times else 0.0

    def at(self, time_s: float) -> Standing | None:
        """Return the state at `time_s`; None if the run has not come so far or has no evaluation
        before.

        A run that has ended keeps its last state.
        """
        if self.failed:
            return Standing(math.inf, None)
        if not self.times or self.times[0] > time_s or (not self.ended and self.now_s < time_s):
            return None
        reached = self.reached_s is not None and self.reached_s <= time_s
        return Standing(
            self.losses[bisect_right(self.times, time_s) - 1], self.reached_s if reached else None
        )


Courses = Mapping[int, Course]  # a setting's runs that have begun, by seed


def moments(horizon_s: float) -> list[float]:
    """Return the times at which settings are compared, up to the end of the longest run."""
    return [horizon_s / 2 ** (k / 2) for k in range(MOMENTS, -1, -1)]


def verdicts(
    field: Mapping[str, Courses], horizon_s: float, seeds: int, stays: Collection[str]
) -> dict[str, tuple[float, str]]:
    """Return the settings to drop now, with the time and the reason.

    Args: seeds is the number of runs of a setting; stays are the settings that are never dropped.
    """
    found, there = {}, first_there(field)
    for name, own in field.items():
        if name in stays or not own:
            continue
        verdict = diverged(own) or late(field, name, seeds)
        for at_s in moments(horizon_s) if name not in there else ():
            verdict = verdict or behind(
                field, name, at_s, early=at_s <= horizon_s / 2, alone=seeds == 1
            )
        if verdict:
            found[name] = verdict
    return found


def rank_of(runs: Sequence[Standing]) -> tuple[float, float]:
    """Return the sort key of a setting, smaller is better: runs without the target, then time or
    loss.
    """
    missing = [run for run in runs if run.reached_s is None]
    if missing:
        return len(missing), statistics.fmean(run.loss for run in runs)
    return 0, statistics.median(run.reached_s or 0.0 for run in runs)


def first_there(field: Mapping[str, Courses]) -> set[str]:
    """Return the settings that were first at the target with some seed, or within `PATIENCE` of
    the first.
    """
    found = set()
    for seed in {seed for runs in field.values() for seed in runs}:
        reached = {name: runs[seed].reached_s for name, runs in field.items() if seed in runs}
        times = {name: time_s for name, time_s in reached.items() if time_s is not None}
        found |= {
            name for name, time_s in times.items() if time_s <= PATIENCE * min(times.values())
        }
    return found


def diverged(own: Courses) -> tuple[float, str] | None:
    failed = [run for run in own.values() if run.failed]
    return (max(run.now_s for run in failed), "diverged or failed") if failed else None


def late(field: Mapping[str, Courses], name: str, seeds: int) -> tuple[float, str] | None:
    """Return the reason if another setting reached the target with these seeds long ago, and
    this one has not.
    """
    own = field[name]
    reached = []
    for other in (runs for n, runs in field.items() if n != name):
        times = [
            time_s
            for seed in own
            if seed in other and (time_s := other[seed].reached_s) is not None
        ]
        reached += [max(times)] if len(times) == len(own) else []
    if not reached:
        return None
    factor = TWICE if len(own) < min(2, seeds) else PATIENCE
    over = [
        run.now_s
        for run in own.values()
        if run.reached_s is None and run.now_s >= factor * min(reached)
    ]
    if not over:
        return None
    return (
        max(over),
        (
            f"had not reached the target by {max(over):.4g} s; the best reached it within"
            f" {min(reached):.4g} s"
        ),
    )


def behind(
    field: Mapping[str, Courses], name: str, at_s: float, *, early: bool, alone: bool
) -> tuple[float, str] | None:
    """Return why this setting is clearly inferior at this time; None if it is not, or if this is
    unknown.
    """
    standings = {
        n: {s: at for s, run in runs.items() if (at := run.at(at_s))} for n, runs in field.items()
    }
    own = standings[name]
    peers = {
        n: [found[s] for s in own]
        for n, found in standings.items()
        if own and own.keys() <= found.keys()
    }
    order = sorted(peers, key=lambda n: rank_of(peers[n]))
    if (
        not own
        or order.index(name) < math.ceil(len(order) * KEPT)
        or all(run.reached_s for run in own.values())
    ):
        return None
    best = field[order[0]]
    before = [best[s].at(at_s / 2) for s in own]
    gaps = [own[s].loss - then.loss for s, then in zip(own, before, strict=True) if then]
    if len(gaps) == len(own) and min(gaps) > 0:
        return (
            at_s,
            f"loss higher by {statistics.fmean(gaps):.3g} than the best had in half the time",
        )
    gaps = [own[s].loss - standings[order[0]][s].loss for s in own]
    if early or not all(map(math.isfinite, gaps)):
        return None
    return surely(at_s, gaps, alone=alone)


def surely(at_s: float, gaps: Sequence[float], *, alone: bool) -> tuple[float, str] | None:
    """Return by how much the loss is higher, if the interval over the seeds lies above zero;
    else None.
    """
    mean = statistics.fmean(gaps)
    if len(gaps) == 1:
        return (at_s, f"loss higher by {mean:.3g}, with one seed") if alone and mean > 0 else None
    from scipy.stats import t

    low = mean - float(t.ppf(CONFIDENCE, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(
        len(gaps)
    )
    sure = f"by at least {low:.3g} with {CONFIDENCE:.0%} confidence, {len(gaps)} seeds"
    return (at_s, f"loss higher by {mean:.3g}, {sure}") if low > 0 else None
