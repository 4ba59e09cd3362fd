"""Write `report.html`: the answer and its figures as one file that needs no network and prints
in grey.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any
from urllib.parse import quote

from ashl import __version__
from ashl.config.override import command_text
from ashl.report.answer import CommandAnswer, answer_of
from ashl.report.figures import Figure
from ashl.report.leaderboard import Leaderboard, Row
from ashl.report.records import REPORT, Study
from ashl.report.tables import MAX_ROWS, WORDS, explain_columns, leaderboard_table
from ashl.tracking.straggler import describe_verdicts

UNFOLDED, LISTED, LINKS = 20, 50, 10


def render_page(
    board: Leaderboard,
    figures: Sequence[Figure],
    command: str,
    home: Path,
    command_answer: CommandAnswer | None,
) -> str:
    """Return the whole page with these figures.

    Args: command is the typed command; home is the folder of the page; command_answer replaces the
    leaderboard's answer.
    """
    from jinja2 import Environment, PackageLoader

    study = board.study
    name = str((study.sweep or {}).get("name") or "comparison")
    counted = f"{name}, {len(study.runs)} runs of {len(board.rows)} settings"
    texts = leaderboard_table(board).head(MAX_ROWS)
    rows = [
        {"cells": cells, "links": links(row, home), "first": cells[0] == "1"}
        for row, cells in zip(board.rows, texts.to_numpy().tolist(), strict=False)
    ]
    more = len(board.rows) - len(rows)
    export = f": `{command_text('export', study.folder)}`" if study.folder else ""
    exported = f" {more} more settings are in the export{export}." if more else ""
    template = Environment(loader=PackageLoader("ashl.report"), autoescape=True)
    return template.get_template("report.html.jinja").render(
        title=f"ashl: {counted if len(study.runs) > 1 else 'one run'}",
        board=board,
        command_answer=command_answer or CommandAnswer(answer_of(board)),
        figures=figures,
        titles=[*texts],
        words=WORDS,
        rows=rows,
        unfolded=UNFOLDED,
        listed=LISTED,
        method=explain_columns(board, [*texts]) + exported,
        stragglers=stragglers(board),
        lists=(
            ("Ended badly", board.study.ended_badly),
            ("Left out", board.left_out),
            ("Dropped by racing", study.dropped),
            ("Skipped points of the grid", study.skipped),
        ),
        commands=list(dict.fromkeys(filter(None, (command, origin_command(study))))),
        versions=f"ashl {__version__}, Python {python_version()}, torch {version('torch')}",
    )


def stragglers(board: Leaderboard) -> list[str]:
    """Return a sentence for each straggler, over the first run of each of the first settings."""
    rows = board.environments[0].rows[:UNFOLDED]
    verdicts = [row.setting.runs[0].summary.get("straggler") for row in rows]
    by_worker: dict[int, list[Mapping[str, Any]]] = {}
    for found in filter(None, verdicts):
        by_worker.setdefault(found["worker"], []).append(found)
    sentences = []
    for own in by_worker.values():
        where = f"In {len(own)} of {len(rows)} settings " if len(rows) > 1 else ""
        sentences.append(f"{where}{describe_verdicts(own)}.")
    return sentences


def links(row: Row, home: Path) -> list[tuple[str, int]]:
    """Return a link to the page of each run, or to its folder if it has no page, and its seed."""
    found = []
    for run in row.setting.runs[:LINKS]:
        own = REPORT if (run.folder / REPORT).exists() else ""
        found.append((f"{quote(os.path.relpath(run.folder, home))}/{own}", run.seed))
    return found


def origin_command(study: Study) -> str:
    """Return the command that made a single run or a sweep; "" if it is unknown."""
    if study.sweep is None:
        return study.runs[0].command if len(study.runs) == 1 else ""
    return study.sweep.get("command") or ""
