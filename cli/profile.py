"""`ashl profile`: measure the cluster, plan from it, show both."""

from typing import Annotated

import typer

from ashl.errors import UsageError

from .train import Cfg, ConfigDir, ConfigFile, Debug, DryRun, Overrides, as_yaml, starting
from .typed import typed


def profile(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = False,
    dry_run: DryRun = False,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Time this compression, too, as in topk."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    debug: Debug = False,
) -> int:
    """Measure what a step and an exchange cost each worker (runtime=sim: take what is declared),
    and plan from it.

    Writes profile.json and plan.json; `ashl train profile=FILE` or `plan=FILE` takes them back.
    """
    from ashl.config.compose import compose, specs_of

    config = compose(overrides or [], config_dir)
    if cfg:
        print(as_yaml(config), end="")
        return 0
    with starting(quiet):
        from ashl.run import profile as measuring
        from ashl.run.train import dry_run as shown
        from ashl.run.train import is_virtual

    measured = not is_virtual(config)
    if dry_run:
        shown(
            measuring.through_server(config) if measured else config,
            [] if measured else overrides or [],
        )
        return 0
    if codec and not measured:
        raise UsageError(
            "--codec times how a compression encodes, and runtime=sim has what is declared; drop it"
        )
    codecs = specs_of("compression", codec or [], overrides or [], config_dir)
    return measuring.profile(
        config, overrides or [], quiet=quiet, codecs=codecs, command=typed(ctx)
    )
