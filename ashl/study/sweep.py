"""Run a sweep: the runs of a grid in one folder.

The same grid finds the same folder again and runs only what is missing there.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ashl.config.construct import construct
from ashl.config.cores import usable_cores
from ashl.config.flat import flat_config
from ashl.config.identity import config_hash
from ashl.config.override import CommandLine, key_of, path_of
from ashl.config.recorded import CONFIG
from ashl.errors import AshlError, UsageError, unwritable_path_error
from ashl.planning import uncontended_link_note
from ashl.planning.compile_plan import prepare_plan
from ashl.report import tables
from ashl.report.compare import write_report
from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.records import (
    SWEEP,
    BrokenRecordError,
    group_skipped,
    read_study,
    read_sweep,
)
from ashl.report.settings import find_label, usual_baseline
from ashl.run.host_time import Costs, measure_costs, predict_host_s
from ashl.run.train import RUNS, is_virtual, warn
from ashl.runtime.rank_checkpoint import list_checkpoints
from ashl.study.grid import Grid, Setting, label
from ashl.study.jobs import (
    ENDED,
    Job,
    Pool,
    clear_remains,
    has_ended,
    local_pool,
    read_summary,
    run_all,
    withdraw_jobs,
)
from ashl.study.race import CurveReader, Race
from ashl.tracking import jsonl
from ashl.tracking.console import plain_table, print_unwrapped, seconds
from ashl.tracking.copying import Copier, params_of, tracker_maker
from ashl.tracking.counting import Counting
from ashl.tracking.option import TITLES
from ashl.tracking.sweep_progress import SweepProgress, progress_of
from ashl.tracking.tracker import TrackedRun

SCHEMA = 1
SWEEPS = Path("runs/sweeps")
MAX_ROWS = 40
# parts of a configuration that determine the host time of a step
COSTLY = ("model", "dataset", "task", "optimizer", "runtime", "allow_targets")
TRACKING_S = 120.0  # seconds that the end of a sweep waits for its copy in a tracker


def folder_of(
    texts: Iterable[str], config: Mapping[str, Any], parent: Path = SWEEPS, kind: str = "sweep"
) -> Path:
    """Return run.dir, or else a folder in `parent` whose name depends on these texts and not on
    their order; it begins with the study's own name, or its kind.
    """
    if config["run"]["dir"]:
        return path_of(config["run"]["dir"])
    digest = hashlib.sha256("".join(sorted(texts)).encode()).hexdigest()[:8]
    return parent / f"{config['name'] or kind}-{digest}"


def folder_of_grid(grid: Grid) -> Path:
    """Return the folder of a grid's sweep."""
    return folder_of([setting.hash for setting in grid.settings], grid.settings[0].config)


def pool_here(folder: Path, slots: int) -> Pool:
    """Return a pool of processes on this machine, for the sweep in any folder."""
    return local_pool(slots)


class SweepOutcome(NamedTuple):
    """The outcome of a sweep: its folder, the summaries of its runs, and how they compare.

    `board` is None if no run has finished. `winner` is the command that repeats the winner, "" if
    no setting reached the target. `unrecorded` is the number of runs without a summary, for example
    on a full disk.
    """

    folder: Path
    summaries: list[dict[str, Any]]
    board: Leaderboard | None
    winner: str
    unrecorded: int = 0

    @property
    def error(self) -> str:
        """Return a sentence about runs that left no record; "" if all did."""
        if not self.unrecorded:
            return ""
        return (
            f"{self.unrecorded} runs left no record in {self.folder}; free some space there, and"
            " give the same command again"
        )

    @property
    def has_failed_run(self) -> bool:
        """Return True if a run has failed."""
        return any(summary["status"] == "failed" for summary in self.summaries)

    def document(self) -> dict[str, Any]:
        """Return the answer, the leaderboard, and the summaries of the runs."""
        board = {} if self.board is None else tables.document(self.board)
        return {"folder": str(self.folder), **board, "runs": self.summaries}


def sweep(
    grid: Grid,
    overrides: Sequence[str],
    *,
    slots: int | None,
    rerun_failed: bool,
    race: bool,
    quiet: bool,
    silent: bool = False,
    baseline: str | None = None,
    command: CommandLine,
    make_pool: Callable[[Path, int], Pool] = pool_here,
) -> SweepOutcome:
    """Run the missing runs, print and write the outcome, and return it.

    Args: race stops settings that are clearly inferior; command is the typed command; make_pool
    returns the pool for a folder and a number of runs at a time; baseline is the setting that the
    others are compared with; quiet shows no progress; silent shows not even the outcome.
    Raises: AshlError if the folder cannot be used or the launcher fails; KeyboardInterrupt. Runs
    that have ended by then are kept.
    """
    folder = folder_of_grid(grid)
    check_same_grid(grid, folder)
    with lock_folder(folder):
        record = begin_record(grid, overrides, folder, keep_dropped=race, command=command)
        missing = [s for s in grid.settings if not has_ended(folder / s.hash, rerun_failed)]
        console = Console(highlight=False, quiet=silent)
        if not quiet:
            announce(console, grid, folder, len(missing))
        progress = SweepProgress(console, len(missing), quiet=quiet)
        first = grid.settings[0].config
        with copy_to_tracker(first, folder, str(command), console) as to_tracker:
            pool = make_pool(folder, slots or slots_for(grid))
            contest = None
            if race:
                protected = protected_setting(grid, baseline)
                contest = Race(grid.settings, folder, record, protected, progress.print_line)
            run_missing(grid.settings, folder, missing, pool, progress, to_tracker, contest)
            dropped = contest.dropped_hashes if contest else ()
            ran = {setting.hash for setting in grid.settings}.difference(dropped)
            return conclude(folder, grid.settings, command, console, baseline, ran)


def check_same_grid(grid: Grid, folder: Path) -> None:
    """Refuse a folder that holds the sweep of another grid: its record would be replaced.

    A grid with more settings continues the sweep. Raises: UsageError.
    """
    try:
        _, children, *_ = read_sweep(folder)
    except BrokenRecordError:  # there is none, or it is written again
        return
    if {digest for _, digest, *_ in children} - {setting.hash for setting in grid.settings}:
        raise other_sweep_error(folder)


def other_sweep_error(folder: Path) -> UsageError:
    """Return the error of a folder that holds a sweep with other settings."""
    return UsageError(
        f"{folder} already holds a sweep with other settings; choose another run.dir, and"
        f" `ashl compare {folder} NEW` ranks both"
    )


def begin_record(
    grid: Grid, overrides: Sequence[str], folder: Path, *, keep_dropped: bool, command: CommandLine
) -> dict[str, Any]:
    """Write and return the sweep's record.

    With `keep_dropped`, settings that an earlier race in this folder dropped stay dropped.
    """
    before = jsonl.read_json(folder / SWEEP) or {}
    dropped = before.get("dropped", []) if keep_dropped else []
    record = document(grid, overrides, folder.name, dropped, command)
    jsonl.write_json(folder / SWEEP, record)
    return record


def run_missing(
    settings: Sequence[Setting],
    folder: Path,
    missing: Sequence[Setting],
    pool: Pool,
    progress: SweepProgress,
    to_tracker: Callable[[Setting], None] = lambda setting: None,
    race: Race | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run the missing ones of a grid's settings.

    Args: race may drop settings; must_stop returns True once the runs in progress must exit and no
    other begin.
    """
    for setting in settings:
        # A setting may be missing and not ended: a race has dropped it.
        if setting not in missing and has_ended(folder / setting.hash):
            to_tracker(setting)
    order = (
        [s for s in race.order if s in missing and s.hash not in race.dropped_hashes]
        if race
        else missing
    )
    for _ in run_settings(folder, order, pool, progress, to_tracker, race, must_stop):
        pass


def run_settings(
    folder: Path,
    settings: Iterable[Setting],
    pool: Pool,
    progress: SweepProgress,
    to_tracker: Callable[[Setting], None] = lambda setting: None,
    race: Race | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Setting]:
    """Run these settings to their end, or until the race drops them, or until `must_stop` returns
    True.

    Each is taken when it can begin, and yielded when it has ended. The progress is closed at the
    end.
    """
    by_folder, readers = dict[Path, Setting](), dict[Path, CurveReader]()

    def jobs() -> Iterator[Job]:
        for setting in settings:
            path = folder / setting.hash
            clear_remains(path)
            by_folder[path] = setting
            readers[path] = (
                race.curve_readers[setting.hash] if race else CurveReader(path, setting.config)
            )
            config = config_in_sweep(setting.config, path)
            yield Job(path, config, setting.overrides, resume=bool(list_checkpoints(path)))

    def show(jobs: list[Job]) -> None:
        shown = []
        for job in jobs:
            readers[job.folder].read()
            row, own = readers[job.folder].row, by_folder[job.folder]
            shown.append(progress_of(label(own), row, own.config["stop"], own.predicted_s))
        progress.show(shown)
        if race:
            race.judge()

    def is_unwanted(job: Job) -> bool:
        return must_stop() or (
            race is not None and by_folder[job.folder].hash in race.dropped_hashes
        )

    try:
        for job in run_all(pool, jobs(), show, is_unwanted):
            summary, setting = read_summary(job.folder), by_folder[job.folder]
            if summary is not None and summary["status"] in ENDED:
                progress.count_ended(label(setting), summary)
                to_tracker(setting)
            if race:
                race.judge()
            yield setting
    finally:
        progress.close()


def protected_setting(grid: Grid, baseline: str | None) -> str:
    """Return the setting that a race never drops: the named one, else the usual baseline.

    Raises: UsageError if the name fits no setting or several.
    """
    labels = {label(setting, without="seed"): setting for setting in grid.settings}
    if baseline is not None:
        return find_label({name: setting.axes for name, setting in labels.items()}, baseline)
    place = usual_baseline([setting.config["choices"] for setting in labels.values()])
    return "" if place is None else list(labels)[place]


def conclude(
    folder: Path,
    settings: Sequence[Setting],
    command: CommandLine,
    console: Console,
    baseline: str | None = None,
    ran: Collection[str] = (),
) -> SweepOutcome:
    """Print the answer of a sweep whose runs have ended, write its report, and return its
    outcome.

    Args: ran, hashes of the runs that should have left a record.
    """
    summaries = {setting.hash: read_summary(folder / setting.hash) for setting in settings}
    known = [summary for summary in summaries.values() if summary]
    unrecorded = sum(summaries[run] is None for run in ran)
    outcome = SweepOutcome(folder, known, None, "", unrecorded)
    try:
        board = rank(read_study([folder]), baseline=baseline)
    except UsageError as error:  # no run has finished
        print_unwrapped(console, str(error))
        return outcome
    report = write_report(board, command=str(command))
    tables.print_leaderboard(console, board)
    print_unwrapped(console, f"report  {report}")
    first = board.ranked_rows[0]
    if not math.isfinite(first.spread.middle):
        return outcome._replace(board=board)
    winner = next(setting for setting in settings if setting.hash == first.runs[0].hash)
    own = [text for text in winner.overrides if key_of(text) not in ("run.dir", "sweep")]
    return outcome._replace(board=board, winner=command.follow_up("train", *own))


@contextmanager
def copy_to_tracker(
    config: Mapping[str, Any],
    folder: Path,
    command: str,
    console: Console,
    wait_s: float = TRACKING_S,
) -> Generator[Callable[[Setting], None]]:
    """Copy each run that has ended to the tracker, and the sweep at its end, in a thread.

    Args: config is the configuration of any of the runs; wait_s limits the wait at the end.
    """
    sink = construct(config["tracking"], "tracking", config["allow_targets"]).sink
    if sink == "none":
        yield lambda setting: None
        return
    own = TrackedRun(folder.absolute(), folder.name, folder.name, kind="sweep", note=f"`{command}`")
    copier = Copier(tracker_maker(sink, RUNS.absolute()), TITLES[sink], own)

    def to_tracker(setting: Setting) -> None:
        run_dir, params = folder.absolute() / setting.hash, params_of(setting.config)
        copier.add(TrackedRun(run_dir, label(setting), folder.name, params))

    try:
        yield to_tracker
    finally:
        shown, warning = copier.finish(wait_s)
        warn(warning)
        if shown and not warning:
            print_unwrapped(console, f"{copier.title}  {shown}")


def config_in_sweep(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the configuration of a run inside a sweep: it writes its folder, and the sweep
    reports it to MLflow.
    """
    saves = bool(config["run"]["save_weights"])
    run = config["run"] | {"dir": str(folder), "save_weights": saves}
    return config | {"run": run, "tracking": config["tracking"] | {"sink": "none"}, "sweep": None}


def slots_for(grid: Grid) -> int:
    """Return how many runs go at a time: one per core in virtual time, one real run per machine."""
    real = any(not is_virtual(setting.config) for setting in grid.settings)
    return 1 if real else usable_cores()


def document(
    grid: Grid,
    overrides: Sequence[str],
    name: str,
    dropped: list[dict[str, Any]],
    command: CommandLine,
) -> dict[str, Any]:
    """Return the content of `sweep.json`: the grid, its settings with their folders, and what is
    left out and why.
    """
    fields = ("hash", "overrides", "axes", "predicted_s", "label")
    settings = [
        {"folder": s.hash, **{name: getattr(s, name) for name in fields}} for s in grid.settings
    ]
    return {
        "schema": SCHEMA,
        "name": name,
        "overrides": list(overrides),
        "command": str(command),
        "train": command.follow_up("train"),
        "axes": grid.axes,
        "settings": settings,
        "skipped": [skipped._asdict() for skipped in grid.skipped],
        "unused": grid.unused,
        "merged": grid.merged,
        "dropped": dropped,
    }


@contextmanager
def lock_folder(folder: Path, own_record: str = SWEEP) -> Generator[None]:
    """Lock the folder for one sweep at a time.

    Args: own_record, the file that a search or an advice has in its folder beside `sweep.json`.
    Raises: UsageError if the folder cannot be written, holds a run, or a sweep without that file;
    AshlError if another sweep runs in it.
    """
    try:
        if (folder / CONFIG).is_file():  # `ashl compare` would no longer find the run
            raise UsageError(f"{folder} already holds a run; choose another run.dir")
        if (folder / SWEEP).is_file() and not (folder / own_record).is_file():
            raise other_sweep_error(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "wb")  # noqa: SIM115
    except OSError as error:
        fix = "choose another run.dir"
        raise unwritable_path_error(
            f"cannot write to the sweep's folder {folder}", error, fix
        ) from error
    with lock:
        try:
            jsonl.lock(lock)
        except BlockingIOError as error:
            raise AshlError(
                f"another sweep is running in {folder}; wait for it, or choose another run.dir"
            ) from error
        withdraw_jobs(folder)  # a sweep that was killed here may have left jobs in a queue
        try:
            yield
        finally:
            withdraw_jobs(folder)


def announce(console: Console, grid: Grid, folder: Path, missing: int) -> None:
    """Print what will run and what will not, before anything runs."""
    total = len(grid.settings)
    counted = f"{total} {'run' if total == 1 else 'runs'}"
    rest = "" if missing == total else f", {total - missing} of them done, {missing} to go"
    lines = [f"{folder.name} {counted}{rest}; folder {folder}"]
    for key, count in sorted(grid.unused.items()):
        why = f": {grid.reasons[key]}" if key in grid.reasons else ""
        lines.append(f"{key} has no effect in {count} of the points and is left out there{why}")
    if grid.merged:
        same = "points with the same configuration as another point"
        lines.append(f"{same}, run once: {grid.merged}")
    configs = (flat_config(setting.config) for setting in grid.settings)
    lines += [f"note: {note}" for note in uncontended_link_note.note_comparison(configs)]
    skipped = group_skipped(grid.skipped, grid.axes)
    lines += [f"skipped: {out.name}: {out.reason}" for out in skipped[:MAX_ROWS]]
    if len(skipped) > MAX_ROWS:
        lines.append(f"skipped: {len(skipped) - MAX_ROWS} more, all in {folder / SWEEP}")
    print_unwrapped(console, *lines)


def show_forecast(grid: Grid, forecast: Mapping[str, Any]) -> None:
    """Print what a sweep would run: each run's predicted time on its own clock, and all on this
    machine.

    Args: forecast is that of `forecast_of`.
    """
    console, missing = Console(highlight=False), len(forecast["missing"])
    announce(console, grid, Path(forecast["folder"]), missing)
    # Lines have keys of their own, so that columns by key would be mostly empty.
    named = any(setting.label for setting in grid.settings)
    axes = [key for key in grid.axes if any(key in setting.axes for setting in grid.settings)]
    titles = ["run", *(["setting"] if named else axes), "predicted"]
    rows = []
    for setting in grid.settings[:MAX_ROWS]:
        values = [label(setting)] if named else [setting.axes.get(key, "-") for key in axes]
        rows.append([setting.hash, *values, seconds(setting.predicted_s)])
    console.print(plain_table(titles, rows, left=titles))
    if len(grid.settings) > MAX_ROWS:
        console.print(f"and {len(grid.settings) - MAX_ROWS} more")
    known = [setting.predicted_s for setting in grid.settings if setting.predicted_s is not None]
    unknown = len(grid.settings) - len(known)
    rest = f", and {unknown} without a prediction" if unknown else ""
    total = f"{seconds(sum(known))} on the runs' own clocks, {len(known)} runs{rest}"
    console.print(f"predicted total: {total}")
    if forecast["host_s"] is not None:
        together = f", {forecast['at_once']} at a time" if forecast["at_once"] > 1 else ""
        runs = f"{missing} run{'s' * (missing != 1)}"
        about = f"on this machine about {seconds(forecast['host_s'])} for {runs}{together}"
        print_unwrapped(console, f"{about}, less if a target ends a run")


def forecast_of(
    grid: Grid, overrides: Sequence[str], slots: int | None, command: CommandLine
) -> dict[str, Any]:
    """Return what a sweep would run: its record, and the seconds of the missing runs here."""
    folder = folder_of_grid(grid)
    check_same_grid(grid, folder)
    missing = [setting for setting in grid.settings if not has_ended(folder / setting.hash)]
    at_once = min(slots or slots_for(grid), len(missing))
    return {
        "folder": str(folder),
        **document(grid, overrides, folder.name, [], command),
        "missing": [setting.hash for setting in missing],
        "at_once": at_once,
        "host_s": host_time_s(missing, at_once),
    }


def host_time_s(missing: Sequence[Setting], at_once: int) -> float | None:
    """Predict the host seconds of the missing runs, if no target ends one; None if unknown."""
    if not missing or not all(is_virtual(setting.config) for setting in missing):
        return None
    costs, total_s = dict[str, Costs | None](), 0.0
    kinds = [config_hash({key: setting.config.get(key) for key in COSTLY}) for setting in missing]
    with Counting("timing steps") as counting:
        for kind, setting in zip(kinds, missing, strict=True):
            if kind not in costs:
                counting.update(len(costs), len(set(kinds)))
                costs[kind] = measure_costs(prepare_plan(setting.config, None, setting.overrides))
            found = costs[kind]
            if found is None or setting.plan is None:
                return None
            own_s = predict_host_s(setting.plan, found)
            if own_s is None:
                return None
            total_s += own_s
    return total_s / at_once
