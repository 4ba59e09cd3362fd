"""Draw how stale the applied pushes were: a histogram for each setting."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.records import Run
from ashl.report.svg import COLORS, Scale, drawing, rect, short, text, x_axis, y_axis

MAX_ROUNDS = 10_000  # rounds of one run that are counted
BINS = 20
WIDTH, COLUMNS, HEIGHT = 940, 3, 210


def counted(run: Run) -> Counter[int]:
    """Count pushes by their staleness in server versions, without discarded ones."""
    found: Counter[int] = Counter()
    for event in run.rounds(MAX_ROUNDS):
        if type(event.get("staleness")) is int and not event.get("dropped"):
            found[event["staleness"]] += 1
    return found


def histograms(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Draw the histograms; "" if no run has recorded its events."""
    found = {row: counts for row in rows if row.runs and (counts := counted(row.runs[0]))}
    if not found:
        return ""
    most = max(max(counts) for counts in found.values())
    width = -(-(most + 1) // BINS)
    panels = []
    for index, (row, counts) in enumerate(found.items()):
        left, top = index % COLUMNS * WIDTH / COLUMNS, index // COLUMNS * HEIGHT
        panels.append(_panel(board, row, counts, most, width, left, top))
    return drawing(WIDTH, -(-len(found) // COLUMNS) * HEIGHT, "staleness of pushes", *panels)


def _panel(
    board: Leaderboard,
    row: Row,
    counts: Counter[int],
    most: int,
    width: int,
    left: float,
    top: float,
) -> str:
    bins = Counter({start: 0 for start in range(0, most + 1, width)})
    for staleness, count in counts.items():
        bins[staleness - staleness % width] += count
    total = counts.total()
    end = max(most + 1, width * len(bins))
    across = Scale(-0.5, end - 0.5, left + 62, left + WIDTH / COLUMNS - 16)
    up = Scale(0.0, 1.0, top + HEIGHT - 48, top + 26)
    parts = [
        text(
            left + 12,
            top + 14,
            short(f"{board.rank(row)}  {row.label}", WIDTH / COLUMNS - 20),
            font_weight="bold",
        )
    ]
    parts.append(y_axis(up, across.start, "pushes, %", right=across.end, factor=100.0))
    for start, count in bins.items():
        x, y = across(start - 0.5), up(count / total)
        hint = (
            f"staleness {start}"
            + (f" to {start + width - 1}" if width > 1 else "")
            + f": {100 * count / total:.1f} %"
        )
        size = across(start + width - 0.5) - x
        parts.append(rect(x + 0.1 * size, y, 0.8 * size, up.start - y, hint, fill=COLORS[0]))
    mean = fmean(counts.elements())
    title = f"staleness in versions (mean {mean:.1f}, largest {max(counts)})"
    last = max(end - 1, 1)
    parts.append(x_axis(Scale(0, last, across(0), across(last), whole=True), up.start, title))
    return "".join(parts)
