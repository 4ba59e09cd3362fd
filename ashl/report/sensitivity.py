"""Find the winner on each cluster of a study that varies one or two properties of the cluster."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ashl.report.leaderboard import ENVIRONMENT, Leaderboard
from ashl.report.measure import Measure

Point = tuple[int, ...]  # a position in the grid: an index on each axis


@dataclass(frozen=True, eq=False)
class Axis:
    """A property of the cluster that varies.

    `name` is its title; for a list of factors it is the ratio of the largest to the smallest.
    """

    key: str
    name: str
    values: tuple[float, ...]  # in increasing order
    first: int  # index of the value that was written first: by convention the user's cluster


@dataclass(frozen=True)
class Cell:
    """The ranking on one cluster, the best first, with each contestant's cost.

    `sure` is True if the first is better than all others with confidence.
    """

    ranking: tuple[tuple[str, float], ...]
    sure: bool

    @property
    def winner(self) -> str:
        return self.ranking[0][0]

    def of(self, contestant: str) -> float:
        return dict(self.ranking).get(contestant, math.inf)


@dataclass(frozen=True)
class Terrain:
    """Cells over one or two axes; contestants are in the order of their wins."""

    axes: tuple[Axis, ...]
    contestants: tuple[str, ...]
    cells: Mapping[Point, Cell]
    measure: Measure

    @property
    def base(self) -> Point | None:
        """The position of the values that were written first; None if no setting won there."""
        point = tuple(axis.first for axis in self.axes)
        return point if point in self.cells else None


def terrain(board: Leaderboard) -> Terrain | None:
    """Return the cells of a study whose varied properties are one or two numbers of the cluster.

    Returns None for any other study, and if fewer than two settings compete.
    """
    around = [key for key in board.axes if key in ENVIRONMENT or key.startswith("cluster.")]
    axes = [axis for key in around if (axis := _axis(board, key))]
    if not 1 <= len(axes) <= 2 or len(axes) < len(around):
        return None
    keys, cells = {axis.key for axis in axes}, dict[Point, Cell]()
    for part in board.environments:
        numbers = [as_number(part.rows[0].setting.axes.get(axis.key, "")) for axis in axes]
        known = [
            (axis, number) for axis, number in zip(axes, numbers, strict=True) if number is not None
        ]
        names = {row: row.setting.name(keys) for row in part.rows}
        costs = {names[row]: board.measure.order(row.spread.middle) for row in part.rows}
        ranking = tuple(sorted(costs.items(), key=lambda entry: entry[1]))
        if len(known) == len(axes) and math.isfinite(ranking[0][1]):
            point = tuple(axis.values.index(number) for axis, number in known)
            cells[point] = Cell(ranking, not part.indistinguishable)
    names = dict.fromkeys(row.setting.name(keys) for row in board.rows)
    if len(names) < 2 or not cells:
        return None
    wins = [cell.winner for cell in cells.values()]
    contestants = tuple(sorted(names, key=lambda name: -wins.count(name)))
    return Terrain(tuple(axes), contestants, dict(sorted(cells.items())), board.measure)


def _axis(board: Leaderboard, key: str) -> Axis | None:
    rows = sorted(board.rows, key=lambda row: row.order)
    written = [row.setting.axes.get(key, "") for row in rows]
    numbers = [number for value in written if (number := as_number(value)) is not None]
    if len(numbers) < len(written) or not 2 <= len(set(written)) == len(set(numbers)):
        return None
    values = tuple(sorted(set(numbers)))
    name = f"{key} (slowest/fastest)" if written[0].startswith("[") else key
    return Axis(key, name, values, values.index(numbers[0]))


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


def statement(ground: Terrain) -> tuple[str, ...]:
    """Return sentences: the wins of each contestant, and the winner at the base."""
    winners = [cell.winner for cell in ground.cells.values()]
    wins = [f"{name} wins {winners.count(name)}" for name in ground.contestants if name in winners]
    unsure = sum(not cell.sure for cell in ground.cells.values())
    more = f"; in {unsure} of them the first is not separated from all others" if unsure else ""
    by = f"by {ground.measure.title}{more}."
    sentences = [f"Of {len(ground.cells)} clusters, {', '.join(wins)}, {by}"]
    if (base := ground.base) is not None:
        pairs = zip(ground.axes, base, strict=True)
        where = " and ".join(f"{axis.name} = {axis.values[index]:g}" for axis, index in pairs)
        cell = ground.cells[base]
        sure = "" if cell.sure else " (not separated)"
        won = f"{cell.winner} wins{margin_text(ground, cell)}{sure}"
        sentences.append(f"At {where} (written first) {won}.")
    return tuple(sentences)


def lead(ground: Terrain, cell: Cell) -> float | None:
    """Return how much better the winner is than the second, as `Measure.gain` does."""
    if len(cell.ranking) < 2:
        return None
    own, base = (ground.measure.order(cost) for _, cost in cell.ranking[:2])
    return ground.measure.gain(own, base)


def margin_text(ground: Terrain, cell: Cell) -> str:
    """Return the lead of the winner of a cell, as the end of a clause."""
    if len(cell.ranking) < 2:
        return ", alone"
    second, better = cell.ranking[1][0], lead(ground, cell)
    if better is None:
        return f", the only one that got there ({second} did not)"
    return f", {ground.measure.lead(better)} {second}"


def letters(names: Sequence[str]) -> dict[str, str]:
    """Return a letter for each contestant."""
    places = range(len(names))
    return dict(zip(names, (chr(65 + k) if k < 26 else str(k) for k in places), strict=True))
