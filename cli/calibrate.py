"""`ashl calibrate`: show predicted beside measured results."""

from typing import Annotated

import typer

from .sweep import interruptible
from .table import console
from .train import ConfigDir, ConfigFile, Debug, Overrides, starting


def calibrate(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=1e7, help="Time of each run.")
    ] = 3.0,
    budget: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, max=1e7, help="Limit of the time on this machine."),
    ] = 1200.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the combinations; run nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    debug: Debug = False,
) -> int:
    """Run combinations on real processes and in virtual time, and show predicted beside measured
    results.

    A real cluster is profiled first, unless profile=FILE is given. The same command runs only the
    missing runs.
    """
    with starting(quiet):
        from ashl.study.calibrate import calibrate as run_calibration

    with interruptible(quiet):
        run_calibration(
            overrides or [],
            config_dir,
            console(),
            run_s=seconds,
            budget_s=budget,
            dry_run=dry_run,
            quiet=quiet,
        )
    return 0
