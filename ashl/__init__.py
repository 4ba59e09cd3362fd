"""Measure, plan and train on unequal nodes. Importing this package loads nothing heavy.

`train`, `sweep` and `load` do what the command line does, for scripts and notebooks. `ddp_hook`
compresses the gradients of torch's DistributedDataParallel. Failures raise an
`ashl.errors.AshlError` with the sentence that the command line prints.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ashl.compression.contract import Codec
    from ashl.export.ddp_hook import Hook, HookState
    from ashl.study.frames import Run, Runs

__version__ = "0.2.0"

_here = Path(__file__).resolve().parent
# In a checkout, cli/ and conf/ lie next to this folder; the working directory may hide an
# installed copy.
if not (_here / "cli").is_dir():
    __path__.append(str(_here.parent))


def train(
    *overrides: str,
    model: Any = None,
    dataset: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    config_dir: str | PathLike[str] | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Run:
    """Train as `ashl train` does with these overrides, for example `ashl.train("runtime=sim")`.

    Settings are keywords, too: `sync="bsp"`, `**{"stop.steps": 40}`. Model, dataset, loss and
    optimizer are names of options or objects of plain torch.

    Returns: the run with its `summary`, its `metrics` and `events` as pandas frames, and its
    `model()`.
    Raises: AshlError, also if the run failed or diverged; KeyboardInterrupt. The records are
    complete by then.
    """
    from ashl.config.catalog import own_folder
    from ashl.config.compose import compose
    from ashl.config.override import command_line
    from ashl.config.session import call_text, keyword_overrides, session_of
    from ashl.errors import UsageError
    from ashl.run.train import run
    from ashl.study.frames import Run

    _check_texts(overrides)
    if isinstance(loss, str):
        raise UsageError(
            f"loss={loss!r} is no loss; give a function or a module, or an option as task={loss!r}."
        )
    given = {"model": model, "dataset": dataset, "loss": loss, "optimizer": optimizer}
    given = {name: value for name, value in given.items() if value is not None}
    settings |= {name: value for name, value in given.items() if isinstance(value, str)}
    objects = {name: value for name, value in given.items() if not isinstance(value, str)}
    folder = own_folder(config_dir)
    lines = [*overrides, *keyword_overrides(settings)]
    with session_of(objects, lines, folder) as (chosen, session):
        config = compose(chosen, session.folder)
        session.check(config)
        command = (
            call_text(objects, lines) if objects else str(command_line("train", lines, folder))
        )
        with _isolate_caller(), session.expose_objects():
            ran = run(config, chosen, quiet=quiet, silent=quiet, command=command)
    return Run(ran.run_dir or Path(), ran.summary or {}, tuple(config["allow_targets"]), session)


def sweep(
    *overrides: str,
    config_dir: str | PathLike[str] | None = None,
    jobs: int | None = None,
    race: bool = False,
    rerun_failed: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> Runs:
    """Run a grid as `ashl sweep` does, for example `ashl.sweep("sync=bsp,ssp", "seed=0,1")`.

    Settings are keywords, too: `sync="bsp,ssp"`.

    Returns: the runs of the settings that ended, in the order of the grid (see their `status`),
    with their records as pandas frames and the `answer()`.
    """
    from ashl.config.catalog import own_folder
    from ashl.config.override import command_line
    from ashl.config.session import keyword_overrides
    from ashl.errors import UsageError
    from ashl.report.records import read_study
    from ashl.study import sweep as study
    from ashl.study.frames import Runs
    from ashl.study.grid import grid_lines, make_grid

    _check_texts(overrides)
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        raise UsageError(
            f"jobs={jobs!r} is no number of runs at a time; give 1 or more, or None for all cores."
        )
    folder = own_folder(config_dir)
    overrides = (*overrides, *keyword_overrides(settings))
    grid = make_grid(grid_lines(overrides, folder), folder)
    with _isolate_caller():
        outcome = study.sweep(
            grid,
            overrides,
            command=command_line("sweep", overrides, folder),
            slots=jobs,
            rerun_failed=rerun_failed,
            race=race,
            quiet=quiet,
            silent=quiet,
        )
    return Runs(read_study([outcome.folder]))


def load(path: str | PathLike[str]) -> Run | Runs:
    """Return a finished run by its folder, or the runs of a sweep or of a folder of runs.

    Raises: UsageError if no run there has ended.
    """
    from ashl.errors import UsageError
    from ashl.study.frames import load

    if not isinstance(path, str | PathLike):
        raise UsageError(
            f"{path!r} is no path; name the folder of a run, of a sweep, or one of runs."
        )
    return load(Path(path))


def ddp_hook(compression: str | Codec = "topk", **options: Any) -> tuple[HookState, Hook]:
    """Return state and hook for `register_comm_hook` of torch's `DistributedDataParallel`.

    `model.register_comm_hook(*ashl.ddp_hook("topk", ratio=0.01))` compresses the gradients of a
    model by any codec that `ashl list compression` shows, with error feedback where the codec has
    it. Options are the codec's keys, and `process_group` and `seed`.
    Raises: UsageError for an unknown codec or key.
    """
    from ashl.export.ddp_hook import ddp_hook

    return ddp_hook(compression, **options)


def _check_texts(overrides: Sequence[object]) -> None:
    """Raise UsageError for arguments that are no settings, for example a list."""
    from ashl.errors import UsageError

    if wrong := [one for one in overrides if not isinstance(one, str)]:
        raise UsageError(
            f"{wrong[0]!r} is no text of the form KEY=VALUE; a list of settings is given as"
            " *settings."
        )


@contextmanager
def _isolate_caller() -> Generator[None]:
    """Leave the caller's process as it was.

    Processes started inside do not run the caller's script again, as Python would do by default. So
    the script needs no `if __name__ == "__main__"`.
    """
    import torch

    from ashl.run.process_setup import standard_streams

    main, threads = sys.modules["__main__"], torch.get_num_threads()
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with standard_streams():
            yield
    finally:
        sys.modules["__main__"] = main
        torch.set_num_threads(threads)
