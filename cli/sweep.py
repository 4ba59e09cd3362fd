"""`ashl sweep`: run a grid of settings and compare them; an interrupted sweep is resumed."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ashl.config.override import CommandLine, key_of
from ashl.errors import UsageError

from .train import ConfigDir, ConfigFile, Debug, Overrides, as_yaml, starting
from .typed import typed as typed_line

if TYPE_CHECKING:
    from ashl.run.multi_node import Launch
    from ashl.study.grid import Grid
    from ashl.study.slots import Job

SHELL = 128  # exit code of a command that a signal has ended, minus the signal's number


def sweep(
    ctx: typer.Context,
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    config_dir: ConfigDir = None,
    cfg: Annotated[
        bool, typer.Option("--cfg", help="Print every run's resolved configuration and stop.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the grid; run nothing.")] = False,
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
        typer.Option(
            metavar="NAME", help="Run elsewhere by joblib, submitit_local or submitit_slurm."
        ),
    ] = None,
    sweeper: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Search by optuna, with axes such as 'KEY=interval(0.01,0.5)'.",
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    debug: Debug = False,
) -> int:
    """Run every combination of the given values, for example sync=bsp,ssp seed=0,1,2, and rank
    them.

    The same command resumes the sweep: runs that have ended are not repeated.
    """
    typed, theirs = overrides or [], []
    if launcher or sweeper:
        from . import plugins

        typed, theirs = plugins.sorted_out(typed, launcher, sweeper)
        plugins.settings(launcher, sweeper, theirs)
    if sweeper:
        refuse(
            {
                "--race": race,
                "--strict": strict,
                "--cfg": cfg,
                "--dry-run": dry_run,
                "--baseline": baseline,
            }
        )
        line = typed_line(ctx)
        return search(
            line,
            typed,
            theirs,
            config_dir,
            launcher,
            sweeper,
            jobs,
            rerun_failed=rerun_failed,
            quiet=quiet,
        )
    with starting(quiet):
        from ashl.study import sweep as study

    grid = whole_grid(typed, config_dir, strict, ctx.obj)
    if cfg:
        for setting in grid.settings:
            print(f"---  # {' '.join(setting.overrides)}\n{as_yaml(setting.config)}", end="")
        return 0
    first = grid.settings[0].config
    folder = study.folder_of(grid, first["run"]["dir"], first["name"])
    launch = None
    if dry_run:
        study.show(grid, folder, jobs)
        return 0
    if launcher:
        slots = plugins.at_a_time(launcher, jobs, study.slots_for(grid))
        launch = partial(plugins.bring, launcher=launcher, overrides=[*slots, *theirs])
    with interruptible(quiet):
        run = there(ctx.obj, grid, config_dir) if ctx.obj else None
        summaries = study.sweep(
            grid,
            typed,
            folder,
            command=typed_line(ctx),
            slots=jobs,
            rerun_failed=rerun_failed,
            race=race,
            quiet=quiet,
            baseline=baseline,
            launch=launch,
            run=run,
        )
    return int(any(summary["status"] == "failed" for summary in summaries))


def whole_grid(
    typed: list[str], config_dir: Path | None, strict: bool, where: "Launch | None"
) -> "Grid":
    """Compose and check all settings of the grid, for the hosts of `ashl launch` if there are
    any.
    """
    from ashl.config.compose import compose
    from ashl.run.multi_node import real_job_size
    from ashl.study.grid import alone, grid_lines, make_grid
    from ashl.study.sweep import Counting

    with Counting("composing settings") as counting:
        return make_grid(
            grid_lines(typed, config_dir),
            lambda point: compose(point, config_dir),
            strict=strict,
            progress=counting.update,
            processes=partial(real_job_size, where=where) if where else alone,
        )


def there(where: "Launch", grid: "Grid", config_dir: Path | None) -> "Callable[[Job], int]":
    """Return the function that runs a job on the hosts of `ashl launch`.

    Raises: AshlError if a host cannot take part.
    """
    from ashl.run.multi_node import check_nodes, real_job_size
    from ashl.study import slots

    check_nodes(where, max(real_job_size(setting.config, where) or 0 for setting in grid.settings))
    return partial(slots.on_hosts, where=where, config_dir=config_dir)


@contextmanager
def interruptible(quiet: bool) -> Generator[None]:
    """End a sweep in order at Ctrl-C, SIGTERM or SIGHUP, and say how to resume it."""

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # the runs are ending already
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not quiet:
            print("interrupted: what has ended is kept; the same command runs what is missing")
        if interrupt.args:
            raise typer.Exit(SHELL + signal.Signals[interrupt.args[0]]) from interrupt
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse(options: dict[str, object]) -> None:
    """Raise UsageError for an option that is incompatible with --sweeper."""
    for option in [option for option, value in options.items() if value]:
        raise UsageError(
            f"{option} needs to know the whole grid, and --sweeper chooses as it goes; drop one."
        )


def search(
    line: CommandLine,
    typed: list[str],
    theirs: list[str],
    config_dir: Path | None,
    launcher: str | None,
    sweeper: str,
    jobs: int | None,
    *,
    rerun_failed: bool,
    quiet: bool,
) -> int:
    """Let a sweeper choose the settings to run, and return the exit code.

    Seeds are no axis of the search: each trial runs all of them, so that no lucky seed wins.
    """
    from ashl.config.compose import alternatives, compose
    from ashl.study import search as study
    from ashl.study.grid import make_grid
    from ashl.study.sweep import slots_for

    from . import plugins

    # of a key that is typed twice the last value counts, as in train
    last = {key_of(text): text for text in typed}
    seeds = tuple(alternatives(last.pop("seed", "seed=0"), config_dir))
    axes = {text: plugins.axis_of(text, config_dir) for text in last.values()}
    asked = study.Search(
        fixed=tuple(text for text, axis in axes.items() if axis is None),
        axes=tuple(axis for axis in axes.values() if axis is not None),
        seeds=seeds,
        config_dir=str(config_dir.absolute()) if config_dir else None,
    )
    corners = make_grid(asked.corners(), lambda point: compose(point, config_dir))
    default = slots_for(corners)
    own = plugins.trials_at_a_time(sweeper, launcher, jobs, default, theirs)
    hydra = plugins.settings(launcher, sweeper, [*own, *theirs])
    explore = partial(
        plugins.explore,
        launcher=launcher,
        sweeper=sweeper,
        overrides=[*own, *theirs, *(axis.asked(number) for number, axis in enumerate(asked.axes))],
    )
    with interruptible(quiet):
        summaries = study.search(
            asked,
            corners,
            explore,
            line,
            ["--sweeper", sweeper, *typed, *theirs],
            folder=study.folder_of([sweeper, *typed], corners.settings[0].config),
            slots=1 if launcher else jobs or default,
            trials=hydra.sweeper.get("n_trials") or 0,
            rerun_failed=rerun_failed,
            quiet=quiet,
        )
    return int(any(summary["status"] == "failed" for summary in summaries))
