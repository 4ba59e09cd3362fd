"""Draw which setting wins where: a map over two axes, or curves and their crossing over one
axis.
"""

import math

from ashl.report.crossover import Cell, Point, Terrain, flip, letters, ratio_of
from ashl.report.svg import (
    COLORS,
    DASHES,
    FAINT,
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
    short,
    tag,
    text,
    x_axis,
    y_axis,
)

WIDTH, LEFT, TOP, LEGEND = 940, 90, 20, 280
MAX_DRAWN = len(COLORS)  # contestants with a pattern of their own
ANGLES = (None, 45, -45, 0, 90, 22, -22, 67)  # degrees of the hatching of each contestant's cells


def figure(ground: Terrain) -> str:
    return _map(ground) if len(ground.axes) == 2 else _lines(ground)


def _map(ground: Terrain) -> str:
    across, up = ground.axes
    wide = min(110.0, (WIDTH - LEFT - LEGEND) / len(across.values))
    high = min(62.0, 420 / len(up.values))
    bottom = TOP + high * len(up.values)
    named = letters(ground.contestants)
    parts = []
    for i in range(len(across.values)):
        for j in range(len(up.values)):
            box = (LEFT + i * wide, bottom - (j + 1) * high, wide, high)
            parts.append(_cell(ground, ground.cells.get((i, j)), box, named))
    if base := ground.base:
        x, y = LEFT + base[0] * wide, bottom - (base[1] + 1) * high
        parts.append(
            rect(x + 1.5, y + 1.5, wide - 3, high - 3, fill="none", stroke=INK, stroke_width=3)
        )
    for i, value in enumerate(across.values):
        parts.append(
            text(
                LEFT + (i + 0.5) * wide, bottom + 17, f"{value:g}", text_anchor="middle", fill=SOFT
            )
        )
    for j, value in enumerate(up.values):
        parts.append(
            text(
                LEFT - 8, bottom - (j + 0.5) * high + 4, f"{value:g}", text_anchor="end", fill=SOFT
            )
        )
    middle_x, middle_y = LEFT + wide * len(across.values) / 2, (TOP + bottom) / 2
    parts.append(text(middle_x, bottom + 38, across.name, text_anchor="middle"))
    turn = f"rotate(-90 26 {middle_y:.0f})"
    parts.append(text(26, middle_y, up.name, text_anchor="middle", transform=turn))
    x = LEFT + wide * len(across.values) + 24
    parts += _legend(ground, x, named)
    height = max(bottom + 50, TOP + 22 * (len(ground.contestants) + 4))
    return drawing(WIDTH, height, "who wins where", _hatches(), *parts)


def _cell(
    ground: Terrain,
    cell: Cell | None,
    box: tuple[float, float, float, float],
    named: dict[str, str],
) -> str:
    x, y, wide, high = box
    edge = {"stroke": "#fff", "stroke_width": 1.5}
    if cell is None:
        return rect(*box, "no setting got there", fill="#f3f3f3", **edge) + text(
            x + wide / 2, y + high / 2 + 4, "–"
        )
    number = ground.contestants.index(cell.winner) % MAX_DRAWN
    hint = "; ".join(f"{name}: {ground.measure.text(abs(cost))}" for name, cost in cell.ranking[:6])
    ground_color = rect(*box, hint, fill=f"url(#win-{number})", **edge)
    halo = {"width": 4, "text_anchor": "middle"}
    letter = named[cell.winner] + ("" if cell.sure else "?")
    size = 17 if high > 34 else 13
    parts = [
        haloed(
            x + wide / 2,
            y + high / 2 + (0 if high > 34 else 5),
            letter,
            font_size=size,
            font_weight="bold",
            **halo,
        )
    ]
    if high > 34 and wide > 44:
        parts.append(haloed(x + wide / 2, y + high / 2 + 18, margin(ground, cell), **halo))
    return ground_color + "".join(parts)


def margin(ground: Terrain, cell: Cell) -> str:
    """Return the lead of the winner, as text for a cell."""
    if len(cell.ranking) < 2 or not math.isfinite(cell.ranking[1][1]):
        return "alone"
    if not ground.measure.ratio:
        return f"+{100 * (cell.ranking[1][1] - cell.ranking[0][1]):.1f}"
    return f"{ratio_of(ground.measure, cell):.2f}×"


def _hatches() -> str:
    made = []
    for index, angle in enumerate(ANGLES):
        ground = rect(0, 0, 8, 8, fill=COLORS[index], fill_opacity="0.22")
        stroke = (
            ""
            if angle is None
            else line(0, 4, 8, 4, stroke=COLORS[index], stroke_width="1.6", stroke_opacity="0.6")
        )
        turn = {"patternTransform": f"rotate({angle})"} if angle else {}
        size = {"width": 8, "height": 8, "patternUnits": "userSpaceOnUse"}
        made.append(tag("pattern", ground, stroke, id=f"win-{index}", **size, **turn))
    return tag("defs", *made)


def _legend(ground: Terrain, x: float, named: dict[str, str]) -> list[str]:
    parts, y = [], TOP + 12.0
    for index, name in enumerate(ground.contestants):
        wins = sum(cell.winner == name for cell in ground.cells.values())
        fill = f"url(#win-{index % MAX_DRAWN})" if wins else FAINT
        parts.append(rect(x, y - 11, 22, 14, fill=fill, stroke=SOFT, stroke_width="0.5"))
        parts.append(text(x + 30, y, short(f"{named[name]}  {name} ({wins})", WIDTH - x - 34)))
        y += 22
    notes = [
        "(n): clusters that it wins",
        "number in a cell: how far the second is",
        "behind; ?: not separated",
    ]
    if ground.base:
        notes.append("framed: the values written first")
    return parts + [
        text(x, y + 8 + 17 * index, note, fill=SOFT) for index, note in enumerate(notes)
    ]


def _lines(ground: Terrain) -> str:
    """Draw each contestant's curve over one axis, and a dashed line where the base's winner
    changes.
    """
    axis, height = ground.axes[0], 360.0
    sign = 1.0 if ground.measure.lower_is_better else -1.0
    curves = {name: _curve(ground, name, sign) for name in ground.contestants[:MAX_DRAWN]}
    every = [value for points in curves.values() for _, value in points]
    log = ground.measure.ratio and min(every) > 0 and max(every) > 5 * min(every)
    pad = (max(every) - min(every)) * 0.06 or 1.0
    ends = (min(every) / 1.1, max(every) * 1.1) if log else (min(every) - pad, max(every) + pad)
    whole = axis.name.endswith("workers")
    across = Scale(axis.values[0], axis.values[-1], LEFT, WIDTH - LEGEND, axis.log, whole=whole)
    up = Scale(*ends, height - 50, TOP, log)
    unit, factor = (
        (f", {ground.measure.unit}", 1.0)
        if ground.measure.unit
        else ("", 1.0 if ground.measure.ratio else 100.0)
    )
    parts = [
        x_axis(across, height - 50, axis.name + (", logarithmic" if axis.log else ""), top=TOP)
    ]
    parts.append(y_axis(up, LEFT, ground.measure.title + unit, right=WIDTH - LEGEND, factor=factor))
    for index, (name, points) in enumerate(curves.items()):
        drawn = [(across(x), up(y)) for x, y in points]
        if drawn:
            style = {
                "fill": "none",
                "stroke": COLORS[index],
                "stroke_width": 2.2,
                "stroke_dasharray": DASHES[index] or None,
            }
            parts += [
                path(drawn, **style),
                *(marker(MARKERS[index], *point, COLORS[index]) for point in drawn),
            ]
        y = TOP + 12 + 22 * index
        style = {
            "stroke": COLORS[index],
            "stroke_width": 2.2,
            "stroke_dasharray": DASHES[index] or None,
        }
        parts += [line(WIDTH - LEGEND + 30, y, WIDTH - LEGEND + 64, y, **style)]
        parts += [marker(MARKERS[index], WIDTH - LEGEND + 47, y, COLORS[index])]
        parts.append(text(WIDTH - LEGEND + 72, y + 4, short(name, LEGEND - 80)))
    base = ground.base
    change = flip(ground, base) if base else None
    if change:
        parts.append(
            _mark(across(change.changes[axis][1]), height - 50, f"{change.changes[axis][1]:.3g}")
        )
    return drawing(WIDTH, height, "who wins where", *parts)


def _curve(ground: Terrain, name: str, sign: float) -> list[tuple[float, float]]:
    points: list[tuple[Point, float]] = [
        (point, cell.of(name)) for point, cell in ground.cells.items()
    ]
    return [
        (ground.axes[0].values[point[0]], sign * cost)
        for point, cost in points
        if math.isfinite(cost)
    ]


def _mark(x: float, bottom: float, label: str) -> str:
    rule = line(x, TOP, x, bottom, stroke=INK, stroke_dasharray="4 3", stroke_width=1.5)
    return rule + haloed(x, TOP + 10, label, 4, text_anchor="middle")
