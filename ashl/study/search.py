"""Search: a sweeper chooses the next setting by the costs of the trials before.

A trial is a setting with each of the requested seeds. Its cost, which the sweeper minimises, is a
mean over these runs: the time to the target, or the final loss if there is no target. The folder of
a search is a sweep's folder. A run that has ended is not repeated: a resumed search chooses the
same settings again, finds their results at once, and continues from there.
"""

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console

from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, key_of
from ashl.errors import AshlError, UsageError
from ashl.plan.plan import TARGETS
from ashl.study import sweep
from ashl.study.grid import Grid, Line, Setting, Skipped, checked, label, points
from ashl.study.launcher import WithdrawnError, at_work, begun, last_words, over, run_while
from ashl.study.race import Standing
from ashl.study.slots import ENDED, LOG, POLL_S, Job, read_summary
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS
from ashl.tracking.sweep_progress import Reading, SweepProgress

ASKED = "search.json"
# The cost of a trial that cannot run, diverges or misses the target: sweepers need finite numbers.
NEVER = 1e9

Compose = Callable[[Sequence[str], Path | None], dict[str, Any]]


@dataclass(frozen=True)
class Axis:
    """A key that varies in a search.

    `singles` are its alternatives, of which the sweeper chooses a number (`numbers`, in Hydra's
    grammar). For an interval they are its two ends, and the sweeper draws a value from it
    (`drawn`).
    """

    key: str
    singles: tuple[str, ...]
    numbers: str = ""
    drawn: str = ""

    def asked(self, number: int) -> str:
        """Return the axis as an override for the sweeper.

        The key is a neutral one: Hydra composes another configuration than ours, in which the own
        key does not exist.
        """
        return f"+axes.a{number}={self.drawn or self.numbers}"

    def single(self, value: float) -> str:
        """Return the override for the sweeper's value, with four significant digits."""
        if not self.drawn:
            return self.singles[int(value)]
        return f"{self.key}={value if isinstance(value, int) else f'{value:.4g}'}"


@dataclass(frozen=True, kw_only=True)
class Search:
    """The space of a search: fixed overrides, one alternative of each axis, and every seed."""

    fixed: tuple[str, ...]
    axes: tuple[Axis, ...]
    seeds: tuple[str, ...]
    config_dir: str | None

    def line(self, *singles: str) -> Line:
        """Return the grid of one trial."""
        return Line([*([single] for single in (*self.fixed, *singles)), self.seeds])

    def corners(self) -> list[Line]:
        """Return grids that contain every alternative once, with the first ones of all other axes.

        They are checked before the search.
        Raises: UsageError if no key varies.
        """
        if not self.axes:
            raise UsageError(
                "a search needs something to choose, as in 'optimizer.lr=interval(0.01,0.5)'"
                " sync=bsp,ssp"
            )
        fixed = [[single] for single in (*self.fixed, self.seeds[0])]
        firsts = [axis.singles[:1] for axis in self.axes]
        return [
            Line([*fixed, *firsts[:k], axis.singles, *firsts[k + 1 :]])
            for k, axis in enumerate(self.axes)
        ]


def folder_of(overrides: Sequence[str], config: dict[str, Any]) -> Path:
    """Return the folder of a search; its name depends on the typed overrides and not on their
    order.
    """
    if config["run"]["dir"]:
        return Path(config["run"]["dir"])
    digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]
    return sweep.SWEEPS / f"{config['name'] or 'search'}-{digest}"


# --- the sweep's side
# -------------------------------------------------------------------------------------------------


def search(
    asked: Search,
    corners: Grid,
    explore: Callable[[Path], Sequence[str]],
    command: CommandLine,
    typed: Sequence[str],
    *,
    folder: Path,
    slots: int,
    trials: int,
    rerun_failed: bool,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Let the sweeper try settings until its trials are used up, and return the summaries of the
    runs.

    Raises: UsageError for a preset with a grid; AshlError if the sweeper fails; KeyboardInterrupt.
    Runs that have ended by then are kept.
    """
    if corners.settings[0].config["sweep"]:
        raise UsageError(
            "a preset that is a grid of its own cannot be searched; run it without --sweeper"
        )
    keys = [*(axis.key for axis in asked.axes), *(["seed"] if len(asked.seeds) > 1 else [])]
    document = {"search": asdict(asked), "folder": str(folder), "keys": keys, "slots": slots}
    with sweep.locked(folder):
        tried = Tried(folder, keys, typed, command)
        for path in [folder / digest for digest in tried.settings if rerun_failed]:
            if not sweep.ended(path, rerun_failed):
                sweep.clear(path)
        console = Console(highlight=False)
        if not quiet:
            console.print(
                f"{folder.name} {trials} trials; folder {folder}", soft_wrap=True, markup=False
            )
        progress = SweepProgress(console, trials * len(asked.seeds), quiet=quiet)
        with (
            sweep.copied_to_mlflow(corners, folder, str(command), console) as to_mlflow,
            at_work(folder, {ASKED: document}, explore) as (place, process),
        ):
            ended = False
            try:
                while not ended:
                    ended = over(process)
                    tried.take_in(place, progress, to_mlflow)
            finally:
                progress.close()
            sweep.conclude(folder, command, console)
        if process.returncode:
            raise AshlError(f"the sweeper gave up ({last_words(place)}); its output is in {place}")
        shutil.rmtree(place, ignore_errors=True)
        return [
            found
            for digest in tried.settings
            if (found := read_summary(folder / digest)) is not None
        ]


class Tried:
    """The settings that this search and earlier ones in this folder tried, as in `sweep.json`."""

    def __init__(
        self, folder: Path, keys: Sequence[str], typed: Sequence[str], command: CommandLine
    ) -> None:
        self.folder, self.keys, self.typed, self.command = folder, keys, typed, command
        self.settings: dict[str, Setting] = {}
        self.skipped: dict[str, Skipped] = {}
        self.running: dict[str, Setting] = {}
        self.read: set[str] = set()
        self.readings: dict[str, Reading] = {}
        before = jsonl.whole(folder / sweep.SWEEP) or {}
        for entry in before.get("settings", []):
            known = {key: entry[key] for key in ("hash", "overrides", "axes", "predicted_s")}
            self.settings[entry["hash"]] = Setting(**known, config={})
        self.write()

    def take_in(
        self, place: Path, progress: SweepProgress, to_mlflow: Callable[[Setting], None]
    ) -> None:
        """Read what trials have written since the last call."""
        fresh = sorted(
            (path for path in place.glob("trial-*.json") if path.name not in self.read),
            key=number_of,
        )
        for path in fresh:
            record = json.loads(path.read_text(encoding="utf-8"))
            self.read.add(path.name)
            settings = [Setting(**entry) for entry in record["settings"]]
            self.running |= {s.hash: s for s in settings}
            self.settings |= {s.hash: s for s in settings}
            for point, reason in record["skipped"]:
                self.skipped[" ".join(point)] = Skipped(tuple(point), reason)
                progress.say(f"skipped: {' '.join(point)}: {reason}")
        if fresh:
            self.write()
        for setting in list(self.running.values()):
            summary = read_summary(self.folder / setting.hash)
            if summary is not None and summary["status"] in ENDED:
                del self.running[setting.hash]
                progress.ended(label(setting), summary)
                to_mlflow(setting)
        begun = [
            setting
            for setting in self.running.values()
            if (self.folder / setting.hash / LOG).exists()
        ]
        for setting in begun:
            limits = setting.config.get("stop") or {}
            reading = Reading(self.folder / setting.hash / METRICS, limits, setting.predicted_s)
            self.readings.setdefault(setting.hash, reading)
        progress.show([self.readings[setting.hash].running(label(setting)) for setting in begun])

    def write(self) -> None:
        settings = tuple(self.settings.values())
        axes = {
            key: list(dict.fromkeys(s.axes[key] for s in settings if key in s.axes))
            for key in self.keys
        }
        grid = Grid(axes, settings, tuple(self.skipped.values()), {}, 0)
        jsonl.write_json(
            self.folder / sweep.SWEEP,
            sweep.document(grid, self.typed, self.folder.name, [], self.command),
        )


def number_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


# --- the trial's side
# -------------------------------------------------------------------------------------------------


def play_trial(place: Path, number: int, values: Sequence[float], compose: Compose) -> float:
    """Run a trial to its end, in the process that the sweeper's launcher started, and return its
    cost.

    Raises: WithdrawnError if the search ends before that.
    """
    leave = place / ASKED
    try:
        record = json.loads(leave.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WithdrawnError from None
    axes = tuple(Axis(**axis) for axis in record["search"].pop("axes"))
    asked = Search(axes=axes, **record["search"])
    point = [axis.single(value) for axis, value in zip(asked.axes, values, strict=True)]
    try:
        settings, skipped = made(asked, record["keys"], point, compose), []
    except UsageError as error:
        settings, skipped = [], [(point, str(error))]
    plain = [asdict(replace(setting, plan=None)) for setting in settings]
    jsonl.write_json(place / f"trial-{number}.json", {"settings": plain, "skipped": skipped})
    if not settings:
        return 2 * NEVER
    folder = Path(record["folder"])
    missing = [s for s in settings if not sweep.ended(folder / s.hash, False)]
    mine = [s for s in missing if taken(place / f"{s.hash}.taken")]
    for setting in mine:
        sweep.clear(folder / setting.hash)
    jobs = [Job(path := folder / s.hash, sweep.inside(s.config, path), s.overrides) for s in mine]
    run_while(leave, place / begun(number), jobs, record["slots"])
    # Another trial may have chosen the same settings: wait for its runs.
    while not all(sweep.ended(folder / s.hash, False) for s in missing):
        if not leave.exists():
            raise WithdrawnError
        Event().wait(POLL_S)
    return statistics.fmean(cost(standing(folder / s.hash, s.config), s.config) for s in settings)


def made(
    asked: Search, keys: Sequence[str], point: Sequence[str], compose: Compose
) -> list[Setting]:
    """Return the settings of this trial, one for each seed.

    Raises: UsageError if they cannot run.
    """
    config_dir = Path(asked.config_dir) if asked.config_dir else None
    settings, plans = [], {}
    for wanted in points([asked.line(*point)]):
        kept, config, plan = checked(wanted, lambda single: compose(single, config_dir), plans)
        chosen = {key_of(single): single.partition("=")[2] for single in kept}
        axes = {key: chosen[key] for key in keys if key in chosen}
        digest = config_hash(config)
        settings.append(
            Setting(
                hash=digest, overrides=kept, axes=axes, config=config, predicted_s=plan.predicted_s
            )
        )
    return settings


def taken(mark: Path) -> bool:
    """Return True if this trial is the first of this search that claims a setting."""
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        return True
    return False


def standing(path: Path, config: dict[str, Any]) -> Standing:
    """Return the state of a run at its end."""
    summary = read_summary(path) or {"status": "failed"}
    if summary["status"] in ("diverged", "failed"):
        return Standing(math.inf, None)
    loss = summary["final"]["test_loss" if config["stop"]["target_loss"] is None else "train_loss"]
    return Standing(math.inf if loss is None else loss, summary["time_to_target_s"])


def cost(found: Standing, config: dict[str, Any]) -> float:
    """Return the cost of a run, which the sweeper minimises.

    A run that misses the target costs more than every run that reaches it; among such runs the loss
    decides.
    """
    if found.reached_s is not None:
        return found.reached_s
    stop = config["stop"]
    aims = any(stop.get(target) is not None for target in TARGETS)
    return min(found.loss, NEVER) + (NEVER if aims else 0.0)
