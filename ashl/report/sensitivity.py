"""Find the winner on each cluster of a study that varies one or two properties of the cluster."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ashl.report.leaderboard import ENVIRONMENT, Leaderboard
from ashl.report.measure import Measure

Point = tuple[float, ...]  # a cluster: its value of each varied property


@dataclass(frozen=True, eq=False)
class WinnersByCluster:
    """The ranking of the settings on each cluster, over one or two properties of the cluster.

    `axes` has the values of the properties in increasing order, by title; of a list of factors it
    is the ratio of the largest to the smallest. `costs` has the settings on a cluster with their
    costs, the best first; clusters on which none has a result are absent. `base` is the cluster
    that was written first: by convention the user's.
    """

    axes: Mapping[str, list[float]]
    costs: Mapping[Point, Mapping[str, float]]
    sure: Mapping[Point, bool]  # True if the first is better than all others with confidence
    base: Point
    wins: Mapping[str, int]  # by setting, the most first
    measure: Measure

    def winner(self, point: Point) -> str:
        return next(iter(self.costs[point]))

    def winner_gain(self, point: Point) -> float | None:
        """Return how much better the winner is than the second, as `Measure.gain` does; None if it
        is alone.
        """
        first, *others = (self.measure.order(cost) for cost in self.costs[point].values())
        return self.measure.gain(first, others[0]) if others else None


def find_winners(board: Leaderboard) -> WinnersByCluster | None:
    """Return the rankings of a study whose varied properties are one or two numbers of the cluster.

    Returns None for any other study, and if fewer than two settings compete.
    """
    keys = [key for key in board.axes if key in ENVIRONMENT or key.startswith("cluster.")]
    rows = sorted(board.rows, key=lambda row: row.order)
    written = {key: [row.setting.axes.get(key, "") for row in rows] for key in keys}
    axes, numbers = dict[str, list[float]](), list[list[float]]()
    for key, values in written.items():
        known = [number for value in values if (number := as_number(value)) is not None]
        if len(known) < len(rows) or not 2 <= len({*values}) == len({*known}):
            return None
        title = f"{key} (slowest/fastest)" if values[0].startswith("[") else key
        axes[title] = sorted({*known})
        numbers.append(known)
    if not 1 <= len(axes) <= 2:
        return None
    points = dict(zip(rows, zip(*numbers, strict=True), strict=True))
    costs, sure = dict[Point, dict[str, float]](), dict[Point, bool]()
    for part in board.environments:
        own = {
            row.setting.name(keys): board.measure.order(row.spread.middle)
            for row in part.ranked_rows
        }
        if min(own.values()) < math.inf:
            point = points[part.rows[0]]
            costs[point] = dict(sorted(own.items(), key=lambda entry: entry[1]))
            sure[point] = not part.indistinguishable_rows
    wins = dict.fromkeys((row.setting.name(keys) for row in board.rows), 0)
    for own in costs.values():
        wins[next(iter(own))] += 1
    if len(wins) < 2 or not costs:
        return None
    ordered = dict(sorted(wins.items(), key=lambda entry: -entry[1]))
    by_point = dict(sorted(costs.items()))
    return WinnersByCluster(axes, by_point, sure, points[rows[0]], ordered, board.measure)


def as_number(written: str) -> float | None:
    """Return a value of the cluster as a number; of a list of factors the largest divided by the
    smallest.
    """
    try:
        value = json.loads(written)
        numbers = [float(number) for number in value] if isinstance(value, list) else [float(value)]
        found = max(numbers) / min(numbers) if isinstance(value, list) else numbers[0]
    except (ValueError, TypeError, ZeroDivisionError):
        return None
    return found if math.isfinite(found) else None


def winners_text(winners: WinnersByCluster) -> tuple[str, ...]:
    """Return sentences: the wins of each setting, and the winner at the base."""
    wins = [f"{name} wins {count}" for name, count in winners.wins.items() if count]
    unsure = [*winners.sure.values()].count(False)
    more = f"; in {unsure} of them the first is not separated from all others" if unsure else ""
    by = f"by {winners.measure.title}{more}."
    sentences = [f"Of {len(winners.costs)} clusters, {', '.join(wins)}, {by}"]
    if winners.base in winners.costs:
        pairs = zip(winners.axes, winners.base, strict=True)
        where = " and ".join(f"{name} = {value:g}" for name, value in pairs)
        sure = "" if winners.sure[winners.base] else " (not separated)"
        won = f"{winners.winner(winners.base)} wins{margin_text(winners)}{sure}"
        sentences.append(f"At {where} (written first) {won}.")
    return tuple(sentences)


def margin_text(winners: WinnersByCluster) -> str:
    """Return the lead of the winner at the base, as the end of a clause."""
    _, *others = winners.costs[winners.base]
    better = winners.winner_gain(winners.base)
    if not others:
        return ", alone"
    if better is None:
        return f", the only one that got there ({others[0]} did not)"
    return f", {winners.measure.gain_text(better)} {others[0]}"
