"""Hydra's plugins: launchers, which run jobs elsewhere, and sweepers, which choose the next trial.

Hydra composes only the number of a job, or the numbers of a trial. Their meaning is in files (see
`ashl.study.launcher`). Hydra runs in a process of its own, so that no plugin's logging or warnings
reach the terminal.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ashl.config.catalog import catalog, lacking
from ashl.config.compose import VERSION_BASE, alternatives, compose, parsed, sentence
from ashl.errors import UsageError

if TYPE_CHECKING:
    from ashl.study.search import Axis

EXTRAS = {
    "launcher": {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"},
    "sweeper": {"optuna": "optuna"},
}
SLOTS = {"joblib": "hydra.launcher.n_jobs", "submitit_slurm": "hydra.launcher.array_parallelism"}
CONFIG = "ashl"


def sorted_out(
    overrides: Sequence[str], launcher: str | None, sweeper: str | None
) -> tuple[list[str], list[str]]:
    """Return the overrides of ashl, and those of the plugins in use."""
    prefixes = ("hydra.launcher.",) if launcher else ()
    prefixes += ("hydra.sweeper.", "hydra/sweeper/") if sweeper else ()
    theirs = (
        [text for text in overrides if text.lstrip("+").startswith(prefixes)] if prefixes else []
    )
    return [text for text in overrides if text not in theirs], theirs


def settings(launcher: str | None, sweeper: str | None, overrides: Sequence[str]) -> DictConfig:
    """Return Hydra's settings with these plugins.

    Raises: UsageError if a plugin is not installed or a setting does not exist.
    """
    with made({}) as hydra:
        for kind, wanted in (("launcher", launcher), ("sweeper", sweeper)):
            installed = hydra.config_loader.get_group_options(f"hydra/{kind}")
            if wanted in EXTRAS[kind] and wanted not in installed:
                raise UsageError(
                    f"--{kind} {wanted} needs a plugin: pip install 'ashl[{EXTRAS[kind][wanted]}]'."
                )
            if wanted and wanted not in installed:
                raise lacking(kind, wanted, installed)
        known = hydra.compose_config(CONFIG, chosen(launcher, sweeper, []), RunMode.MULTIRUN).hydra
        try:
            return hydra.compose_config(
                CONFIG, chosen(launcher, sweeper, overrides), RunMode.MULTIRUN
            ).hydra
        except (HydraException, OmegaConfBaseException) as error:
            having = {"hydra.launcher": launcher, "hydra.sweeper": sweeper}
            keys = {
                key: [str(name) for name in known[key[6:]] if name != "_target_"]
                for key in having
                if having[key]
            }
            there = "; ".join(f"{key} has {', '.join(names)}" for key, names in keys.items())
            raise UsageError(f"{sentence(error).rstrip('.')} ({there}).") from error


def chosen(launcher: str | None, sweeper: str | None, overrides: Sequence[str]) -> list[str]:
    return [
        f"hydra/launcher={launcher or 'basic'}",
        f"hydra/sweeper={sweeper or 'basic'}",
        *overrides,
    ]


def at_a_time(launcher: str, slots: int | None, default: int) -> list[str]:
    """Return the overrides that set how many jobs a launcher runs at a time.

    Limits: for submitit_slurm without `slots` the queue decides.
    """
    if launcher == "submitit_slurm" and slots is None:
        return []
    return [f"{SLOTS.get(launcher, 'hydra.sweeper.max_batch_size')}={slots or default}"]


def trials_at_a_time(
    sweeper: str, launcher: str | None, slots: int | None, default: int, theirs: Sequence[str]
) -> list[str]:
    """Return the overrides that make a sweeper use all slots, and repeat its choices when a search
    is resumed.
    """
    own = at_a_time(launcher, slots, default)[: launcher in SLOTS] if launcher else []
    if sweeper == "optuna":
        own += [f"hydra.sweeper.n_jobs={(slots or default) if launcher else 1}"]
        own += [] if "hydra/sweeper/sampler=grid" in theirs else ["hydra.sweeper.sampler.seed=0"]
    return own


def bring(place: Path, size: int, *, launcher: str, overrides: Sequence[str]) -> list[str]:
    """Return the command by which a launcher runs jobs 0 to size − 1 of a folder to their end."""
    return command("job", place, [*chosen(launcher, None, overrides), f"job=range(0,{size})"])


def explore(
    place: Path, *, launcher: str | None, sweeper: str, overrides: Sequence[str]
) -> list[str]:
    """Return the command by which a sweeper runs its trials to their end."""
    return command("trial", place, chosen(launcher, sweeper, overrides))


def command(task: str, place: Path, overrides: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-c",
        "from ashl.cli.plugins import main; main()",
        task,
        str(place),
        *overrides,
    ]


def main() -> None:
    """Run a launcher or a sweeper, in a process of its own."""
    task, place, *overrides = sys.argv[1:]
    threading.Thread(target=die_with_the_sweep, daemon=True).start()
    never_give_up()
    multirun(Path(place), {"job": play_job, "trial": play_trial}[task], overrides)


def die_with_the_sweep() -> None:
    """End this process group when the sweep's process ends."""
    os.read(sys.stdin.fileno(), 1)  # returns at its end only: the sweep writes nothing
    os.killpg(0, signal.SIGTERM)


def play_job(config: DictConfig) -> None:
    from ashl.study import launcher

    launcher.play_job(Path(config.place), config.job)


def play_trial(config: DictConfig) -> float:
    from ashl.study import search

    values = [
        config.axes[name] for name in sorted(config.axes, key=lambda name: int(str(name)[1:]))
    ]
    return search.play_trial(Path(config.place), HydraConfig.get().job.num, values, compose)


def multirun(place: Path, task: Callable[[DictConfig], Any], overrides: list[str]) -> None:
    """Run Hydra's multirun, with its own files in this folder."""
    own = {
        "sweep": {"dir": str(place), "subdir": "."},
        "output_subdir": None,
        "job": {"chdir": False},
    }
    with made({"place": str(place), "hydra": own}) as hydra:
        hydra.multirun(CONFIG, task, ["hydra/job_logging=none", *overrides])


@contextmanager
def made(config: dict[str, Any]) -> Generator[Hydra]:
    """Make a Hydra whose configuration holds `config`, the number of a job and the values of a
    trial.
    """
    GlobalHydra.instance().clear()
    if VERSION_BASE:
        version.setbase(VERSION_BASE["version_base"])
    ConfigStore.instance().store(CONFIG, {"job": 0, "axes": {}, **config})
    try:
        yield Hydra.create_main_hydra2(CONFIG, create_config_search_path(None))
    finally:
        GlobalHydra.instance().clear()


def never_give_up() -> None:
    """Make Hydra's submitit launcher return a result for a killed job.

    The launcher stops waiting for all jobs otherwise. Files say how each job ended.
    """
    try:
        from submitit.core.core import Job
    except ImportError:
        return
    from hydra.core.utils import JobReturn, JobStatus

    ask = Job.results

    def results(self: Job) -> list[Any]:
        try:
            return ask(self)
        except Exception:
            traceback.print_exc()
            return [JobReturn(status=JobStatus.COMPLETED)]

    Job.results = results


def axis_of(text: str, config_dir: Path | None) -> "Axis | None":
    """Return the axis of a search that an override declares; None for a single value.

    The sweeper chooses among listed values by their index. The indices of a `range()` are an
    interval, because its values have an order.
    """
    from ashl.study.search import Axis

    change = parsed(text, catalog(config_dir))
    key, _, value = text.lstrip("+").partition("=")
    if not change.is_delete() and change.is_interval_sweep():
        interval = change.value()
        assert isinstance(interval, IntervalSweep)
        return Axis(key, (f"{key}={interval.start}", f"{key}={interval.end}"), drawn=value)
    singles = tuple(alternatives(text, config_dir))
    if len(singles) == 1:
        return None
    last = len(singles) - 1
    assigned = None if change.is_delete() else change.value()
    ordered = isinstance(assigned, RangeSweep) and not assigned.shuffle
    numbers = f"interval(0,{last})" if ordered else f"choice({','.join(map(str, range(last + 1)))})"
    return Axis(key, singles, numbers=numbers)
