"""`ashl join`: take the place of a failed worker of a run."""

from pathlib import Path
from typing import Annotated

import typer

from .train import Debug, show_starting


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    worker: Annotated[
        int | None, typer.Option(min=0, help="The worker; default: the lowest failed one.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Rejoin a run in place of a failed worker.

    A run of runtime=local is joined on its machine, a job on several nodes on any node that has the
    run folder. The command ends with the run. Ctrl-C leaves the run, which continues.
    """
    with show_starting():
        from ashl.run.join import join as run_as_rank

    def show_line(text: str) -> None:
        print(text, flush=True)

    return run_as_rank(run, worker, show_line)
