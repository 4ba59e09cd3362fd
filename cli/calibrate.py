"""`ashl calibrate`: how far predictions from a profile are from the real cluster."""

from typing import Annotated

import typer

from .sweep import interruptible
from .table import console
from .train import ConfigDir, Debug, Overrides, starting


def calibrate(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=1e7, help="What each run should take.")
    ] = 3.0,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=1e7, help="What all of it may take on this machine.")
    ] = 1200.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the combinations; run nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    debug: Debug = False,
) -> int:
    """Compare short real runs with the same in virtual time, from a profile of the cluster, which is measured first.

    The error is stored with profile=FILE, and later predictions from it carry it. The same command goes on.
    """
    with starting(quiet):
        from ashl.calibration.calibrate import calibrate as asked

    with interruptible(quiet):
        asked(
            overrides or [],
            config_dir,
            console(),
            seconds=seconds,
            budget_s=budget,
            dry_run=dry_run,
            where=ctx.obj,
            quiet=quiet,
        )
    return 0
