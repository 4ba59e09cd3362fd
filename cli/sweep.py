"""`ashl sweep`: run a grid of settings and compare them; an interrupted sweep is resumed."""

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ashl.config.override import command_text, key_of
from ashl.config.signals import handle_signals
from ashl.errors import UsageError

from .answer import Answer, Json
from .train import (
    ConfigDir,
    ConfigFile,
    Debug,
    DryRun,
    Overrides,
    Quiet,
    as_yaml,
    show_starting,
    without_unused,
)
from .typed import typed_command as typed_line

if TYPE_CHECKING:
    from ashl.launch.job import Launch
    from ashl.study.grid import Grid
    from ashl.study.jobs import Pool
    from ashl.study.sweep import SweepOutcome

LAUNCHER = "launcher."  # prefix of the keys of a launcher's parameters
SHELL = 128  # exit code of a command that a signal has ended, minus the signal's number


def sweep(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    cfg: Annotated[
        bool, typer.Option("--cfg", help="Print every run's resolved configuration and stop.")
    ] = False,
    dry_run: DryRun = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time; default: all cores in virtual time, else 1."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if a combination cannot be run.")
    ] = False,
    race: Annotated[
        bool, typer.Option("--race", help="Stop settings early that are clearly behind.")
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run in a queue, by submitit_slurm or submitit_local."),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(
            metavar="TRIALS",
            min=1,
            help="Search by Optuna, with axes such as 'KEY=interval(0.01,0.5)'.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING", help="Compare with this setting, which no race stops; default: BSP."
        ),
    ] = None,
    rerun_failed: Annotated[
        bool, typer.Option("--rerun-failed", help="Repeat runs that failed or diverged.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Run every combination of the given values, for example sync=bsp,ssp seed=0,1,2, and rank
    them.

    The same command resumes the sweep: runs that have ended are not repeated.
    """
    typed, of_launcher = split_launcher_settings(overrides or [], launcher)
    of_grids = {
        "--race": race,
        "--strict": strict,
        "--cfg": cfg,
        "--dry-run": dry_run,
        "--baseline": baseline,
        "--rerun-failed": rerun_failed,
    }
    for option in [name for name, value in of_grids.items() if value and search is not None]:
        raise UsageError(
            f"{option} goes with a whole grid, and --search chooses as it goes; drop one."
        )
    with show_starting(quiet):
        from ashl.study import sweep as study

    make_pool = partial(
        pool_of_launcher,
        launcher=launcher,
        of_launcher=of_launcher,
        jobs=jobs,
        hosts=ctx.obj,
        config_dir=config_dir,
    )
    line = typed_line(ctx)
    if search is not None:
        from ashl.study.search import search as run_search

        shown = {"quiet": quiet, "silent": json}
        with handle_interrupts():
            found = run_search(
                typed, config_dir, search, line, slots=jobs, make_pool=make_pool, **shown
            )
        return answer_of(found)
    grid = compose_grid(typed, config_dir, strict, ctx.obj)
    if cfg:
        configs = [without_unused(setting.config) for setting in grid.settings]
        return Answer({"settings": configs}, show=partial(show_configurations, grid))
    if dry_run:
        forecast = study.forecast_of(grid, typed, jobs, line)
        return Answer(forecast, partial(study.show_forecast, grid, forecast), str(line))
    with handle_interrupts():
        outcome = study.sweep(
            grid,
            typed,
            command=line,
            slots=jobs,
            rerun_failed=rerun_failed,
            race=race,
            quiet=quiet,
            silent=json,
            baseline=baseline,
            make_pool=make_pool,
        )
    return answer_of(outcome)


def answer_of(outcome: "SweepOutcome") -> Answer:
    """Return the answer of a sweep; the next command repeats the winner, if there is one."""
    following = outcome.winner or command_text("export", outcome.folder)
    return Answer(
        outcome.document(),
        next=following,
        error=outcome.error,
        code=int(outcome.has_failed_run),
    )


def show_configurations(grid: "Grid") -> None:
    """Print the resolved configuration of every run."""
    for setting in grid.settings:
        print(f"---  # {' '.join(setting.overrides)}\n{as_yaml(setting.config)}", end="")


def split_launcher_settings(
    overrides: list[str], launcher: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the settings of the runs, and the parameters of the launcher.

    Raises: UsageError for a parameter without a launcher, and for a launcher that cannot be used.
    """
    from ashl.config.compose import value_of

    of_launcher = [text for text in overrides if text.startswith(LAUNCHER)]
    if of_launcher and launcher is None:
        raise UsageError(f"{of_launcher[0]}: it goes with `ashl sweep --launcher NAME`.")
    if launcher is None:
        return overrides, {}
    from ashl.study.jobs import check_parameters

    values = {key_of(text).removeprefix(LAUNCHER): value_of(text) for text in of_launcher}
    typed = [text for text in overrides if text not in of_launcher]
    return typed, check_parameters(launcher, values)


def pool_of_launcher(
    folder: Path,
    slots: int,
    *,
    launcher: str | None,
    of_launcher: dict[str, Any],
    jobs: int | None,
    hosts: "Launch | None",
    config_dir: Path | None,
) -> "Pool":
    """Return the pool that runs `slots` jobs at a time: here, on hosts, or by the launcher."""
    from ashl.study.jobs import local_pool, queue_pool, run_on_hosts

    if hosts is not None:
        return local_pool(slots, partial(run_on_hosts, launch=hosts, config_dir=config_dir))
    if launcher is None:
        return local_pool(slots)
    return queue_pool(folder, launcher, of_launcher, jobs, slots)


def compose_grid(
    typed: list[str], config_dir: Path | None, strict: bool, where: "Launch | None"
) -> "Grid":
    """Compose and check all settings of the grid, for the hosts of `ashl launch` if there are
    any.
    """
    from ashl.study.grid import grid_lines, make_grid
    from ashl.study.jobs import real_job_size
    from ashl.study.sweep import Counting

    with Counting("composing settings") as counting:
        return make_grid(
            grid_lines(typed, config_dir),
            config_dir,
            strict=strict,
            progress=counting.update,
            processes=partial(real_job_size, launch=where),
        )


@contextmanager
def handle_interrupts() -> Generator[None]:
    """End a sweep in order at Ctrl-C, SIGTERM or SIGHUP, and say how to resume it."""

    received: list[int] = []

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the runs are ending already
        received.append(number)
        raise KeyboardInterrupt

    try:
        with handle_signals(leave, {signal.SIGTERM, signal.SIGHUP}):
            yield
    except KeyboardInterrupt as interrupt:
        kept = "what has ended is kept, and the same command runs what is missing"
        if received:
            print(f"ashl: interrupted; {kept}", file=sys.stderr)
            raise typer.Exit(SHELL + received[0]) from interrupt
        raise KeyboardInterrupt(kept) from interrupt
