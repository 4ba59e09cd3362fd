"""`ashl backtest`: show predictions beside published figures."""

from pathlib import Path
from typing import Annotated

import typer

from .table import console
from .train import Debug, starting


def backtest(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Files of published figures; default: all shipped."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write backtest.csv and backtest.svg there."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the points as a JSON list.")] = False,
    debug: Debug = False,
) -> int:
    """Predict published clusters in virtual time, and show the predictions beside the published
    figures.

    A file declares the cluster, the workload, the figures, their source and the assumptions, see
    conf/backtest. Every second point of a file is kept back: no assumption was read off it.
    """
    with starting(quiet=json):
        from ashl.study import backtest as study

    points = [
        point
        for file in study.published_files(files or [])
        for point in study.predict_table(study.read_table(file))
    ]
    if save is not None:
        study.save(points, save)
    if json:
        print(study.as_json(points))
    else:
        study.show(points, console())
    return 0
