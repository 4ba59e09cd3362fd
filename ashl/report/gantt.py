"""Draw the first rounds of each worker, and the whole run: a panel per setting, one time axis."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.records import Run
from ashl.report.shares import KINDS, MAX_WORKERS, Box, filled, legend, patterns
from ashl.report.svg import INK, SOFT, Scale, drawing, line, short, text, x_axis
from ashl.tracking.timeline import parts_of

ROUNDS = 4  # rounds of the slowest worker that are shown
MAX_EVENTS, MAX_SPANS = 3000, 700
STRETCH = 8.0  # The window is at most this many times as long as the fastest setting needs.
WIDTH, ROW = 940, 17
COLUMNS, WIDE = 435, 2.0  # parts of a whole run, and pixels of each
MAX_WHOLE = 40_000  # most events that are read for the whole run


@dataclass(frozen=True)
class Opening:
    """The first rounds of one run: by worker, its spans (kind, start, end) and the ends of its
    rounds.
    """

    run: Run
    spans: Mapping[int, Sequence[tuple[str, float, float]]]
    # By worker, the parts of its steps and their messages.
    aside: Mapping[int, Mapping[str, Sequence[tuple[str, float, float]]]]
    ends: Mapping[int, Sequence[float]]

    @property
    def wanted_s(self) -> float:
        """Seconds until every worker has ended its first rounds."""
        return max(ends[min(ROUNDS, len(ends)) - 1] for ends in self.ends.values())


def opening(run: Run) -> Opening | None:
    """Return the first rounds of a run; None if no rounds were recorded."""
    spans: dict[int, list[tuple[str, float, float]]] = {}
    aside: dict[int, dict[str, list[tuple[str, float, float]]]] = {}
    ends: dict[int, list[float]] = {}
    try:
        for event in run.rounds(MAX_EVENTS):
            rank = event["rank"]
            spans.setdefault(rank, []).extend(
                (str(k), float(a), float(b)) for k, a, b in event.get("spans") or ()
            )
            own = aside.setdefault(rank, {"parts": [], "sums": []})
            own["parts"] += [("part", a, b) for a, b in parts_of(event)]
            own["sums"] += [("message", float(a), float(b)) for a, b in event.get("messages") or ()]
            ends.setdefault(rank, []).append(float(event["end_s"]))
            if len(ends) == run.summary["num_workers"] and all(
                len(found) >= ROUNDS * 8 for found in ends.values()
            ):
                break
    except (KeyError, TypeError, ValueError):
        return None
    return Opening(run, spans, aside, ends) if ends else None


def gantt(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Draw the first rounds; "" if no run has recorded its events."""
    found = {row: first for row in rows if row.runs and (first := opening(row.runs[0]))}
    if not found:
        return ""
    wanted = [first.wanted_s for first in found.values()]
    until_s = min(max(wanted), STRETCH * min(wanted)) or max(wanted)
    across = Scale(0.0, until_s, 50, WIDTH - 20)
    tracks = [
        spans
        for first in found.values()
        for rank, own in first.spans.items()
        for spans in (own, *first.aside[rank].values())
    ]
    seen = {kind for spans in tracks for kind, _, _ in spans}
    top = 44.0
    kinds = [kind for kind in (*KINDS, "part", "message") if kind in seen]
    parts, drawn = [legend("gantt", kinds, 50, 2)], list[tuple[str, Box]]()
    for row, first in found.items():
        workers, y = sorted(first.spans)[:MAX_WORKERS], top + 8
        more = (
            f", workers {workers[0]} to {workers[-1]} of {len(first.spans)}"
            if len(first.spans) > MAX_WORKERS
            else ""
        )
        name = f"{board.rank(row)}  {row.label} (seed {first.run.seed}{more})"
        parts.append(text(10, top, short(name, WIDTH - 20), font_weight="bold"))
        for rank in workers:
            for name, spans in [(f"w{rank}", first.spans[rank]), *first.aside[rank].items()]:
                if not spans:
                    continue
                parts.append(text(44, y + 11, name, text_anchor="end", fill=SOFT))
                parts.append(line(across.start, y - 2, across.start, y + ROW - 3, stroke=INK))
                drawn += _track(spans, across, y)
                y += ROW
        top = y
        parts.append(x_axis(across, top + 2, ""))
        top += 50
    parts.append(
        text(
            (across.start + across.end) / 2,
            top - 16,
            "seconds on the experiment's clock",
            text_anchor="middle",
        )
    )
    return drawing(
        WIDTH, top - 4, "first rounds by worker", patterns("gantt"), *filled("gantt", drawn), *parts
    )


def _track(
    spans: Sequence[tuple[str, float, float]], across: Scale, y: float
) -> Iterator[tuple[str, Box]]:
    """Yield the spans of one worker as rectangles with their kinds."""
    for kind, start_s, end_s in spans[:MAX_SPANS]:
        if start_s >= across.high:
            break
        left, right = across(start_s), across(min(end_s, across.high))
        if right - left >= 0.2:
            yield kind, (left, y, right - left, ROW - 4)


def whole(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Draw one whole run of each setting: in each column of pixels the main activity of a worker.

    Returns "" if no run has recorded its events.
    """
    found = {row: spent for row in rows if row.runs and (spent := columns(row.runs[0]))}
    if not found:
        return ""
    seen = {kind for spent in found.values() for track in spent.values() for kind in track if kind}
    top, parts = 44.0, [legend("whole", [kind for kind in KINDS if kind in seen], 50, 2)]
    drawn: list[tuple[str, Box]] = []
    for row, spent in found.items():
        across = Scale(0.0, row.runs[0].summary["time_s"], 50, 50 + WIDE * COLUMNS)
        name = f"{board.rank(row)}  {row.label} (seed {row.runs[0].seed})"
        parts.append(text(10, top, short(name, WIDTH - 20), font_weight="bold"))
        for place, (rank, track) in enumerate(sorted(spent.items())[:MAX_WORKERS]):
            y, start = top + 8 + place * ROW, 0
            parts.append(text(44, y + 11, f"w{rank}", text_anchor="end", fill=SOFT))
            for kind, same in groupby(track):
                width = len(list(same))
                if kind:
                    drawn.append((kind, (50 + WIDE * start, y, WIDE * width, ROW - 4)))
                start += width
        top += 8 + min(len(spent), MAX_WORKERS) * ROW
        parts.append(x_axis(across, top + 2, ""))
        top += 50
    parts.append(
        text(
            50 + WIDE * COLUMNS / 2,
            top - 16,
            "seconds on the experiment's clock",
            text_anchor="middle",
        )
    )
    return drawing(
        WIDTH,
        top - 4,
        "the whole run by worker",
        patterns("whole"),
        *filled("whole", drawn),
        *parts,
    )


def columns(run: Run) -> dict[int, list[str]]:
    """Return, by worker, the main activity in each of `COLUMNS` equal parts of the run.

    The activity is "" where no round was recorded.
    """
    time_s = run.summary.get("time_s") or 0.0
    spent: dict[int, list[dict[str, float]]] = {}
    try:
        for event in run.rounds(MAX_WHOLE) if time_s else ():
            parts = spent.setdefault(event["rank"], [{} for _ in range(COLUMNS)])
            for kind, start_s, end_s in event.get("spans") or ():
                low, high = (
                    min(max(float(at) / time_s * COLUMNS, 0.0), COLUMNS) for at in (start_s, end_s)
                )
                for place in range(int(low), min(math.ceil(high), COLUMNS)):
                    share = min(high, place + 1) - max(low, place)
                    parts[place][str(kind)] = parts[place].get(str(kind), 0.0) + share
    except (KeyError, TypeError, ValueError):
        return {}
    return {
        rank: [max(part, key=part.__getitem__, default="") for part in parts]
        for rank, parts in spent.items()
    }
