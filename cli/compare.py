"""`ashl compare`: a leaderboard of finished runs, and a report with the figures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ashl.config.override import command_text
from ashl.errors import to_one_line

from .answer import Answer, Json
from .table import console
from .train import Debug, show_starting
from .typed import typed_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ashl.report.records import LeftOut

Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN_OR_SWEEP...", help="Folders of runs and of sweeps.")
]
MAX_NAMED = 10


def compare(
    ctx: typer.Context,
    folders: Folders,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING", help="Compare with this setting; default: BSP, else the slowest."
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help=(
                "Judge by the time to this accuracy, for example 0.9, or to this value of the"
                " task's metric, with stop.target_consecutive_evals as the runs have it."
            )
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file of the report; with .csv, .md or .tex only the leaderboard as a table.",
        ),
    ] = None,
    figures: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Write each figure as files of these kinds: svg, pdf, png.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Rank the settings of finished runs, with their differences and how certain these are.

    Runs that differ only in their seed are one setting. report.html is written into the sweep's
    folder, or here; with --target 0.9 it is report-target-0.9.html. With --figures pdf,png a folder
    beside it receives the files of the figures.
    """
    kinds = figures.split(",") if figures else ()
    suffix = "" if target is None else f"-target-{target:g}"
    with show_starting(json):
        from ashl.report.compare import check_kinds, figures_folder, write_report
        from ashl.report.leaderboard import rank
        from ashl.report.records import read_study
        from ashl.report.tables import document, print_leaderboard

        check_kinds(kinds)
        board = rank(read_study(folders), target=target, baseline=baseline)
        report = write_report(
            board, out=out, command=str(typed_command(ctx)), suffix=suffix, kinds=kinds
        )
    show_left_out(board.left_out)
    folder = figures_folder(report, suffix)
    drawn = str(folder) if kinds and folder.is_dir() else None

    def print_tables() -> None:
        screen = console()
        print_leaderboard(screen, board, top=top)
        screen.print(f"report  {report}", soft_wrap=True, markup=False)
        if drawn:
            screen.print(f"figures {drawn}", soft_wrap=True, markup=False)

    following = command_text("export", *folders, "--out", "runs.csv")
    answer = {"report": str(report), "figures": drawn, **document(board)}
    return Answer(answer, print_tables, following)


def show_left_out(left_out: "Sequence[LeftOut]") -> None:
    """Print one line on standard error that names the folders that could not be read."""
    if left_out:
        named = "; ".join(f"{out.name} ({out.reason})" for out in left_out[:MAX_NAMED])
        more = f"; and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
        print(f"ashl: {to_one_line(f'left out {named}{more}.')}", file=sys.stderr)
