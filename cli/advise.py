"""`ashl advise`: recommend a combination of methods for a cluster and a task."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ashl.config.override import CommandLine, command_text

from .answer import Answer, Json
from .sweep import handle_interrupts
from .table import console
from .train import ConfigDir, ConfigFile, Debug, Overrides, Quiet, show_starting
from .typed import typed_command

BUDGET = "--budget"


def advise(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    target: Annotated[
        float | None,
        typer.Option(
            help=(
                "Judge by the time to this accuracy, for example 0.9; for another metric set"
                " stop.target_metric."
            )
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            BUDGET, metavar="SECONDS", min=1, max=1e7, help="Limit of the time on this machine."
        ),
    ] = 300.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the candidates, race none. Still profiles with cluster=real."
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: all cores.")
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="HOSTS",
            help="Measure the hosts of this file, and answer only H and its utilisation.",
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Find the sync mode, topology, compression and schedule that train fastest on a cluster,
    within a time budget.

    Races the candidates in virtual time. Typed settings hold for every candidate. The same command
    resumes the race.
    """
    if probe is not None:
        return answer_probe(probe, overrides or [])
    with show_starting(quiet):
        from ashl.advice.advise import advise as asked

    with handle_interrupts():
        found = asked(
            overrides or [],
            config_dir,
            console(),
            command=typed_command(ctx),
            target=target,
            budget_s=budget,
            slots=jobs,
            dry_run=dry_run,
            quiet=quiet,
        )
    typed = typed_command(ctx)
    if found.result is None:
        following = str(typed)
    elif (budget_s := found.result.record["needed_budget_s"]) is not None:
        following = str(with_budget(typed, budget_s))
    else:
        following = found.result.record["command"]
    return Answer(found.document(), lambda: found.show(console()), following)


def with_budget(typed: CommandLine, budget_s: float) -> CommandLine:
    """Return the typed command with another budget."""
    name, *words = typed.words
    if BUDGET in words:
        at = words.index(BUDGET)
        del words[at : at + 2]
    return replace(typed, words=(name, BUDGET, f"{budget_s:.0f}", *words))


def answer_probe(hosts: Path, overrides: list[str]) -> Answer:
    """Answer H from the links of hosts."""
    from ashl.advice.probe import probe

    found = probe(hosts, overrides)
    profiled = ("cluster=profile", f"profile={found.profile}", "runtime=sim")
    following = command_text("advise", *overrides, *profiled)
    return Answer(found.document(), lambda: found.show(console()), following)
