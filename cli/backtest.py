"""`ashl backtest`: show predictions beside published figures."""

from pathlib import Path
from typing import Annotated

import typer

from ashl.config.override import command_text

from .answer import Answer, Json
from .table import console
from .train import Debug, show_starting


def backtest(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Files of published figures; default: all shipped."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write backtest.csv and backtest.svg there."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Predict published clusters in virtual time, and show the predictions beside the published
    figures.

    A file declares the cluster, the workload, the figures, their source and the assumptions, see
    conf/backtest. Every second point of a file is kept back: no assumption was read off it.
    """
    with show_starting(quiet=json):
        from ashl.study import backtest as study

    points = study.predict(map(study.read_table, study.published_files(files or [])))
    if save is not None:
        study.save(points, save)
    following = command_text("calibrate", "--dry-run")
    return Answer(study.as_documents(points), lambda: study.show(points, console()), following)
