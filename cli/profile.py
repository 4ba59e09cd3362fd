"""`ashl profile`: measure the cluster, plan from it, show both."""

from typing import Annotated

import typer

from ashl.errors import UsageError

from .answer import Answer, Json
from .train import (
    Cfg,
    ConfigDir,
    ConfigFile,
    Debug,
    DryRun,
    Overrides,
    config_answer,
    plan_answer,
    show_starting,
)
from .typed import typed_command


def profile(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = False,
    dry_run: DryRun = False,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure this codec, too, for example topk."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer | int:
    """Measure the time of a step and of an exchange for each worker, and plan from it.

    With runtime=sim the declared times are taken. Writes profile.json and plan.json, for `ashl
    train profile=FILE` or `plan=FILE`.
    """
    from ashl.config.compose import compose, specs_of

    config = compose(overrides or [], config_dir)
    if cfg:
        return config_answer(config)
    with show_starting(quiet):
        from ashl.run import profile as measuring
        from ashl.run.train import dry_run as shown
        from ashl.run.train import is_virtual

    measured = not is_virtual(config)
    if dry_run:
        through = measuring.measuring_config(config) if measured else config
        return plan_answer(
            shown(through, [] if measured else overrides or []), str(typed_command(ctx))
        )
    if codec and not measured:
        raise UsageError(
            "--codec times how a compression encodes, and runtime=sim has what is declared; drop it"
        )
    codecs = specs_of("compression", codec or [], overrides or [], config_dir)
    found = measuring.profile(
        config, overrides or [], quiet=quiet or json, codecs=codecs, command=typed_command(ctx)
    )
    if isinstance(found, int):  # not rank 0 of a job
        return found
    return Answer(found.document(), next="" if quiet and not json else found.next)
