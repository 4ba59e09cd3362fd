"""Draw the figures of a report with matplotlib: SVG for the page, PDF and PNG for papers.

A function that draws returns None if its runs did not record what it needs.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import accumulate, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams, style
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ashl.report.answer import gain_number
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.measure import first_metric, split_readable
from ashl.report.records import Run
from ashl.report.sensitivity import WinnersByCluster, find_winners
from ashl.tracking import jsonl, timeline
from ashl.tracking.console import seconds

STYLE = Path(__file__).with_name("report.mplstyle")
WIDTH, DPI = 940, 96  # pixels of a figure on the page, and pixels per inch
INK, SOFT = "#1a1a1a", "#5f5f5f"
POINTS: dict[str, Any] = {"textcoords": "offset points"}
CLOCK, SENT = "seconds on the experiment's clock", "MB sent, up and down together, all workers"
DOTTED: dict[str, Any] = {"color": INK, "dashes": (3, 3), "linewidth": 0.8, "marker": ""}
# Fill, hatching and line colour of each kind of time. Hatching and lightness distinguish them on
# grey paper: dark is compute, white is wait, hatched are transfers.
LOOKS = {
    "compute": ("#2f6390", "", SOFT),
    "compress": ("#8c6bb1", "--", "#ffffff"),
    "push": ("#f0a35e", "////", "#6b5a4a"),
    "pull": ("#9ccf8f", "\\\\\\\\", "#4f6b4a"),
    "wait": ("#ffffff", "", SOFT),
    "down": ("#444444", "xxx", "#ffffff"),
    "part": ("#a9c4dc", "", SOFT),
    "message": ("#e3cf6b", "", SOFT),
}
EMPTY: dict[str, Any] = {"facecolor": "#f3f3f3", "linewidth": 0}  # a cell without a winner
HATCHES = ("", "//", "\\\\", "--", "||", "xx", "..", "++")  # fill patterns of the settings on a map
MAX_BANDS = 3  # bands of the first settings, and the baseline's; more would hide each other
BELOW = 25.0  # The accuracy axis begins at most this many points below the target.
BEYOND = 1.15  # The time axis ends at this multiple of the slowest time to target drawn.
NAME_HIGH = 10.0  # points between the names of two lines that end at one place
MAX_WORKERS = 16
ROUNDS = 4  # rounds of the slowest worker in the figure of the first rounds
MAX_EVENTS = 3000  # most events that are read for the first rounds
# The first rounds end at most at this multiple of the time the fastest setting needs.
STRETCH = 8.0

TIMES, CURVES, PANELS, GANTTS = 20, 8, 6, 3  # settings drawn, in addition to the baseline

# Notes below figures.
RINGS = "where a setting reaches the target{}; the time axis ends soon after the last of them."
SINGLE_LINES = f"Lines: one run of each setting. Rings: {RINGS.format('')}"
MEAN_LINES = (
    "Lines: means over seeds; bands: the range over seeds, of the first three and the baseline. A"
    f" run that has ended keeps its last value. Rings: {RINGS.format(', by its median')}"
)
TIME_MARKS = (
    "Dots and numbers: medians; lines: their intervals, as in the leaderboard. Arrows: lower"
    " bounds, where runs did not reach the target. Dotted line: the baseline."
)
ONE_RUN_RING = "Ring: the run reaches the target."
TRAINING = "On the training set, at each evaluation."
KINDS_NOTE = (
    "Push and pull: a transfer of its own keeps the worker from computing. Wait: it is blocked"
    " until other workers have caught up, or until the server answers."
)
TRACKS_NOTE = (
    "w0, w1, ...: the workers, from the start of the run. Below a worker whose transfers overlap"
    " with computation: the parts of its steps, and the messages of its collectives."
)
BYTES = "Bytes as sent, headers and indices included."
MAP_NOTES = (
    "(n): clusters that it wins",
    "number in a cell: how far the second is",
    "behind; ?: not separated",
)

Spans = list[tuple[str, float, float]]  # kind of time, start and end [s]
Tracks = list[tuple[str, Spans]]  # with a label each


@contextmanager
def report_style(**settings: Any) -> Generator[None]:
    """Draw in the report's style, without warnings of letters that a font lacks."""
    with style.context([STYLE, settings]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        yield


@dataclass(frozen=True)
class Figure:
    """A figure with its title and note."""

    title: str
    drawing: Drawing
    note: str

    def to_bytes(self, kind: str) -> bytes:
        """Return the figure as a file: svg, pdf or png. Equal figures have equal bytes.

        A pdf or png, which goes into a paper, has no empty margin. The svg keeps the full width:
        figures below each other on a page then have equal scales.
        """
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        file = io.BytesIO()
        with report_style(**{"svg.hashsalt": self.title}):
            ground = "white" if kind == "png" else "none"
            self.drawing.savefig(
                file,
                format=kind,
                metadata=undated.get(kind),
                facecolor=ground,
                bbox_inches=None if kind == "svg" else "tight",
            )
        return file.getvalue()

    @cached_property
    def svg(self) -> str:
        """The figure as an element of a page, in the page's font."""
        text = self.to_bytes("svg").decode()
        text = re.sub("<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r' id="[a-z]+[0-9a-z]*_\d+"', "", text)
        text = re.sub(r"\s*\n\s*", " ", text)
        start = f'<svg role="img" aria-label="{escape(self.title)}" '
        text = text[text.index("<svg") :].replace("<svg ", start, 1)
        return text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")


def add_axes(drawing: Drawing, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a place in pixels from the left and from the top."""
    full = drawing.get_figheight() * DPI
    place = (left / WIDTH, 1 - (top + height) / full, width / WIDTH, height / full)
    return drawing.add_axes(place)


def new_drawing(height: float) -> Drawing:
    return Drawing(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)


def wrap(text: str, pixels: float) -> str:
    """Break a text into lines of about the given width, for a legend."""
    return textwrap.fill(text, int(pixels / 6.6), max_lines=3, placeholder="…")


def full_name(board: Leaderboard, row: Row) -> str:
    return f"{board.rank(row)}  {row.label}{' (baseline)' * row.is_baseline}"


def name_of(board: Leaderboard, row: Row, pixels: float) -> str:
    """Return rank and name, shortened to about the given width."""
    name, room = f"{board.rank(row)}  {row.label}", int(pixels / 6.6)
    return name if len(name) <= room else name[: room - 1] + "…"


def series_style(index: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of a series; later markers are hollow."""
    cycle = rcParams["axes.prop_cycle"].by_key()
    found = {key: values[index % len(values)] for key, values in cycle.items()}
    return found | ({"markerfacecolor": "white"} if found["marker"] in "vP<" else {})


def add_series_legend(axes: Axes, board: Leaderboard, rows: Iterable[Row], styles: Mapping) -> None:
    """Name series beside a plot, and then other lines that have a label."""
    lines = []
    for row in rows:
        lines.append(Line2D([], [], label=wrap(full_name(board, row), 190), **styles[row]))
    lines += [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    axes.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.05, 1.03))


def set_scale(axes: Axes, which: str, low: float, high: float, title: str) -> bool:
    """Title the axis "x" or "y", and make it logarithmic over more than a factor of 20."""
    axis, log = getattr(axes, f"{which}axis"), bool(low > 0 and high > 20 * low)
    if log:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_label_text(title + ", logarithmic" * log)
    return log


def kind_style(kind: str) -> dict[str, Any]:
    fill, hatch, edge = LOOKS.get(kind, ("#999999", "", SOFT))
    return {"facecolor": fill, "hatch": hatch, "edgecolor": edge, "linewidth": 0.4}


def add_kinds_legend(drawing: Drawing, tracks: Iterable[Tracks]) -> None:
    seen = {kind for own in tracks for _, spans in own for kind, _, _ in spans}
    handles = [Patch(label=kind, **kind_style(kind)) for kind in LOOKS if kind in seen]
    drawing.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.03, 1), ncols=8)


def draw_tracks(axes: Axes, tracks: Tracks, until: float) -> None:
    """Draw tracks from the top, as far as `until`.

    All spans of a kind are one shape: in print, each hatched shape costs as much as a picture.
    """
    corners: dict[str, list] = {}
    for place, (_, spans) in enumerate(tracks):
        low, high = place - 0.38, place + 0.38
        for kind, start, last in spans:
            end = min(last, until)
            if start < end:
                corner = [(start, low), (end, low), (end, high), (start, high), (start, low)]
                corners.setdefault(kind, []).append(corner)
    for kind, own in corners.items():
        shape = Outline.make_compound_path_from_polys(np.array(own))
        axes.add_patch(PathPatch(shape, **kind_style(kind)))
    axes.set_yticks(range(len(tracks)), [label for label, _ in tracks])
    axes.set(xlim=(0, until), ylim=(len(tracks) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.grid(False)


def draw_predictions(points: pd.DataFrame, near: float) -> Figure:
    """Draw predictions against published figures on logarithmic axes.

    Args: points has the columns source, published, predicted and kept_back; points kept back are
    filled. `near` is the error at which two lines are drawn.
    """
    values = points[["published", "predicted"]].to_numpy()
    ends = np.array([values.min() / 2, values.max() * 2])
    with report_style():
        drawing = new_drawing(460)
        axes = add_axes(drawing, 70, 12, 560, 390)
        axes.plot(ends, ends, color=INK, linewidth=0.8, marker="", linestyle="-")
        for factor in (1 - near, 1 + near):
            axes.plot(ends, factor * ends, **DOTTED)
        for index, (source, own) in enumerate(points.groupby("source", sort=False)):
            color = series_style(index)["color"]
            for kept_back, part in own.groupby("kept_back"):
                is_named = kept_back or not own["kept_back"].any()
                axes.plot(
                    part["published"],
                    part["predicted"],
                    color=color,
                    marker="os^DXvP<*h"[index % 10],
                    linestyle="",
                    markerfacecolor=color if kept_back else "white",
                    label=source if is_named else None,
                )
        for which, title in (("x", "published, each in its unit"), ("y", "predicted")):
            set_scale(axes, which, *ends, title)
        axes.set(xlim=ends, ylim=ends)
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.01))
    return Figure("Predicted against published", drawing, "")


def draw_times(board: Leaderboard, rows: Sequence[Row]) -> Drawing | None:
    """Draw the time to target of each setting with its interval, the best one first."""
    known = [
        value
        for row in rows
        for value in (row.spread.middle, row.spread.low, row.spread.high, row.spread.bound)
        if math.isfinite(value)
    ]
    if not board.measure.is_time or len(rows) < 2 or not known:
        return None
    names = [wrap(full_name(board, row), 225) for row in rows]
    high = len(rows) * (10 + 14 * max(len(name.splitlines()) for name in names))
    drawing = new_drawing(high + 62)
    axes = add_axes(drawing, 250, 12, WIDTH - 350, high)
    log = set_scale(axes, "x", min(known), max(known), f"{board.measure.title}, seconds")
    for place, row in enumerate(rows):
        found = row.spread
        # A run that diverged has no bound: it would not have reached the target at any time shown.
        low, last = (min(end, found.bound, max(known)) for end in (found.low, found.high))
        axes.plot([low, last], [place, place], color=INK, marker="", linestyle="-")
        if math.isfinite(found.middle):
            axes.plot(found.middle, place, "o", color=INK)
        if math.isinf(found.high):
            axes.plot(last, place, ">", color=INK, markerfacecolor="white", markersize=7)
        # In a column of their own, where neither an interval nor the baseline's line runs.
        text, beside = board.measure.text(found.middle, found.bound), axes.get_yaxis_transform()
        axes.annotate(text, (1, place), (12, -3), xycoords=beside, **POINTS, color=SOFT)
    if (base := board.baseline) and math.isfinite(base.spread.middle):
        axes.axvline(base.spread.middle, zorder=0, **DOTTED)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlim=(None if log else 0, None), ylim=(len(rows) - 0.5, -0.5))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False, axis="y")
    return drawing


def sent_mb(row: Mapping[str, Any]) -> float:
    return ((row.get("bytes_up") or 0) + (row.get("bytes_down") or 0)) / 1e6


def mean_curve(runs: Sequence[Run], x: str, y: str) -> pd.DataFrame | None:
    """Return the mean, lowest and highest value of a metric over seeds, by time or by MB sent.

    A run is interpolated linearly between its evaluations. A run that has ended keeps its last
    value.
    """
    lines = []
    for run in split_readable(runs)[0]:
        rows = [row for row in run.metrics if row.get(y) is not None]
        at = [sent_mb(row) if x == "bytes" else row["time_s"] for row in rows]
        line = pd.Series([row[y] for row in rows], index=at, dtype=float)
        # Of several evaluations at one time the last one counts, as in the outcome.
        lines += [line[~line.index.duplicated(keep="last")]] if rows else []
    if not lines:
        return None
    values = pd.concat(lines, axis="columns").sort_index().interpolate("index").dropna()
    places = np.unique(np.linspace(0, len(values) - 1, 100).round().astype(int))
    return values.iloc[places].agg(["mean", "min", "max"], axis="columns")


def draw_curves(
    board: Leaderboard, rows: Sequence[Row], x: str, key: str, title: str
) -> Drawing | None:
    """Draw a metric against time or bytes."""
    factor = 100 if key == "test/acc" else 1
    found = {row: mean_curve(row.runs, x, key) for row in rows}
    lines = {row: factor * line for row, line in found.items() if line is not None}
    if not lines:
        return None
    styles = {row: series_style(index) for index, row in enumerate(rows)}
    target = 100 * (board.target.accuracy or 0) if board.target and key == "test/acc" else 0
    reached = {row: row.spread.middle for row in lines if math.isfinite(row.spread.middle)}
    first = min(line.index[0] for line in lines.values())
    last = [line.index[-1] for line in lines.values()]
    far = max(last)
    if target and x == "time_s" and reached and len(lines) > 1:  # a single run is drawn to its end
        far = min(far, BEYOND * max(reached.values()))
    drawing = new_drawing(380)
    axes = add_axes(drawing, 70, 12, 570, 314)
    log = set_scale(axes, "x", min(last) if first > 0 else 0, far, CLOCK if x == "time_s" else SENT)
    axes.margins(x=0.05)
    axes.set_ylabel(title)
    ends = list[tuple[str, float, float]]()
    for index, (row, whole) in enumerate(lines.items()):
        end = min(far, whole.index[-1])
        line = whole.reindex(whole.index.union([end])).interpolate("index").loc[:end].dropna()
        if len(line):  # its first evaluation may be after the end of the axis
            ends.append((board.rank(row), end, line["mean"].iloc[-1]))
        bold = {"linewidth": 2.1, "zorder": 3} if row is rows[0] else {}
        # Places by length of the line: a line of one evaluation has none.
        marked = (0.03 * index, 0.15) if len(line) > 1 else None
        axes.plot(line.index, line["mean"], **styles[row], **bold, markevery=marked)
        if len(lines) <= MAX_BANDS + 1 or row in rows[:MAX_BANDS] or row.is_baseline:
            color = styles[row]["color"]
            axes.fill_between(line.index, line["min"], line["max"], color=color, alpha=0.1, lw=0)
    axes.set_xlim(left=None if log else 0)
    if target:
        axes.axhline(target, label=f"target: {target:g} %", **DOTTED)
        low = axes.get_ylim()[0]
        axes.set_ylim(bottom=max(low, target - BELOW) if reached else low)
    for row, time_s in reached.items() if target and x == "time_s" else ():
        color = styles[row]["color"]
        axes.vlines(time_s, axes.get_ylim()[0], target, color, ":", linewidth=0.9)
        axes.plot(time_s, target, "o", color=color, markerfacecolor="white", markersize=6, zorder=5)
    if x == "time_s":
        mark_stages(axes, board)
    name_ends(axes, ends)
    add_series_legend(axes, board, lines, styles)
    return drawing


def name_ends(axes: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """Name lines beside their ends, inside the axes. A name moves up or down to the nearest place
    that is free.

    Args: ends has the name of each line, and its end in the data of the axes.
    """
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
    taken, high = list[tuple[float, float]](), NAME_HIGH * DPI / 72
    axes.autoscale_view()  # limits are computed lazily, and `transData` needs them
    bottom, top = axes.bbox.y0 + high / 2, axes.bbox.y1 - high / 2
    for name, *end in ends:
        x, y = axes.transData.transform(end)
        steps = sorted(range(-len(ends), len(ends) + 1), key=abs)
        places = [(x, min(max(y, bottom), top) + step * high) for step in steps]
        free = [at for at in places if not any(is_close(at, other, high) for other in taken)]
        place = next((at for at in free if bottom <= at[1] <= top), places[0])
        taken.append(place)
        at_x, at_y = axes.transData.inverted().transform(place)
        axes.annotate(name, (at_x, at_y), (5, -3), **POINTS, weight="bold", bbox=ground)


def is_close(one: tuple[float, float], other: tuple[float, float], high: float) -> bool:
    return abs(one[0] - other[0]) < 1.5 * high and abs(one[1] - other[1]) < 0.99 * high


def mark_stages(axes: Axes, board: Leaderboard) -> None:
    """Draw the start of each stage of a single run with several, with its name and start time."""
    runs = [run for row in board.rows for run in row.runs]
    stages = runs[0].summary.get("stages") or []
    for stage in stages if len(runs) == 1 and len(stages) > 1 else ():
        axes.axvline(stage["start_s"], color=SOFT, dashes=(6, 3), linewidth=0.8)
        words = f"{stage['name']} from {seconds(stage['start_s'])}"
        at_bottom = {"xycoords": axes.get_xaxis_transform(), "rotation": 90, "color": SOFT}
        axes.annotate(words, (stage["start_s"], 0), (3, 5), **POINTS, **at_bottom)


def draw_time_shares(board: Leaderboard, rows: Sequence[Row]) -> Drawing | None:
    """Draw each worker's shares of the experiment's time, means over a setting's seeds."""
    data = {row: found for row in rows if (found := row.time_shares)}
    if not data:
        return None
    tracks = {row: share_tracks(found[:MAX_WORKERS]) for row, found in data.items()}
    high = 15 * max(map(len, tracks.values()))
    drawing = new_drawing(math.ceil(len(data) / 2) * (high + 70) + 26)
    for index, (row, own) in enumerate(tracks.items()):
        left, top = index % 2 * WIDTH / 2 + 66, index // 2 * (high + 70) + 50
        axes = add_axes(drawing, left, top, WIDTH / 2 - 84, high)
        draw_tracks(axes, own, 100)
        axes.set_xlabel("share of the run's time, %")
        axes.set_title(name_of(board, row, 330) + workers_note(len(data[row])))
    add_kinds_legend(drawing, tracks.values())
    return drawing


def share_tracks(workers: Sequence[Mapping[str, float]]) -> Tracks:
    """Return a track for each worker, with its shares of time in percent, one after the other."""
    tracks = []
    for rank, worker in enumerate(workers):
        bounds = pairwise(accumulate([0.0, *(100 * share for share in worker.values())]))
        spans = [(kind, start, end) for kind, (start, end) in zip(worker, bounds, strict=True)]
        tracks.append((f"w{rank}", [span for span in spans if worker[span[0]]]))
    return tracks


def workers_note(count: int) -> str:
    return f", workers 0 to {MAX_WORKERS - 1} of {count}" if count > MAX_WORKERS else ""


def read_first_rounds(run: Run) -> tuple[Tracks, float]:
    """Return the first rounds of a run, and the seconds until every worker has ended them.

    A worker has a track of its spans, and tracks of the parts of its steps and their messages.
    """
    num_workers = run.summary.get("num_workers") or 0
    found: dict[int, dict[str, Spans]] = {}
    ends: dict[int, list[float]] = {}
    # Missing events, or damaged ones: the rounds before them are shown.
    with suppress(OSError, KeyError, TypeError, ValueError, AttributeError):
        for event in islice(jsonl.read(run.folder / "events.jsonl"), MAX_EVENTS):
            rank = event.get("rank", num_workers)
            if event.get("kind") != "round" or rank >= num_workers:
                continue
            ends.setdefault(rank, []).append(float(event["end_s"]))
            own = found.setdefault(rank, {f"w{rank}": [], "parts": [], "messages": []})
            spans = event.get("spans") or ()
            own[f"w{rank}"] += [(str(kind), float(start), float(end)) for kind, start, end in spans]
            own["parts"] += [("part", a, b) for a, b in timeline.parts_of(event)]
            own["messages"] += [
                ("message", float(a), float(b)) for a, b in event.get("messages") or ()
            ]
            enough = [len(times) >= ROUNDS * 8 for times in ends.values()]
            if all(enough) and len(ends) == num_workers:
                break
    shown = [track for rank in sorted(found)[:MAX_WORKERS] for track in found[rank].items()]
    wanted = [times[min(ROUNDS, len(times)) - 1] for times in ends.values()]
    return [(name, spans) for name, spans in shown if spans], max(wanted, default=0.0)


def draw_first_rounds(board: Leaderboard, rows: Sequence[Row]) -> Drawing | None:
    """Draw the first rounds of each worker: a panel for each setting, on one time axis."""
    read = {row: read_first_rounds(row.runs[0]) for row in rows}
    found = {row: first for row, first in read.items() if first[0]}
    if not found:
        return None
    wanted = [wanted_s for _, wanted_s in found.values()]
    until_s = min(max(wanted), STRETCH * min(wanted)) or max(wanted)
    drawing = new_drawing(40 + sum(17 * len(tracks) + 50 for tracks, _ in found.values()))
    top = 50.0
    for row, (tracks, _) in found.items():
        axes = add_axes(drawing, 50, top, WIDTH - 70, 17 * len(tracks))
        draw_tracks(axes, tracks, until_s)
        seed = f"seed {row.runs[0].seed}{workers_note(row.runs[0].summary['num_workers'])}"
        axes.set_title(f"{name_of(board, row, 600)} ({seed})")
        top += 17 * len(tracks) + 50
    axes.set_xlabel(CLOCK)
    add_kinds_legend(drawing, (tracks for tracks, _ in found.values()))
    return drawing


def draw_winners_map(winners: WinnersByCluster) -> Drawing:
    """Draw the winner on each cluster, over two properties of the cluster."""
    measure, ((xlabel, across), (ylabel, up)) = winners.measure, winners.axes.items()
    columns, lines = len(across), len(up)
    wide, high = min(110.0, (WIDTH - 370) / columns), min(62.0, 420 / lines)
    drawing = new_drawing(max(high * lines + 70, 22 * (len(winners.wins) + 6)))
    axes = add_axes(drawing, 90, 14, wide * columns, high * lines)
    looks, handles = dict[str, dict[str, Any]](), list[Any]()
    letters = {name: chr(65 + k) if k < 26 else str(k) for k, name in enumerate(winners.wins)}
    for index, (name, wins) in enumerate(winners.wins.items()):
        color = np.array(to_rgb(series_style(index)["color"]))
        fill, edge = (tuple(1 - strength * (1 - color)) for strength in (0.22, 0.6))
        hatch = HATCHES[index % len(HATCHES)]
        looks[name] = {"facecolor": fill, "edgecolor": edge, "hatch": hatch, "linewidth": 0}
        handles.append(Patch(label=wrap(f"{letters[name]}  {name} ({wins})", 230), **looks[name]))
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    for (x, left), (y, below) in product(enumerate(across), enumerate(up)):
        point, shown, words = (left, below), EMPTY, "–"
        if point in winners.costs:
            shown = looks[winners.winner(point)]
            words = letters[winners.winner(point)] + "?" * (not winners.sure[point])
            if high > 34 and wide > 44:
                better = winners.winner_gain(point)
                unit = "×" if measure.ratio else ""
                lead = "alone" if better is None else gain_number(better, measure.ratio) + unit
                words += f"\n{lead}"
        axes.add_patch(Rectangle((x, y), 1, 1, **shown))
        axes.text(x + 0.5, y + 0.5, words, bbox=box, ha="center", va="center", weight="bold")
    axes.set(xlim=(0, columns), ylim=(0, lines), xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(np.arange(columns) + 0.5, [f"{value:g}" for value in across])
    axes.set_yticks(np.arange(lines) + 0.5, [f"{value:g}" for value in up])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.vlines(range(columns + 1), 0, lines, "white", linewidth=2)
    axes.hlines(range(lines + 1), 0, columns, "white", linewidth=2)
    axes.spines[:].set_visible(False)
    notes = [*MAP_NOTES]
    if winners.base in winners.costs:
        x, y = across.index(winners.base[0]), up.index(winners.base[1])
        axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=INK, zorder=4, linewidth=2.2))
        notes.append("framed: the values written first")
    handles += [Patch(alpha=0, label=note) for note in notes]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.03), handlelength=2)
    return drawing


def draw_winners_lines(winners: WinnersByCluster) -> Drawing:
    """Draw each contestant's outcome over one property."""
    measure, (name,) = winners.measure, winners.axes
    unit = f", {measure.unit}" if measure.unit else "" if measure.ratio else ", %"
    factor = 100.0 if unit == ", %" else 1.0
    sign = factor if measure.lower_is_better else -factor
    at = [place for (place,) in winners.costs]
    costs = sign * pd.DataFrame(winners.costs.values(), at, [*winners.wins])
    costs = costs.replace([math.inf, -math.inf], math.nan)
    drawing = new_drawing(360)
    axes = add_axes(drawing, 90, 14, WIDTH - 370, 290)
    for index, setting in enumerate(costs.columns[:8]):
        line = costs[setting].dropna()
        axes.plot(line.index, line, **series_style(index), label=wrap(setting, 200))
    low, high = costs.min(axis=None), costs.max(axis=None)
    # Lines cross more visibly on a logarithmic axis, so a factor of 5 is enough here.
    set_scale(axes, "y", low if measure.ratio else 0, 4 * high, measure.title + unit)
    log = at[0] > 0
    axes.set(xlabel=name + ", logarithmic" * log, xscale="log" if log else "linear")
    axes.set_xticks(at, [f"{value:g}" for value in at])
    axes.minorticks_off()
    axes.legend(loc="upper left", bbox_to_anchor=(1.03, 1.03))
    return drawing


def draw_figures(board: Leaderboard) -> list[Figure]:
    """Return every figure for which there is data.

    Only the figure of winners shows several environments; the others show the first one.
    """
    main, seeds = board.environments[0], any(row.spread.count > 1 for row in board.rows)
    timed, drawn, some, few = (first_rows(main, most) for most in (TIMES, CURVES, PANELS, GANTTS))
    alone = len(main.rows) == 1 and not seeds
    one_run = f"{'' if alone else 'One run of each setting. '}{TRACKS_NOTE}"
    means = f"{'Means over seeds. ' * seeds}{KINDS_NOTE}"
    lines = MEAN_LINES if seeds else ONE_RUN_RING if alone else SINGLE_LINES
    key, name = first_metric(split_readable([run for row in drawn for run in row.runs])[0])
    losses = ("test/loss", "train/loss")
    where = "" if key in losses else " on the test set" + ", %" * (key == "test/acc")
    metric = (key, name + where)
    found: list[tuple[str, Sequence[Row], Drawing | None, str]] = []
    with report_style():
        if winners := find_winners(board):
            wins = (
                draw_winners_map(winners) if len(winners.axes) == 2 else draw_winners_lines(winners)
            )
            note = f"By {winners.measure.title}" + ", medians over seeds" * seeds + "."
            found += [("Who wins where", (), wins, note)]
        found += [("Time to target", timed, draw_times(main, timed), TIME_MARKS)]
        found += [("Against time", drawn, draw_curves(main, drawn, "time_s", *metric), lines)]
        if len(main.rows) == 1 and key != "train/loss":
            loss = draw_curves(main, drawn, "time_s", "train/loss", "training loss")
            found += [("Loss against time", drawn, loss, TRAINING)]
        found += [
            ("Against bytes", drawn, draw_curves(main, drawn, "bytes", *metric), BYTES),
            ("Where the workers' time goes", some, draw_time_shares(main, some), means),
            ("The first rounds", few, draw_first_rounds(main, few), one_run),
        ]
    return [
        Figure(title, drawing, f"{note} {cut_note(board, main, rows)}".strip())
        for title, rows, drawing, note in found
        if drawing
    ]


def first_rows(board: Leaderboard, most: int) -> list[Row]:
    """Return the best rows, and the baseline."""
    shown = list(board.rows[:most])
    if board.baseline is None or board.baseline in shown:
        return shown
    return [*shown[: most - 1], board.baseline]


def cut_note(board: Leaderboard, main: Leaderboard, rows: Sequence[Row]) -> str:
    """Return which part of the study a figure of these rows shows; "" for all and for no rows."""
    notes = []
    if 0 < len(rows) < len(main.rows):
        outside = main.baseline is not None and main.baseline not in main.rows[: len(rows)]
        best = f"The best {len(rows) - outside} of {len(main.rows)} settings"
        notes.append(best + " and the baseline" * outside + ".")
    if rows and len(main.rows) < len(board.rows):
        notes.append(f"Of {main.rows[0].environment} only.")
    return " ".join(notes)
