"""`ashl replay`: a real run again in virtual time, on what it measured, as it was and with a change."""

from pathlib import Path
from typing import Annotated

import typer

from .complete import complete
from .table import console
from .train import ConfigDir, Debug, starting


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a real run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What to change, as in sync=ssp.", autocompletion=complete),
    ] = None,
    config_dir: ConfigDir = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Train, too, and not only keep the time.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    debug: Debug = False,
) -> int:
    """Say what another sync mode, H or compression alone would have brought a real run, on the same steps.

    Shows the run, its replay as it was, and the replay with the change.
    """
    with starting(quiet):
        from ashl.calibration.replay import replay as asked

    asked(run, overrides or [], config_dir, console(), gradients=gradients, quiet=quiet)
    return 0
