"""Name the straggler of a run: the worker whose steps take much longer than those of the others.

A worker's row is a mapping with `rank`, `steps`, `compute_s` and `wait_s`, all since the start.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import Any

STRAGGLER_RATIO = 1.2  # a straggler's step takes at least so many times the median
WINDOW_STEPS, WINDOW_S = 3, 1.0  # a window of a run has so many steps of each worker, and seconds
AGREEING = 3  # consecutive windows that name the same worker make a verdict sure
Row = Mapping[str, Any]


def find_straggler(workers: Sequence[Row], time_s: float) -> dict[str, Any] | None:
    """Return the slowest worker, if a step takes it much longer than the median worker.

    Returns: its rank, `slowdown` and `others_wait_share`. The slowdown is its seconds of computing
    per step, relative to the median of all workers. The share is that of the run in which the other
    workers waited, on average. None if no worker is `STRAGGLER_RATIO` times slower than the median.
    """
    step_s = {row["rank"]: row["compute_s"] / row["steps"] for row in workers if row["steps"]}
    if len(step_s) < 2 or not time_s:
        return None
    slowest = max(step_s, key=step_s.__getitem__)
    # With two workers the mean of the middle values would include the straggler itself.
    usual_s = median_low(step_s.values())
    if step_s[slowest] < STRAGGLER_RATIO * usual_s or not usual_s:
        return None
    waited_s = [row["wait_s"] for row in workers if row["rank"] != slowest]
    return {
        "worker": slowest,
        "slowdown": step_s[slowest] / usual_s,
        "others_wait_share": fmean(waited_s) / time_s,
    }


def describe_straggler(found: Mapping[str, Any] | None, noun: str = "worker") -> str:
    """Return which worker is the slowest and what waiting cost the others; "" without one."""
    return describe_verdicts([found], noun) if found else ""


def describe_verdicts(verdicts: Sequence[Mapping[str, Any]], noun: str = "worker") -> str:
    """Return the same for one worker in several runs, with the range of each number."""
    slower = range_text([f"{found['slowdown']:.2g}" for found in verdicts])
    waited = range_text([f"{100 * found['others_wait_share']:.1f}" for found in verdicts])
    return (
        f"{noun} {verdicts[0]['worker']} computes {slower} times slower than the median; the others"
        f" waited {waited} % of the time"
    )


def range_text(numbers: Sequence[str]) -> str:
    """Return the least and the largest of some numbers, or the number that all are."""
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if low == high else f"{low} to {high}"


class StragglerFinder:
    """Finds stragglers while a run is going on.

    A verdict is sure once `AGREEING` consecutive windows have named the same worker. A worker that
    is slow for a moment, or at its first steps, is not named.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None  # the latest sure verdict
        self._known = set[int]()  # the workers of all sure verdicts
        self._named: int | None = None  # the worker that the latest windows named
        self._windows = 0  # how many of them did
        self._since: tuple[dict[int, Row], float] = {}, 0.0  # the start of the first of them
        self._start: tuple[dict[int, Row], float] = {}, 0.0  # the start of this window

    def observe(self, workers: Sequence[Row], time_s: float) -> dict[str, Any] | None:
        """Return a sure verdict the first time that it names this worker, else None.

        Args: workers, rows of the workers that take part; time_s, of the run.
        """
        before, start_s = self._start
        passed = [progress_between(before.get(row["rank"]), row) for row in workers]
        if time_s - start_s < WINDOW_S or any(row["steps"] < WINDOW_STEPS for row in passed):
            return None
        named = (find_straggler(passed, time_s - start_s) or {}).get("worker")
        if named != self._named:
            self._named = named
            self._windows = 0
            self._since = self._start
        self._windows += 1
        self._start = {row["rank"]: row for row in workers}, time_s
        if named is None or self._windows < AGREEING:
            return None
        known, since_s = self._since
        all_passed = [progress_between(known.get(row["rank"]), row) for row in workers]
        self.found = find_straggler(all_passed, time_s - since_s) or self.found
        if self.found is None or self.found["worker"] in self._known:
            return None
        self._known.add(self.found["worker"])
        return self.found


def progress_between(before: Row | None, now: Row) -> dict[str, Any]:
    """Return what a worker has done since an earlier row."""
    keys = ("steps", "compute_s", "wait_s")
    return {
        "rank": now["rank"],
        **{key: now[key] - (before[key] if before else 0) for key in keys},
    }
