"""Draw accuracy or loss against time and against bytes: the mean over seeds, and the range."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.records import BrokenRecordError, Run
from ashl.report.svg import (
    COLORS,
    DASHES,
    GLYPH,
    INK,
    MARKERS,
    SOFT,
    Scale,
    drawing,
    haloed,
    line,
    marker,
    path,
    rect,
    shape,
    short,
    tag,
    text,
    x_axis,
    y_axis,
)
from ashl.tracking.console import seconds

POINTS = 100  # points of a line
SPACING = 96.0  # pixels between the markers of a line
BELOW = 0.25  # The accuracy axis begins this far below the target.
# The time axis ends at this multiple of the time to target of the slowest setting drawn.
BEYOND = 1.15
MAX_BANDS = 3  # bands of the first settings, and the baseline's; more would hide each other
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 940, 380, 70, 16, 300
NAMES = {
    "test/acc": "accuracy on the test set, %",
    "test/loss": "test loss",
    "train/loss": "training loss",
}
XS = {
    "time_s": "seconds on the experiment's clock",
    "bytes": "MB sent, up and down together, all workers",
}


@dataclass(frozen=True)
class Curve:
    """Mean, lowest and highest value over seeds at each x."""

    xs: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def curve(runs: Sequence[Run], x: str, y: str) -> Curve | None:
    """Return the curve of several seeds.

    A run is interpolated linearly between its evaluations. A run that has ended keeps its last
    value.
    """
    lines = [points for run in runs if (points := _points(run, x, y))]
    if not lines:
        return None
    start, end = max(points[0][0] for points in lines), max(points[-1][0] for points in lines)
    marks = sorted({at for points in lines for at, _ in points if start <= at <= end})
    stride = max(1, math.ceil(len(marks) / POINTS))
    xs = [*marks[:-1:stride], marks[-1]]
    columns = [[_at(points, at) for points in lines] for at in xs]
    return Curve(
        tuple(xs), tuple(map(fmean, columns)), tuple(map(min, columns)), tuple(map(max, columns))
    )


def _points(run: Run, x: str, y: str) -> list[tuple[float, float]]:
    try:
        rows = [row for row in run.metrics if row.get(y) is not None]
    except BrokenRecordError:
        return []
    found = [(sent_mb(row) if x == "bytes" else row["time_s"], row[y]) for row in rows]
    return [
        point for index, point in enumerate(found) if index == 0 or point[0] > found[index - 1][0]
    ]


def sent_mb(row: Mapping[str, Any]) -> float:
    return ((row.get("bytes_up") or 0) + (row.get("bytes_down") or 0)) / 1e6


def _at(points: Sequence[tuple[float, float]], at: float) -> float:
    after = bisect_left(points, at, key=lambda point: point[0])
    if after == 0 or after == len(points):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def scored(runs: Sequence[Run]) -> dict[str, str]:
    """Return the first metric that any run has, with its title: accuracy, the task's own metric,
    or loss.
    """
    own = {run.metric[0] for run in runs if run.metric}
    names = (
        {"test/acc": NAMES["test/acc"]}
        | {f"test/{name}": f"{name} on the test set" for name in own}
        | NAMES
    )
    for key, name in names.items():
        for run in runs:
            try:
                if any(row.get(key) is not None for row in run.metrics):
                    return {key: name}
            except BrokenRecordError:
                continue
    return {}


def chart(board: Leaderboard, rows: Sequence[Row], x: str, y: str = "") -> str:
    """Draw one figure of the given rows; "" if there is nothing to draw.

    Args: x is `time_s` or `bytes`; y is a metric, by default the one that ranks the rows.
    """
    own = next(iter(scored([run for row in rows for run in row.runs]).items()), ("", ""))
    if y == own[0]:
        return ""
    y, name = (y, NAMES[y]) if y else own
    curves = {row: found for row in rows if y and (found := curve(row.runs, x, y))}
    if not curves:
        return ""
    target = board.target.accuracy if board.target and y == "test/acc" else None
    reached = {
        row: row.spread.middle
        for row in curves
        if target and x == "time_s" and math.isfinite(row.spread.middle)
    }
    near = target and any(math.isfinite(row.spread.middle) for row in curves)
    if reached and len(curves) > 1:  # a single run is drawn to its end
        curves = {row: cut(found, BEYOND * max(reached.values())) for row, found in curves.items()}
    ends = [found.xs[-1] for found in curves.values()]
    log = (
        min(ends) > 0
        and max(ends) > 20 * min(ends)
        and all(found.xs[0] > 0 for found in curves.values())
    )
    start = min(found.xs[0] for found in curves.values()) if log else 0.0
    across = Scale(start, max(ends), LEFT, WIDTH - LEGEND, log)
    every = [value for found in curves.values() for value in (*found.low, *found.high)]
    top = max([*every, *([target] if target else [])])
    pad = (top - min(every)) * 0.04 or 0.01
    low = min(every) - pad
    up = Scale(max(low, target - BELOW) if near and target else low, top + pad, HEIGHT - 50, TOP)
    percentages = 100.0 if y == "test/acc" else 1.0
    parts = [
        x_axis(across, HEIGHT - 50, XS[x] + (", logarithmic" if log else ""), top=TOP),
        y_axis(up, LEFT, name, right=WIDTH - LEGEND, factor=percentages),
    ]
    if target:
        parts.append(
            line(LEFT, up(target), WIDTH - LEGEND, up(target), stroke=INK, stroke_dasharray="3 3")
        )
        left, below = WIDTH - LEGEND + 34, TOP + 14 + 22 * len(curves)
        parts.append(line(left, below, left + 34, below, stroke=INK, stroke_dasharray="3 3"))
        parts.append(text(left + 42, below + 4, f"target: {100 * target:g} %", fill=SOFT))
    parts += _stage_boundaries(board, x, across)
    styles = {row: index % len(COLORS) for index, row in enumerate(rows)}
    banded = [
        row
        for row in curves
        if len(curves) <= MAX_BANDS + 1 or row in rows[:MAX_BANDS] or row.is_baseline
    ]
    plot = f"plot-{x}-{y.replace('/', '-')}"
    window = rect(LEFT, TOP - 6, WIDTH - LEGEND - LEFT + 6, HEIGHT - 50 - TOP + 6)
    inside = [_band(curves[row], across, up, COLORS[styles[row]]) for row in banded]
    inside += [
        _line(found, across, up, styles[row], row is rows[0])
        for row, found in reversed(curves.items())
    ]
    parts += [tag("clipPath", window, id=plot), tag("g", *inside, clip_path=f"url(#{plot})")]
    for row, time_s in reached.items():
        there = (across(max(time_s, across.low)), up(target or 0.0))
        parts.append(
            line(
                *there,
                there[0],
                up.start,
                stroke=COLORS[styles[row]],
                stroke_width=1,
                stroke_dasharray="2 2",
            )
        )
        parts.append(marker("ring", *there, COLORS[styles[row]], 4.5))
    parts += _numbers({row: (across(f.xs[-1]), up(f.mean[-1])) for row, f in curves.items()}, board)
    parts += [legend(board, row, index, styles[row]) for index, row in enumerate(curves)]
    return drawing(WIDTH, HEIGHT, f"{name} against {XS[x]}", *parts)


def stages_of(board: Leaderboard) -> Sequence[Mapping[str, Any]]:
    """Return the stages of a single run, each with `name`, `start_s`, `end_s`.

    Returns nothing for several runs or one stage.
    """
    runs = [run for row in board.rows for run in row.runs]
    stages = runs[0].summary.get("stages") or [] if len(runs) == 1 else []
    return stages if len(stages) > 1 else []


def _stage_boundaries(board: Leaderboard, x: str, across: Scale) -> list[str]:
    """Draw the start of each stage of a single run, with the stage's name and start time.

    On the axis of bytes a start is interpolated between evaluations. A stage that begins before the
    first evaluation is not drawn there.
    """
    stages = stages_of(board)
    run = board.rows[0].runs[0]
    sent = [(row["time_s"], sent_mb(row)) for row in run.metrics] if stages and x == "bytes" else []
    placed = [stage for stage in stages if x == "time_s" or stage["start_s"] >= sent[0][0]]
    starts = [_at(sent, stage["start_s"]) if sent else stage["start_s"] for stage in placed]
    begins = [across(max(start, across.low)) for start in starts]
    parts = []
    for stage, begin, end in zip(placed, begins, [*begins[1:], across.end], strict=False):
        if begin > across.start:
            parts.append(
                line(begin, TOP - 6, begin, HEIGHT - 50, stroke=SOFT, stroke_dasharray="6 3")
            )
        width = end - begin
        if width > 3 * GLYPH:
            parts.append(
                haloed(begin + 4, HEIGHT - 70, short(str(stage["name"]), width - 8), 3, fill=SOFT)
            )
        start = f"from {seconds(stage['start_s'])}"
        if width - 8 > GLYPH * len(start):
            parts.append(haloed(begin + 4, HEIGHT - 56, start, 3, fill=SOFT))
    return parts


def cut(found: Curve, end: float) -> Curve:
    """Return the part of a curve before `end`."""
    if found.xs[-1] <= end or found.xs[0] >= end:
        return found
    keep = bisect_left(found.xs, end)
    sides = [(found.mean, "mean"), (found.low, "low"), (found.high, "high")]
    last = {name: (*ys[:keep], _at([*zip(found.xs, ys, strict=True)], end)) for ys, name in sides}
    return Curve((*found.xs[:keep], end), **last)


def _band(found: Curve, across: Scale, up: Scale, color: str) -> str:
    there = [(across(x), up(y)) for x, y in zip(found.xs, found.high, strict=True)]
    back = [(across(x), up(y)) for x, y in zip(found.xs, found.low, strict=True)]
    return shape([*there, *reversed(back)], fill=color, fill_opacity="0.1", stroke="none")


def _line(found: Curve, across: Scale, up: Scale, style: int, first: bool) -> str:
    points = [(across(x), up(y)) for x, y in zip(found.xs, found.mean, strict=True)]
    color = COLORS[style]
    drawn = path(
        points,
        fill="none",
        stroke=color,
        stroke_width=2.8 if first else 1.8,
        stroke_dasharray=DASHES[style] or None,
        stroke_linejoin="round",
    )
    # Markers have another phase in each series, so that overlapping lines can be distinguished.
    start, end = points[0][0] + SPACING / len(COLORS) * style, points[-1][0]
    places = (
        [start + SPACING * k for k in range(int((end - start) // SPACING) + 1)]
        if end > start
        else [end]
    )
    return drawn + "".join(marker(MARKERS[style], x, _at(points, x), color, 3.6) for x in places)


def _numbers(ends: Mapping[Row, tuple[float, float]], board: Leaderboard) -> list[str]:
    """Draw each row's rank at the end of its line, moved until it covers no other rank."""
    placed: list[tuple[float, float]] = []
    parts = []
    for row, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        x, y = x + 7, y + 4
        while any(abs(x - px) < 14 and abs(y - py) < 13 for px, py in placed):
            x, y = (x + 3, y) if x < WIDTH - LEGEND + 14 else (x, y + 3)
        placed.append((x, y))
        parts.append(haloed(x, y, board.rank(row), 3, font_weight="bold"))
    return parts


def legend(board: Leaderboard, row: Row, index: int, style: int) -> str:
    x, y = WIDTH - LEGEND + 34, TOP + 10 + 22 * index
    end = " (baseline)" if row.is_baseline else ""
    name = short(f"{board.rank(row)}  {row.label}", LEGEND - 78 - GLYPH * len(end)) + end
    sample = line(
        x,
        y,
        x + 34,
        y,
        stroke=COLORS[style],
        stroke_width=2.2,
        stroke_dasharray=DASHES[style] or None,
    )
    return (
        sample + marker(MARKERS[style], x + 17, y, COLORS[style], 3.6) + text(x + 42, y + 4, name)
    )
