"""Draw where the workers' time goes as stacked bars, a panel per setting.

The colours and hatchings of the parts of a round are defined here.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.svg import INK, SOFT, Scale, boxes, drawing, line, rect, short, tag, text, x_axis

KINDS = ("compute", "compress", "push", "pull", "wait", "down")
# Hatching and lightness distinguish the kinds on grey paper: dark is compute, white is wait,
# hatched are transfers.
FILL = {
    "compute": "#2f6390",
    "compress": "#8c6bb1",
    "push": "#f0a35e",
    "pull": "#9ccf8f",
    "wait": "#ffffff",
    "down": "#444",
    "part": "#a9c4dc",
    "message": "#e3cf6b",
}
HATCH = {
    "compress": "M0 3H6",
    "push": "M-1 1L1 -1M0 6L6 0M5 7L7 5",
    "pull": "M-1 5L1 7M0 0L6 6M5 -1L7 1",
    "down": "M0 0L6 6M0 6L6 0",
}
MAX_WORKERS = 16
WIDTH, COLUMNS, ROW = 940, 2, 15

Box = tuple[float, float, float, float]  # x, y, width, height


def patterns(prefix: str) -> str:
    """Return the hatchings; `prefix` makes their names unique among several figures on a page."""
    made = []
    for kind, lines in HATCH.items():
        ground = rect(0, 0, 6, 6, fill=FILL[kind])
        stroke = "#fff" if kind in ("down", "compress") else "#00000090"
        hatch = tag("path", d=lines, stroke=stroke, stroke_width="1", fill="none")
        size = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
        made.append(tag("pattern", ground, hatch, id=f"{prefix}-{kind}", **size))
    return tag("defs", *made)


def style_of(prefix: str, kind: str) -> dict[str, str]:
    fill = f"url(#{prefix}-{kind})" if kind in HATCH else FILL.get(kind, "#999")
    return {"fill": fill, "stroke": SOFT, "stroke_width": "0.5"}


def filled(prefix: str, drawn: Sequence[tuple[str, Box]]) -> list[str]:
    """Return rectangles as one shape per kind."""
    return [
        boxes([box for of, box in drawn if of == kind], **style_of(prefix, kind))
        for kind in dict.fromkeys(k for k, _ in drawn)
    ]


def legend(prefix: str, kinds: Sequence[str], x: float, y: float) -> str:
    parts = []
    for kind in kinds:
        parts += [rect(x, y, 26, 12, **style_of(prefix, kind)), text(x + 32, y + 10, kind)]
        x += 110
    return "".join(parts)


def bars(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Draw each worker's shares of the experiment's time, means over a setting's seeds."""
    data = {row: found for row in rows if (found := parts_of(row))}
    if not data:
        return ""
    kinds = [
        kind
        for kind in KINDS
        if any(worker[kind] > 0 for found in data.values() for worker in found)
    ]
    column = WIDTH / COLUMNS
    panels, top = [legend("share", kinds, 40, 2)], 40.0
    items = list(data.items())
    for begin in range(0, len(items), COLUMNS):
        beside = items[begin : begin + COLUMNS]
        for place, (row, found) in enumerate(beside):
            panels.append(_panel(board, row, found, kinds, place * column, top))
        top += max(len(found[:MAX_WORKERS]) for _, found in beside) * ROW + 82
    return drawing(WIDTH, top, "share of time by worker", patterns("share"), *panels)


def parts_of(row: Row) -> list[dict[str, float]]:
    """Return, by worker, the share of each kind as a mean over the seeds."""
    runs = [
        run.summary for run in row.runs if run.summary.get("workers") and run.summary.get("time_s")
    ]
    if not runs:
        return []
    count = min(len(run["workers"]) for run in runs)
    return [
        {kind: fmean(_share(run, i, kind) for run in runs) for kind in KINDS} for i in range(count)
    ]


def _share(summary: Mapping[str, Any], worker: int, kind: str) -> float:
    spent = {kind: summary["workers"][worker].get(f"{kind}_s") or 0.0 for kind in KINDS}
    # Measured parts may add up to a little more than the run's time.
    return spent[kind] / max(summary["time_s"], sum(spent.values()))


def _panel(
    board: Leaderboard,
    row: Row,
    found: Sequence[dict[str, float]],
    kinds: Sequence[str],
    left: float,
    top: float,
) -> str:
    shown = found[:MAX_WORKERS]
    across = Scale(0.0, 1.0, left + 40, left + WIDTH / COLUMNS - 30)
    bottom = top + 8 + len(shown) * ROW
    more = f", workers 0 to {len(shown) - 1} of {len(found)}" if len(found) > len(shown) else ""
    name = f"{board.rank(row)}  {row.label}{more}"
    parts, drawn = (
        [text(left + 10, top, short(name, WIDTH / COLUMNS - 30), font_weight="bold")],
        list[tuple[str, Box]](),
    )
    for worker, shares in enumerate(shown):
        y, start = top + 8 + worker * ROW, 0.0
        parts.append(text(left + 34, y + 11, f"w{worker}", text_anchor="end", fill=SOFT))
        for kind in kinds:
            if shares[kind] > 0:
                width = across(start + shares[kind]) - across(start)
                drawn.append((kind, (across(start), y, width, ROW - 3)))
                start += shares[kind]
    axis = x_axis(across, bottom + 2, "share of the run's time, %", factor=100.0)
    return "".join(
        [
            *parts,
            *filled("share", drawn),
            axis,
            line(across(0), top + 6, across(0), bottom, stroke=INK),
        ]
    )
