"""`ashl watch`: run a foreign job of DistributedDataParallel, and name its straggler."""

from pathlib import Path
from typing import Annotated

import typer

from .train import Debug


def watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The command, for example torchrun and a script."),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for records and summary.json; default: a new one under runs/. Commands on"
            " several nodes share one.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no table.")] = False,
    debug: Debug = False,
) -> int:
    """Run a training script of your own with PyTorch's DDP, and show where each rank's time goes.

    It shows compute, communication and waiting by rank, and names a straggler. The exit code is
    that of the command.
    """
    from ashl.watch.watch import watch as run

    return run(command, folder, quiet)
