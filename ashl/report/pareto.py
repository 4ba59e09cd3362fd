"""Draw time against bytes at the target, and the settings that no other beats in both."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from ashl.report.curves import legend, sent_mb
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import Target, measurable, reached_at
from ashl.report.records import Run
from ashl.report.svg import (
    COLORS,
    MARKERS,
    SOFT,
    Scale,
    drawing,
    marker,
    path,
    text,
    x_axis,
    y_axis,
)

WIDTH, HEIGHT, LEFT, TOP, LEGEND = 940, 340, 70, 16, 300


def at_target(runs: Sequence[Run], target: Target) -> tuple[float, float] | None:
    """Return the medians over seeds of the time to the target and of the MB sent by then.

    Returns None if most runs did not reach it.
    """
    found = []
    for run in measurable(runs)[0]:
        time_s = reached_at(run, target)[0]
        sent = [sent_mb(row) for row in run.metrics if row["time_s"] <= time_s]
        found.append((time_s, sent[-1] if sent and math.isfinite(time_s) else math.inf))
    if not found:
        return None
    time_s, sent_by_then = (median(values) for values in zip(*found, strict=True))
    return (time_s, sent_by_then) if math.isfinite(time_s + sent_by_then) else None


def front(points: Mapping[Row, tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both, sorted by time."""
    best: list[tuple[float, float]] = []
    for point in sorted(points.values()):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def scatter(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Draw the figure; "" without a target, or if fewer than two settings reached it."""
    points = {row: at for row in rows if board.target and (at := at_target(row.runs, board.target))}
    if len(points) < 2:
        return ""
    times, sent = zip(*points.values(), strict=True)
    across = _scale(times, LEFT, WIDTH - LEGEND)
    up = _scale(sent, HEIGHT - 50, TOP)
    title = "seconds to the target" + (", logarithmic" if across.log else "")
    parts = [
        x_axis(across, HEIGHT - 50, title, top=TOP),
        y_axis(
            up, LEFT, "MB sent by then" + (", logarithmic" if up.log else ""), right=WIDTH - LEGEND
        ),
    ]
    edge = [(across(x), up(y)) for x, y in front(points)]
    steps = [edge[0], *(corner for a, b in pairwise(edge) for corner in ((b[0], a[1]), b))]
    parts.append(path(steps, fill="none", stroke=SOFT, stroke_dasharray="3 3"))
    styles = {row: index % len(COLORS) for index, row in enumerate(rows)}
    for index, (row, (x, y)) in enumerate(points.items()):
        parts.append(marker(MARKERS[styles[row]], across(x), up(y), COLORS[styles[row]], 5.5))
        parts.append(text(across(x) + 9, up(y) - 7, board.rank(row), font_weight="bold"))
        parts.append(legend(board, row, index, styles[row]))
    left, below = WIDTH - LEGEND + 34, TOP + 14 + 22 * len(points)
    parts.append(path([(left, below), (left + 34, below)], stroke=SOFT, stroke_dasharray="3 3"))
    parts.append(text(left + 42, below + 4, "none is better in both", fill=SOFT))
    return drawing(WIDTH, HEIGHT, "time and bytes at the target", *parts)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    low, high = min(values), max(values)
    if low > 0 and high > 20 * low:
        return Scale(low / 1.3, high * 1.3, start, end, log=True)
    return Scale(0.0, high * 1.1 or 1.0, start, end)
