"""Find where the winner changes over one or two properties of the cluster.

The functions are pure: from a leaderboard to cells, from cells to the smallest change that has
another winner (a flip), from a flip to a sentence. Distances on an axis are logarithms of ratios:
doubling a bandwidth is as far as halving it. On an axis that contains zero, distances are shares of
its range.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ashl.report.leaderboard import ENVIRONMENT, Leaderboard, Row, effect_of
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

    @property
    def log(self) -> bool:
        return self.values[0] > 0

    def place(self, value: float) -> float:
        return (
            math.log(value)
            if self.log
            else (value - self.values[0]) / (self.values[-1] - self.values[0])
        )

    def value(self, place: float) -> float:
        return (
            math.exp(place)
            if self.log
            else self.values[0] + place * (self.values[-1] - self.values[0])
        )


@dataclass(frozen=True)
class Cell:
    """The ranking on one cluster, the best first, with each contestant's cost.

    `sure` is True if the first two are separated.
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


@dataclass(frozen=True)
class Flip:
    """The smallest change of the cluster that has another winner.

    `changes` maps each axis that changes to its old and new value. If `exact`, the new value is
    where two curves cross, by interpolation between cells. Else it is that of the nearest cell with
    another winner.
    """

    changes: Mapping[Axis, tuple[float, float]]  # from, to
    old: str
    new: str
    distance: float
    exact: bool


def terrain(board: Leaderboard) -> Terrain | None:
    """Return the cells of a study whose varied properties are one or two numbers of the cluster.

    Returns None for any other study, and if fewer than two settings compete.
    """
    around = [key for key in board.axes if key in ENVIRONMENT or key.startswith("cluster.")]
    axes = [axis for key in around if (axis := _axis(board, key))]
    if not 1 <= len(axes) <= 2 or len(axes) < len(around):
        return None
    at: dict[Point, dict[str, Row]] = {}
    for row in board.rows:
        numbers = [as_number(row.setting.axes.get(axis.key, "")) for axis in axes]
        if all(number is not None for number in numbers):
            point = tuple(
                axis.values.index(number)
                for axis, number in zip(axes, numbers, strict=True)
                if number is not None
            )
            at.setdefault(point, {})[row.setting.name({axis.key for axis in axes})] = row
    names = list(dict.fromkeys(name for rows in at.values() for name in rows))
    cells = {
        point: cell for point, rows in sorted(at.items()) if (cell := _cell(rows, board.measure))
    }
    if len(names) < 2 or not cells:
        return None
    wins = {name: sum(cell.winner == name for cell in cells.values()) for name in names}
    return Terrain(
        tuple(axes), tuple(sorted(names, key=lambda name: -wins[name])), cells, board.measure
    )


def _axis(board: Leaderboard, key: str) -> Axis | None:
    written = [
        row.setting.axes.get(key, "") for row in sorted(board.rows, key=lambda row: row.order)
    ]
    numbers = [as_number(value) for value in written]
    found = [number for number in numbers if number is not None]
    if len(found) < len(numbers) or len(set(found)) < 2 or len(set(found)) < len(set(written)):
        return None
    values = tuple(sorted(set(found)))
    name = f"{key} (slowest/fastest)" if written[0].startswith("[") else key
    return Axis(key, name, values, values.index(found[0]))


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


def _cell(rows: Mapping[str, Row], measure: Measure) -> Cell | None:
    costs = {name: measure.order(row.spread.middle) for name, row in rows.items()}
    order = sorted(rows, key=costs.__getitem__)
    if not math.isfinite(costs[order[0]]):
        return None
    sure = len(order) == 1
    if not sure:
        found = effect_of(measure, *(rows[name] for name in order[:2]))
        sure = found is not None and found.ahead
    return Cell(tuple((name, costs[name]) for name in order), sure)


def flip(ground: Terrain, base: Point) -> Flip | None:
    """Return the nearest change from the base cell that has another winner; None if the grid has
    none.
    """
    found = [
        change
        for along in range(len(ground.axes))
        for step in (-1, 1)
        if (change := _along(ground, base, along, step))
    ]
    if len(ground.axes) == 2 and all(axis.log for axis in ground.axes):
        found += _across(ground, base)
    return min(found, key=lambda change: change.distance, default=None)


def _along(ground: Terrain, base: Point, along: int, step: int) -> Flip | None:
    """Search along one axis for the first curve that crosses the curve of the base cell's
    winner.
    """
    axis, old = ground.axes[along], ground.cells[base].winner
    before, index = base, base[along] + step
    while 0 <= index < len(axis.values):
        point = (*base[:along], index, *base[along + 1 :])
        if point in ground.cells:
            here = ground.cells[point]
            if here.winner != old:
                faster = [name for name, cost in here.ranking if cost < here.of(old)]
                places = {
                    name: _crossing(ground, axis, along, before, point, old, name)
                    for name in faster
                }
                start = axis.place(axis.values[base[along]])
                new = min(faster, key=lambda name: abs(places[name][0] - start))
                place, exact = places[new]
                change = {axis: (axis.values[base[along]], axis.value(place))}
                return Flip(change, old, new, abs(place - start), exact)
            before = point
        index += step
    return None


def _crossing(
    ground: Terrain, axis: Axis, along: int, before: Point, after: Point, old: str, new: str
) -> tuple[float, bool]:
    """Return where two curves cross between two cells, on straight lines.

    Returns the farther cell and False if one of the curves has no number there.
    """
    ends = [axis.place(axis.values[point[along]]) for point in (before, after)]
    gaps = [_cost(ground, point, new) - _cost(ground, point, old) for point in (before, after)]
    if not all(map(math.isfinite, gaps)) or gaps[0] <= gaps[1]:
        return ends[1], False
    share = gaps[0] / (gaps[0] - gaps[1])
    return ends[0] + share * (ends[1] - ends[0]), True


def _cost(ground: Terrain, point: Point, name: str) -> float:
    cost = ground.cells[point].of(name)
    return math.log(cost) if ground.measure.lower_is_better and 0 < cost < math.inf else cost


def _across(ground: Terrain, base: Point) -> list[Flip]:
    """Return the cells with another winner that are on neither axis through the base cell."""
    old = ground.cells[base].winner
    found = []
    for point, cell in ground.cells.items():
        if cell.winner != old and all(a != b for a, b in zip(point, base, strict=True)):
            changes = {
                axis: (axis.values[b], axis.values[p])
                for axis, b, p in zip(ground.axes, base, point, strict=True)
            }
            distance = math.hypot(
                *(axis.place(to) - axis.place(start) for axis, (start, to) in changes.items())
            )
            found.append(Flip(changes, old, cell.winner, distance, False))
    return found


def statement(ground: Terrain) -> tuple[str, ...]:
    """Return sentences: the wins of each contestant, the winner at the base, and the smallest
    flip.
    """
    wins = {
        name: sum(cell.winner == name for cell in ground.cells.values())
        for name in ground.contestants
    }
    counts = ", ".join(f"{name} wins {count}" for name, count in wins.items() if count)
    unsure = sum(not cell.sure for cell in ground.cells.values())
    unsure_text = f"; in {unsure} of them the first two are not separated" if unsure else ""
    sentences = [
        f"Of {len(ground.cells)} clusters, {counts}, by {ground.measure.title}{unsure_text}."
    ]
    base = ground.base
    if base is None:
        return tuple(sentences)
    where = " and ".join(
        f"{axis.name} = {axis.values[i]:g}" for axis, i in zip(ground.axes, base, strict=True)
    )
    cell = ground.cells[base]
    unsure_here = "" if cell.sure else " (not separated)"
    sentences.append(
        f"At {where} (written first) {cell.winner} wins{margin_text(ground, cell)}{unsure_here}."
    )
    change = flip(ground, base)
    if change is None:
        return (*sentences, "No change inside this grid flips that.")
    steps = [_step(axis, start, to) for axis, (start, to) in change.changes.items()]
    about = "about " if change.exact else "at the latest "
    by = (
        "where the two curves cross, by interpolation"
        if change.exact
        else "the nearest cell with another winner"
    )
    changes = " and ".join(steps).format(about=about)
    return (
        *sentences,
        f"The smallest change that flips it: {changes} ({by}); then {change.new} wins.",
    )


def _step(axis: Axis, start: float, to: float) -> str:
    factor = f", a factor of {to / start:.3g}" if axis.log else ""
    name = axis.name.replace("{", "{{").replace("}", "}}")
    return f"{name} from {start:g} to {{about}}{to:.3g}{factor}"


def margin_text(ground: Terrain, cell: Cell) -> str:
    """Return the lead of the winner of a cell, as the end of a clause."""
    if len(cell.ranking) < 2:
        return ", alone"
    second, cost = cell.ranking[1]
    if not math.isfinite(cost):
        return f", the only one that got there ({second} did not)"
    if not ground.measure.ratio:
        return f", {100 * (cost - cell.ranking[0][1]):.1f} points ahead of {second}"
    ratio = ratio_of(ground.measure, cell)
    return (
        f", {ratio:.2f} {ground.measure.better}"
        f" {'as' if ground.measure.better.endswith('fast') else 'than'} {second}"
    )


def ratio_of(measure: Measure, cell: Cell) -> float:
    """Return how many times better the first is than the second; infinite if the second has no
    number.
    """
    first, second = (abs(cost) for _, cost in cell.ranking[:2])
    return (
        (second / first if measure.lower_is_better else first / second)
        if first and second
        else math.inf
    )


def letters(names: Sequence[str]) -> dict[str, str]:
    """Return a letter for each contestant."""
    return {
        name: chr(ord("A") + index) if index < 26 else str(index)
        for index, name in enumerate(names)
    }


def lead(ground: Terrain, cell: Cell) -> str:
    """Return the lead of the winner, as text for a cell of the map."""
    if len(cell.ranking) < 2 or not math.isfinite(cell.ranking[1][1]):
        return "alone"
    if not ground.measure.ratio:
        return f"+{100 * (cell.ranking[1][1] - cell.ranking[0][1]):.1f}"
    return f"{ratio_of(ground.measure, cell):.2f}×"
