"""Write `report.html`: the answer and its figures as one file that needs no network and prints
in grey.
"""

import os
import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from ashl import __version__
from ashl.config.override import command_line, command_text
from ashl.report import (
    crossover,
    crossover_map,
    curves,
    gantt,
    pareto,
    shares,
    small_multiples,
    staleness,
)
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.phrases import Answer, answer
from ashl.report.records import LeftOut, Study
from ashl.report.terminal import Column, columns_of, method
from ashl.tracking.console import seconds

RUN_PAGE = "report.html"  # file in the folder of a run
CURVES, PANELS, GANTTS = 8, 6, 3  # settings drawn, in addition to the baseline
UNFOLDED, TABLE_ROWS, LISTED, LINKS = 20, 200, 50, 10

CURVE = (
    "Lines: means over seeds; bands: the range over seeds, of the first three and the baseline. A"
    " run that has ended keeps its last value. Rings: where a setting reaches the target, by its"
    " median; the time axis ends soon after the last of them."
)
ONE_SEED_CURVE = (
    "Lines: one run of each setting. Rings: where a setting reaches the target; the time axis ends"
    " soon after the last of them."
)
ONE_CURVE = "Ring: the run reaches the target."
LOSS = "On the training set, at each evaluation."
BOUNDARIES = " Dashed vertical lines: a stage begins. "
BYTES = "Bytes as sent, headers and indices included."
AXES = (
    "Rings: settings, by their median over seeds with its interval; bars: the median of the rings."
)
ONE_SEED_AXES = "Rings: settings; bars: the median of the rings."
MEANS = "Means over seeds."
ONE_RUN = "One run of each setting. "
WHOLE = "In every place the main activity of the worker; blank where no round was recorded."
SENT = "Bytes as sent, in both directions."
MEDIANS = "Medians over seeds."
STALENESS = f"Pushes that were applied, of the first {staleness.MAX_ROUNDS:,} events."

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1a1a1a;background:#fff;max-width:1040px;margin:2em auto;padding:0 1em}
h1{font-size:1.4em;margin-bottom:.2em}h2{font-size:1.1em;margin:2em 0 .4em;border-bottom:1px solid #d9d9d9}
.answer{border-left:4px solid #1a1a1a;padding:.2em 1em;margin:1em 0}.answer p{margin:.35em 0}
table{border-collapse:collapse;font-size:12px;width:100%}td,th{padding:.25em .4em;text-align:right;white-space:nowrap}
td.words,th.words{text-align:left;white-space:normal}tbody tr:nth-child(even){background:#f5f5f5}
thead th{border-bottom:1px solid #1a1a1a;vertical-align:bottom;white-space:normal}.first td{font-weight:bold}
.wide{overflow-x:auto}svg{max-width:100%;height:auto;display:block}.note,li{color:#5f5f5f;font-size:13px}
code{font-size:13px;overflow-wrap:anywhere}li{overflow-wrap:anywhere}
a{color:inherit}
@media screen and (max-width:700px){body{margin:1em auto;padding:0 .8em}svg{min-width:700px}td.words{min-width:9em}}
@media screen and (prefers-color-scheme:dark){body{color:#e4e4e4;background:#16181b}h1,h2{border-color:#3a3d42}
.answer{border-color:#e4e4e4}tbody tr:nth-child(even){background:#1e2125}thead th{border-color:#9a9a9a}
.note,li{color:#a8a8a8}svg{filter:invert(.91) hue-rotate(180deg)}}
@media print{body{margin:0;max-width:none;font-size:12px}section{break-inside:avoid}}
""".strip()


class Figure(NamedTuple):
    """A figure of the page with its title and note."""

    title: str
    svg: str
    note: str


class SaidTable(NamedTuple):
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Said(NamedTuple):
    """A command's own answer, labelled lines and tables, shown with the leaderboard."""

    answer: Answer
    lines: tuple[tuple[str, str], ...] = ()
    tables: tuple[SaidTable, ...] = ()


def page(
    study: Study,
    board: Leaderboard,
    drawn: Sequence[Figure],
    command: str,
    home: Path = Path(),
    said: Said | None = None,
) -> str:
    """Return the whole page with these figures.

    Args: command is the typed command; home is the folder of the page; said is None if the answer
    is that of the leaderboard.
    """
    said = said or Said(answer(board))
    name = str(study.sweep.get("name") or "") if study.sweep else ""
    several = len(study.runs) > 1
    what = (
        f"{name or 'comparison'}, {len(study.runs)} runs of {len(board.rows)} settings"
        if several
        else "one run"
    )
    title = f"ashl: {what}"
    sections = [
        _answer(said),
        _table(board, home, study.folder),
        *(
            _section(title, f'<div class="wide">{figure}</div>', note)
            for title, figure, note in drawn
        ),
        *map(_said_table, said.tables),
        _list("Ended badly", board.ended_badly),
        _list("Left out", board.left_out),
        _list("Dropped by racing", study.dropped),
        _list("Skipped points of the grid", study.skipped),
        _origin(study, command),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{escape(title)}</title>'
    )
    common = f'<p class="note">All: {escape(board.common)}</p>' if board.common else ""
    body = "\n".join(filter(None, [f"<h1>{escape(title)}</h1>", common, *sections]))
    top = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>'
    return f"{top}\n<body>\n{body}\n</body></html>\n"


def figures(board: Leaderboard) -> list[Figure]:
    """Return every figure for which there is data."""
    # Other environments are compared in the map and by axis.
    main = board.environments[0]
    drawn, panels, gantts = (_drawn(main, most) for most in (CURVES, PANELS, GANTTS))
    seeds = any(row.spread.count > 1 for row in board.rows)
    means, medians = (MEANS, f"{MEDIANS} ") if seeds else ("", "")
    one_run = ONE_RUN if len(board.rows) > 1 or seeds else ""
    ground = crossover.terrain(board)
    wins = (
        ("", "")
        if ground is None
        else (crossover_map.figure(ground), f"By {ground.measure.title}. {medians}".strip())
    )
    curve = CURVE if seeds else ONE_SEED_CURVE
    found = [
        ("Who wins where", *wins),
        (
            "Against time",
            curves.chart(main, drawn, "time_s"),
            (curve if len(main.rows) > 1 or seeds else ONE_CURVE)
            + stages(main)
            + _few(board, main, drawn),
        ),
        ("Loss against time", *loss(main, drawn)),
        (
            "Against bytes",
            curves.chart(main, drawn, "bytes"),
            BYTES + stages(main) + _few(board, main, drawn),
        ),
        (
            "Time against bytes at the target",
            pareto.scatter(main, drawn),
            medians + SENT + _few(board, main, drawn),
        ),
        ("By axis", small_multiples.multiples(board), AXES if seeds else ONE_SEED_AXES),
        (
            "Where the workers' time goes",
            shares.bars(main, panels),
            means + _few(board, main, panels),
        ),
        ("The first rounds", gantt.gantt(main, gantts), one_run + _few(board, main, gantts)),
        ("The whole run", gantt.whole(main, gantts), one_run + WHOLE + _few(board, main, gantts)),
        (
            "Staleness",
            staleness.histograms(main, panels),
            one_run + STALENESS + _few(board, main, panels),
        ),
    ]
    return [Figure(*entry) for entry in found if entry[1]]


def loss(board: Leaderboard, drawn: Sequence[Row]) -> tuple[str, str]:
    """Return the training loss of a single setting and its note; "" for several settings."""
    if len(board.rows) > 1:
        return "", ""
    return curves.chart(board, drawn, "time_s", "train/loss"), LOSS + stages(board)


def stages(board: Leaderboard) -> str:
    """Return names and times of a single run's stages, as the end of a note.

    Returns "" for one stage or several runs.
    """
    found = [
        f"{s['name']} {seconds(s['start_s'])} to {seconds(s['end_s'])}"
        for s in curves.stages_of(board)
    ]
    return f"{BOUNDARIES}Stages: {', '.join(found)}." if found else ""


def leaderboard(board: Leaderboard, words: Answer | None = None) -> str:
    """Return the answer and the leaderboard as Markdown, which MLflow shows as a table.

    Args: words is the answer; None = that of the leaderboard.
    """
    answered = words or answer(board)
    columns = [
        column
        for column in columns_of(board)
        if any(column[1](row) not in ("-", "") for row in board.rows)
    ]
    rows = [[title for title, _ in columns], ["---"] * len(columns)]
    rows += [
        [cell(row).replace("|", "\\|") for _, cell in columns] for row in board.rows[:TABLE_ROWS]
    ]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    common = f"All: {board.common}\n\n" if board.common else ""
    return f"**{answered.headline}**\n\n{' '.join(answered.sentences)}\n\n{common}{table}\n\n{method(board)}\n"


def booktabs(board: Leaderboard) -> str:
    """Return the leaderboard as a LaTeX table for the package booktabs."""
    columns = [
        column
        for column in columns_of(board)
        if any(column[1](row) not in ("-", "") for row in board.rows)
    ]
    words = "".join("l" if title in ("setting", "where") else "r" for title, _ in columns)
    rows = [[cell(row) for _, cell in columns] for row in board.rows[:TABLE_ROWS]]
    head, *body = (
        " & ".join(map(_tex, cells)) + r" \\" for cells in ([title for title, _ in columns], *rows)
    )
    lines = [
        rf"\begin{{tabular}}{{{words}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return f"% {_tex(board.common)}\n" * bool(board.common) + "\n".join(lines) + "\n"


def _tex(words: str) -> str:
    """Escape text for LaTeX."""
    special = {
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        ">": "$>$",
        "<": "$<$",
        "~": r"\textasciitilde{}",
    }
    return "".join(special.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in words)


def _drawn(board: Leaderboard, most: int) -> list[Row]:
    """Return the best rows, and the baseline."""
    shown = list(board.rows[:most])
    return (
        shown
        if board.baseline is None or board.baseline in shown
        else [*shown[: most - 1], board.baseline]
    )


def _answer(said: Said) -> str:
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in said.answer.sentences)
    rest += "".join(
        f'<p><span class="note">{escape(key)}</span> {_line(text)}</p>' for key, text in said.lines
    )
    return f'<div class="answer"><p><b>{escape(said.answer.headline)}</b></p>{rest}</div>'


def _line(text: str) -> str:
    where, found, command = text.partition("ashl ")
    return f"{escape(where)}<code>{escape(found + command)}</code>" if found else escape(text)


def _said_table(table: SaidTable) -> str:
    head = "".join(f'<th class="words">{escape(title)}</th>' for title in table.columns)
    rows = "".join(
        "<tr>" + "".join(f'<td class="words">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in table.rows
    )
    body = (
        "<div"
        f' class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return _section(table.title, body)


def _table(board: Leaderboard, home: Path, folder: Path | None) -> str:
    """Return the leaderboard as HTML; the rest of a long one can be unfolded."""
    shown = board.rows[:UNFOLDED]
    columns = [
        column
        for column in columns_of(board)
        if any(column[1](row) not in ("-", "") for row in shown)
    ]
    folded = board.rows[UNFOLDED:TABLE_ROWS]
    rest = (
        f"<details><summary>{len(folded)}"
        f" more</summary>{_rows(board, folded, columns, home)}</details>"
        if folded
        else ""
    )
    more = len(board.rows) - len(shown) - len(folded)
    export = f": `{command_text('export', folder)}`" if folder else ""
    note = method(board) + (f" {more} more settings are in the export{export}." if more else "")
    return _section("Leaderboard", _rows(board, shown, columns, home) + rest, note)


def _rows(board: Leaderboard, rows: Sequence[Row], columns: Sequence[Column], home: Path) -> str:
    words = {index for index, (title, _) in enumerate(columns) if title in ("setting", "where")}
    kinds = [' class="words"' if index in words else "" for index in range(len(columns))]
    head = "".join(
        f"<th{kind}>{escape(title)}</th>" for kind, (title, _) in zip(kinds, columns, strict=True)
    )
    lines = []
    for row in rows:
        cells = "".join(
            f"<td{kind}>{_linked(row, cell(row), home) if title == 'setting' else escape(cell(row))}</td>"
            for kind, (title, cell) in zip(kinds, columns, strict=True)
        )
        first = ' class="first"' if board.rank(row) == "1" else ""
        lines.append(f"<tr{first}>{cells}</tr>")
    return (
        "<div"
        f' class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _linked(row: Row, name: str, home: Path) -> str:
    """Return a setting's name with a link for each of its runs, by seed.

    A link leads to the run's page, or to its folder if it has no page.
    """
    places = [
        (
            quote(os.path.relpath(run.folder, home)),
            RUN_PAGE if (run.folder / RUN_PAGE).exists() else "",
            run.seed,
        )
        for run in row.setting.runs[:LINKS]
    ]
    runs = " ".join(f'<a href="{place}/{own}">{seed}</a>' for place, own, seed in places)
    return f'{escape(name)} <span class="note">seed {runs}</span>'


def _section(title: str, figure: str, note: str = "") -> str:
    answered = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{figure}{answered}</section>"


def _few(board: Leaderboard, main: Leaderboard, drawn: Sequence[Row]) -> str:
    """Return which part of the study a figure shows, as the end of its note; "" if it shows all."""
    left = (
        ""
        if main.baseline is None or main.baseline in main.rows[: len(drawn)]
        else " and the baseline"
    )
    note = (
        f" The best {len(drawn) - bool(left)} of {len(main.rows)} settings{left}."
        if len(drawn) < len(main.rows)
        else ""
    )
    return (
        f"{note} Of {main.rows[0].environment} only." if len(main.rows) < len(board.rows) else note
    )


def _list(title: str, found: Sequence[LeftOut]) -> str:
    if not found:
        return ""
    items = "".join(
        f"<li><code>{escape(out.name)}</code> {escape(out.reason)}</li>" for out in found[:LISTED]
    )
    more = f"<li>and {len(found) - LISTED} more</li>" if len(found) > LISTED else ""
    return f"<section><h2>{escape(title)} ({len(found)})</h2><ul>{items}{more}</ul></section>"


def _origin(study: Study, command: str) -> str:
    made = [study.runs[0].command] if len(study.runs) == 1 and study.sweep is None else []
    if study.sweep and (overrides := study.sweep.get("overrides")):
        made = [
            study.sweep.get("command")
            or str(command_line("sweep", [str(text) for text in overrides]))
        ]
    lines = [
        f"<code>{escape(text)}</code>" for text in dict.fromkeys(filter(None, [command, *made]))
    ]
    lines.append(
        escape(
            ", ".join(
                [f"ashl {__version__}", f"Python {platform.python_version()}", f"torch {_torch()}"]
            )
        )
    )
    return (
        "<section><h2>How this was"
        f" made</h2>{''.join(f'<p>{line}</p>' for line in lines)}</section>"
    )


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
