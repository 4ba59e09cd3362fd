"""`ashl replay`: a real run again in virtual time, on what it recorded, perhaps changed."""

from pathlib import Path
from typing import Annotated

import typer

from .complete import complete
from .table import console
from .train import ConfigDir, ConfigFile, Debug, starting, with_file


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a real run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="What to change, as in sync=ssp.",
            autocompletion=complete,
            callback=with_file,
        ),
    ] = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    debug: Debug = False,
) -> int:
    """Say what another sync mode or H would have brought a real run, on the steps and transfers
    that it recorded.

    Shows the run, its replay as it was, and the replay with the change.
    """
    with starting(quiet):
        from ashl.study.replay import replay as run_replay

    run_replay(run, overrides or [], config_dir, console(), quiet=quiet)
    return 0
