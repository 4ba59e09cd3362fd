"""Racing: all settings run to the same moment of the experiment's clock, those that are clearly behind are dropped, the
others go on from where they are to √2 times that moment, and so on.

Rule: at each rung the settings are put in order, reached targets by their time, then losses. The better third stays; of
the others, a setting stays unless it is clearly behind the best one: over the seeds that both have, the one-sided
`CONFIDENCE` interval of its loss minus the best one's lies above zero (with one seed there is no interval, and the
order decides). In the first quarter, when curves still cross, the best one's loss is that at half the time, so that
only those are dropped that need more than twice the time. Once a setting has reached the target with every seed, those
that have not by `PATIENCE` times the slowest of these are behind.

Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016
(successive halving); Maron and Moore, "Hoeffding races", NIPS 1994 (dropping by intervals).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

KEPT = 1 / 3
CONFIDENCE = 0.95
PATIENCE = 1.2
RUNGS = 8  # before the end: the first is at 1/16 of the longest predicted run
EARLY = 4  # rungs at which curves may still cross
BACK = 2  # rungs to half the time


class Standing(NamedTuple):
    """How one run stands at a rung: `loss` as evaluated there, infinite where it diverged or failed."""

    loss: float
    reached_s: float | None


Team = Mapping[int, Standing]  # a setting's runs by seed


def rungs(predicted: Sequence[float | None]) -> list[float]:
    """Moments of the experiment's clock at which settings are compared, up to the longest predicted run."""
    longest = max(value for value in predicted if value is not None)
    return [longest / 2 ** (k / 2) for k in range(RUNGS, 0, -1)]


def half_time(history: Sequence[Mapping[str, Team]]) -> Mapping[str, Team] | None:
    """What the settings of the next rung are held against: standings at half the time, none for want of them; None
    where it is the best one's at the same time. `history` are the standings of the rungs before."""
    if len(history) >= EARLY:
        return None
    return history[-BACK] if len(history) >= BACK else {}


def verdicts(standings: Mapping[str, Team], before: Mapping[str, Team] | None, at_s: float) -> dict[str, str]:
    """The settings to drop at this rung, with the reason. `before`: how they stood at half the time, where that is what
    they are held against; while nobody stood anywhere then, only who diverged is dropped."""
    order = sorted(standings, key=lambda name: rank_of(list(standings[name].values())))
    best, kept = order[0], math.ceil(len(order) * KEPT)
    mark = standings[best] if before is None else before.get(best, {})
    lag = "" if before is None else " than the best had in half the time"
    found = {}
    for place, name in enumerate(order[1:], start=1):
        reason = diverged(standings[name]) or late(standings[best], standings[name], at_s)
        if reason is None and place >= kept:
            reason = behind(mark, standings[name], lag)
        if reason is not None:
            found[name] = reason
    return found


def rank_of(runs: Sequence[Standing]) -> tuple[float, float]:
    """By how many have not reached the target, then their time, or their loss: less is better."""
    missing = [run for run in runs if run.reached_s is None]
    if missing:
        return len(missing), statistics.fmean(run.loss for run in runs)
    return 0, statistics.median(run.reached_s or 0.0 for run in runs)


def diverged(team: Team) -> str | None:
    return "diverged or failed" if any(math.isinf(run.loss) for run in team.values()) else None


def late(best: Team, other: Team, at_s: float) -> str | None:
    """The best has long reached the target, and this one has not."""
    times = [run.reached_s for run in best.values() if run.reached_s is not None]
    if (
        len(times) < len(best)
        or at_s < PATIENCE * max(times)
        or all(run.reached_s is not None for run in other.values())
    ):
        return None
    return f"had not reached the target by {at_s:.4g} s, which the best did within {max(times):.4g} s"


def behind(best: Team, other: Team, lag: str = "") -> str | None:
    """Why this setting is clearly behind, over the seeds that both have; None where it is not, or has arrived."""
    gaps = [other[seed].loss - best[seed].loss for seed in sorted(best.keys() & other.keys())]
    if not gaps or all(run.reached_s is not None for run in other.values()) or not all(map(math.isfinite, gaps)):
        return None
    mean = statistics.fmean(gaps)
    if len(gaps) == 1:
        return f"loss higher by {mean:.3g}{lag}, with one seed" if mean > 0 else None
    from scipy.stats import t

    low = mean - float(t.ppf(CONFIDENCE, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    if low <= 0:
        return None
    return f"loss higher by {mean:.3g}{lag}, by at least {low:.3g} with {CONFIDENCE:.0%} confidence, {len(gaps)} seeds"
