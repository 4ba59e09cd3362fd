"""Write the report of a leaderboard, for `ashl compare` and the end of `ashl sweep`."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ashl.errors import UsageError, unwritable_path_error
from ashl.report.leaderboard import Leaderboard
from ashl.tracking import jsonl

if TYPE_CHECKING:
    from ashl.report.answer import CommandAnswer

KINDS = ("svg", "pdf", "png")  # of figures' files
TABLES = (".csv", ".md", ".tex")  # suffixes of a file that receives only the leaderboard


def write_report(
    board: Leaderboard,
    *,
    out: Path | None = None,
    command: str = "",
    suffix: str = "",
    command_answer: "CommandAnswer | None" = None,
    kinds: Sequence[str] = (),
) -> Path:
    """Write the report to `out`, or into the folder of the sweep, or here, and return its path.

    A file whose suffix is one of `TABLES` receives the leaderboard instead of the page.

    Args: command is the typed command; suffix is appended to the names of files, so that those of
    another target do not replace the sweep's own; command_answer replaces the leaderboard's answer;
    kinds are those of the figures' files.
    Raises: UsageError or AshlError if a file cannot be written.
    """
    from ashl.report.figures import draw_figures
    from ashl.report.page import render_page
    from ashl.report.tables import table_file

    report = out or (board.study.folder or Path()) / f"report{suffix}.html"
    drawn = draw_figures(board) if kinds or report.suffix not in TABLES else []
    if report.suffix in TABLES:
        write_file(report, table_file(board, report.suffix))
    else:
        write_file(report, render_page(board, drawn, command, report.parent, command_answer))
    for figure, kind in product(drawn, kinds):
        stem = "-".join(re.findall("[a-z]+", figure.title.lower()))
        file = figures_folder(report, suffix) / f"{stem}.{kind}"
        write_file(file, figure.to_bytes(kind), make_folder=True)
    return report


def figures_folder(report: Path, suffix: str = "") -> Path:
    """Return the folder of the figures' files, beside the report."""
    return report.with_name(f"figures{suffix}")


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise UsageError for an unknown kind of figures' files."""
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        raise UsageError(f"--figures {unknown}: unknown kind; take {' or '.join(KINDS)}")


def write_file(file: Path, content: str | bytes, make_folder: bool = False) -> None:
    """Write a file that the user asked for, as a whole or not at all.

    Raises: UsageError for a place that cannot be written, AshlError for a full disk.
    """
    try:
        if make_folder:
            file.parent.mkdir(exist_ok=True)
        jsonl.write_bytes(file, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        fix = "name another place with --out FILE."
        raise unwritable_path_error(f"{file} cannot be written", error, fix) from error
