"""`ashl calibrate`: show predicted beside measured results."""

from typing import Annotated

import typer

from ashl.config.override import group_of

from .answer import Answer, Json
from .sweep import handle_interrupts
from .table import console
from .train import ConfigDir, ConfigFile, Debug, DryRun, Overrides, Quiet, show_starting
from .typed import typed_command


def calibrate(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=1e7, help="Time of each run.")
    ] = 3.0,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Run combinations on real processes and in virtual time, and show predicted beside measured
    results.

    A real cluster is profiled first, unless profile=FILE is given. The same command runs only the
    missing runs.
    """
    with show_starting(quiet):
        from ashl.study.calibrate import calibrate as run_calibration

    with handle_interrupts():
        found = run_calibration(
            overrides or [],
            config_dir,
            console(),
            run_s=seconds,
            dry_run=dry_run,
            quiet=quiet,
        )
    line = typed_command(ctx)
    following = str(line)
    if not dry_run:
        dropped = ("cluster", "profile", "runtime", "run")
        own = [text for text in overrides or [] if group_of(text) not in dropped]
        cluster = [text for text in overrides or [] if group_of(text) == "cluster"]
        if found.profile:
            cluster = ["cluster=profile", f"profile={found.profile}"]
        following = line.follow_up("advise", "runtime=sim", *cluster, *own)
    document = {"folder": str(found.folder), **found.document()}
    return Answer(document, lambda: found.show(console()), following)
