"""Draw the outcome against each axis of a study: a dot per setting, a bar at each median."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.svg import (
    COLORS,
    INK,
    SOFT,
    Scale,
    drawing,
    line,
    marker,
    rect,
    short,
    text,
    y_axis,
)

WIDTH, COLUMNS, HEIGHT = 940, 2, 270
MAX_DOTS = 300  # the best settings that are drawn as dots
MAX_VALUES = 16
ABSENT = "(none)"  # value of a setting that has no such key


def multiples(board: Leaderboard) -> str:
    """Draw a panel for each axis; "" if nothing varies."""
    ends = [(row.spread.low, row.spread.middle, row.spread.high) for row in board.rows]
    finite = [value for three in ends for value in three if math.isfinite(value)]
    if not board.axes or not finite:
        return ""
    low, high = min(finite), max(finite)
    log = board.measure.ratio and low > 0 and high > 20 * low
    pad = 1.0 if log else (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    panels = []
    axes = [axis for axis in board.axes if has_values(board, axis)]
    if not axes:
        return ""
    for index, axis in enumerate(axes):
        left, top = index % COLUMNS * WIDTH / COLUMNS, index // COLUMNS * HEIGHT + 0.0
        span = (low / 1.15, high * 1.15) if log else (low - pad, high + pad)
        panels.append(
            _panel(board, axis, Scale(*span, top + HEIGHT - 62, top + 36, log), left, top)
        )
    return drawing(WIDTH, -(-len(axes) // COLUMNS) * HEIGHT, "outcome by axis", *panels)


def has_values(board: Leaderboard, axis: str) -> bool:
    """Return True if the rows have several values on an axis.

    A missing key counts as a value only for a group: the group then has its
    default. A parameter that only
    one option has would repeat the axis of its group.
    """
    found = by_value(board, axis).keys()
    return len(found - {ABSENT} if "." in axis else found) > 1


def by_value(board: Leaderboard, axis: str) -> Mapping[str, list[Row]]:
    """Return the rows by their value on an axis: numbers in their order, words as in the grid."""
    found: dict[str, list[Row]] = {}
    for row in board.rows:
        found.setdefault(row.setting.axes.get(axis, ABSENT), []).append(row)
    numbers = {value: as_number(value) for value in found}
    if all(number is not None for value, number in numbers.items() if value != ABSENT):
        return dict(
            sorted(found.items(), key=lambda item: (numbers[item[0]] is None, numbers[item[0]]))
        )
    return dict(sorted(found.items(), key=lambda item: min(row.order for row in item[1])))


def as_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _panel(board: Leaderboard, axis: str, up: Scale, left: float, top: float) -> str:
    found = by_value(board, axis)
    shown = dict(list(found.items())[:MAX_VALUES])
    start, end = left + 66.0, left + WIDTH / COLUMNS - 16
    column = (end - start) / len(shown)
    measure = board.measure
    unit, factor = (
        (f", {measure.unit}", 1.0)
        if measure.unit
        else (", %", 100.0)
        if not measure.ratio
        else ("", 1.0)
    )
    title = axis + (
        f", the first {MAX_VALUES} of {len(found)} values" if len(found) > len(shown) else ""
    )
    parts = [text(left + 12, top + 16, short(title, WIDTH / COLUMNS - 20), font_weight="bold")]
    parts.append(y_axis(up, start, short(measure.title + unit, 230), right=end, factor=factor))
    if any(math.isinf(row.spread.middle) for row in board.rows):
        parts.append(rect(start, up.start, end - start, 20, fill="#f3f3f3"))
        parts.append(
            text(
                end,
                up.end - 6,
                f"crosses: {measure.worst}",
                text_anchor="end",
                fill=SOFT,
                font_size=11,
            )
        )
    drawn = set(board.rows[:MAX_DOTS])
    for index, (value, rows) in enumerate(shown.items()):
        middle = start + (index + 0.5) * column
        parts += _dots([row for row in rows if row in drawn], up, middle, column)
        good = [row.spread.middle for row in rows if math.isfinite(row.spread.middle)]
        if good:
            y = up(median(good))
            parts.append(
                line(
                    middle - 0.3 * column, y, middle + 0.3 * column, y, stroke=INK, stroke_width=2.4
                )
            )
        turned = column < 64 and len(value) * 7 > column
        where = {"transform": f"rotate(-30 {middle:.0f} {up.start + 34:.0f})"} if turned else {}
        room = column if not turned else 76
        parts.append(
            text(
                middle,
                up.start + 36,
                short(value, room),
                text_anchor="end" if turned else "middle",
                **where,
            )
        )
    return "".join(parts)


def _dots(rows: Sequence[Row], up: Scale, middle: float, column: float) -> list[str]:
    """Draw the dots of a value, spread sideways so that equal values stay visible.

    Settings that did not reach the target are below the axis.
    """
    parts = []
    for index, row in enumerate(rows):
        x = middle + (((index * 7) % 11) - 5) / 11 * min(0.6 * column, 70) * (len(rows) > 1)
        if math.isfinite(row.spread.middle):
            top, bottom = (
                up(min(max(end, up.low), up.high)) for end in (row.spread.high, row.spread.low)
            )
            parts.append(line(x, top, x, bottom, stroke=COLORS[0], stroke_opacity="0.5"))
            parts.append(marker("ring", x, up(row.spread.middle), COLORS[0], 3.4))
        else:
            parts.append(marker("cross", x, up.start + 10, SOFT, 3.0))
    return parts
