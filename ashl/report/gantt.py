"""The first rounds of each worker, as they overlapped: a panel for each setting, all on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.records import Run
from ashl.report.shares import KINDS, MAX_WORKERS, legend, patterns, style_of
from ashl.report.svg import INK, SOFT, Scale, drawing, line, rect, short, text, x_axis

ROUNDS = 4  # that the slowest worker is shown with
MAX_EVENTS, MAX_SPANS = 3000, 700
STRETCH = 8.0  # the window is at most so many times as long as the quickest setting needs
WIDTH, ROW = 940, 17


@dataclass(frozen=True)
class Opening:
    """The first rounds of one run: by worker, their (kind, start, end), and when each round ended."""

    run: Run
    spans: Mapping[int, Sequence[tuple[str, float, float]]]
    ends: Mapping[int, Sequence[float]]

    @property
    def wanted_s(self) -> float:
        """How long it takes until every worker has ended its first rounds."""
        return max(ends[min(ROUNDS, len(ends)) - 1] for ends in self.ends.values())


def opening(run: Run) -> Opening | None:
    """None where no rounds were recorded."""
    spans: dict[int, list[tuple[str, float, float]]] = {}
    ends: dict[int, list[float]] = {}
    try:
        for event in run.rounds(MAX_EVENTS):
            rank = event["rank"]
            spans.setdefault(rank, []).extend((str(k), float(a), float(b)) for k, a, b in event.get("spans") or ())
            ends.setdefault(rank, []).append(float(event["end_s"]))
            if len(ends) == run.summary["num_workers"] and all(len(found) >= ROUNDS * 8 for found in ends.values()):
                break
    except (KeyError, TypeError, ValueError):
        return None
    return Opening(run, spans, ends) if ends else None


def gantt(board: Leaderboard, rows: Sequence[Row]) -> str:
    """Empty where none of the runs kept its events."""
    found = {row: first for row in rows if row.runs and (first := opening(row.runs[0]))}
    if not found:
        return ""
    wanted = [first.wanted_s for first in found.values()]
    until_s = min(max(wanted), STRETCH * min(wanted)) or max(wanted)
    across = Scale(0.0, until_s, 50, WIDTH - 20)
    seen = {kind for first in found.values() for spans in first.spans.values() for kind, _, _ in spans}
    top = 44.0
    parts = [legend("gantt", [kind for kind in KINDS if kind in seen], 50, 2)]
    for row, first in found.items():
        workers = sorted(first.spans)[:MAX_WORKERS]
        more = (
            f", workers {workers[0]} to {workers[-1]} of {len(first.spans)}" if len(first.spans) > MAX_WORKERS else ""
        )
        name = f"{board.rank(row)}  {row.label} (seed {first.run.seed}{more})"
        parts.append(text(10, top, short(name, WIDTH - 20), font_weight="bold"))
        parts += [_track(rank, first.spans[rank], across, top + 8 + i * ROW) for i, rank in enumerate(workers)]
        top += 8 + len(workers) * ROW
        parts.append(x_axis(across, top + 2, ""))
        top += 50
    parts.append(
        text((across.start + across.end) / 2, top - 16, "seconds on the experiment's clock", text_anchor="middle")
    )
    return drawing(WIDTH, top - 4, "first rounds by worker", patterns("gantt"), *parts)


def _track(rank: int, spans: Sequence[tuple[str, float, float]], across: Scale, y: float) -> str:
    parts = [text(44, y + 11, f"w{rank}", text_anchor="end", fill=SOFT)]
    for kind, start_s, end_s in spans[:MAX_SPANS]:
        if start_s >= across.high:
            break
        left, right = across(start_s), across(min(end_s, across.high))
        if right - left >= 0.2:
            hint = f"worker {rank}, {kind}: {start_s:.4g} to {end_s:.4g} s"
            parts.append(rect(left, y, right - left, ROW - 4, hint, **style_of("gantt", kind)))
    return "".join([*parts, line(across.start, y - 2, across.start, y + ROW - 3, stroke=INK)])
