"""`ashl replay`: repeat a real run in virtual time from its records, with changed settings."""

from pathlib import Path
from typing import Annotated

import typer

from .answer import Answer, Json
from .table import console
from .train import ConfigDir, ConfigFile, Debug, show_starting, with_file
from .typed import typed_command


def replay(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a real run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changed settings, for example sync=ssp.",
            callback=with_file,
        ),
    ] = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Predict the result of a real run with another sync mode or H, from the steps and transfers
    that it recorded.

    Shows the run, its replay with the same settings, and the replay with the changed ones.
    """
    with show_starting(quiet):
        from ashl.study.replay import replay as run_replay

    found = run_replay(run, overrides or [], config_dir)
    line = typed_command(ctx)
    following = line.follow_up("train", *found.typed)
    if not overrides:
        following = line.follow_up("replay", run, "sync=asp")
    document = {"folder": str(found.folder), **found.record}
    if quiet and not json:
        return Answer(document)
    return Answer(document, lambda: found.show(console()), following)
