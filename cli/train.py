"""`ashl train`: compose, plan, train, write the run folder, show the outcome."""

from pathlib import Path
from typing import Annotated

import typer

from .complete import complete

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings, as in sync=bsp optimizer.lr=0.05.", autocompletion=complete),
]
ConfigDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A folder with options of your own, as sync/mine.yaml.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def train(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the resolved configuration and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and estimate; run nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    debug: Debug = False,
) -> int:
    """Train a model on the chosen cluster, in virtual time (runtime=sim) or for real, and show what came of it.

    `ashl list` shows what can be set.
    """
    from .compose import compose

    config = compose(overrides or [], config_dir)
    if cfg:
        typer.echo(_yaml(config), nl=False)
        return 0
    from ashl import run

    if dry_run:
        run.dry_run(config, overrides or [])
        return 0
    return run.train(config, overrides or [], quiet=quiet)


def _yaml(config: dict) -> str:
    """The configuration as YAML, its lists in one line each."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        list, lambda dumper, v: dumper.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True)
    )
    return yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
