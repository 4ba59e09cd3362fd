"""Race settings: runs go on to their end one after the other, and clearly inferior settings are
stopped.

No run is begun twice or paused, so a race never does more work than its grid. It begins with the
baseline, which is never dropped, and goes through the settings seed by seed. Of a setting that is
dropped, no other seed is begun.

Rule: settings are compared at times a factor of √2 apart, over the seeds with which both have come
that far. The better half is safe. Another setting is dropped in these cases:
- A run of it diverged or failed.
- With every seed its loss is above the best one's at half the time: it needs more than twice the
  time.
- With one seed per setting, in the second half, after which curves seldom cross: its loss is above
  the best one's.
- Another setting has reached the target with the same seeds, and this one has not by `PATIENCE`
  times the slowest of these. While it has only one of several seeds, the factor is `TWICE`.

A setting that was first at the target with some seed, or within `PATIENCE` of the first, is not
judged by its loss any more.

Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016 (halving); the two conditions are our own.
`python -m tests.benchmarks.race` compares this rule with two pruners of Optuna.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ashl.study.grid import Setting, label
from ashl.study.jobs import has_ended_by_itself, read_summary
from ashl.tracking import jsonl
from ashl.tracking.recorder import METRICS

KEPT = 1 / 2  # share of the settings that is safe at each comparison
PATIENCE, TWICE = 1.5, 2.0  # factors on the time to target of another setting
MOMENTS = 8  # comparisons before the end: the first is at 1/16 of the longest run


class RunState(NamedTuple):
    """The state of a run at a time.

    `loss` is that of the last evaluation before it; infinite if the run diverged or failed.
    """

    loss: float
    reached_s: float | None


class LearningCurve(NamedTuple):
    """The progress of a run: its evaluations, its time to target, and whether it has ended."""

    times: Sequence[float]
    losses: Sequence[float]
    reached_s: float | None = None
    ended: bool = False
    failed: bool = False  # failed or diverged

    @property
    def now_s(self) -> float:
        return self.times[-1] if self.times else 0.0

    def state_at(self, time_s: float) -> RunState | None:
        """Return the state at `time_s`; None if the run has not come so far or has no evaluation
        before.

        A run that has ended keeps its last state.
        """
        if self.failed:
            return RunState(math.inf, None)
        if not self.times or self.times[0] > time_s or (not self.ended and self.now_s < time_s):
            return None
        reached = self.reached_s is not None and self.reached_s <= time_s
        return RunState(
            self.losses[bisect_right(self.times, time_s) - 1], self.reached_s if reached else None
        )


CurvesBySeed = Mapping[int, LearningCurve]  # a setting's runs that have begun, by seed


def comparison_times(horizon_s: float) -> list[float]:
    """Return the times at which settings are compared, up to the end of the longest run."""
    return [horizon_s / 2 ** (k / 2) for k in range(MOMENTS, -1, -1)]


def settings_to_drop(
    field: Mapping[str, CurvesBySeed], horizon_s: float, seeds: int, protected: Collection[str]
) -> dict[str, tuple[float, str]]:
    """Return the settings to drop now, with the time and the reason.

    Args: seeds is the number of runs of a setting; stays are the settings that are never dropped.
    """
    found, near = dict[str, tuple[float, str]](), near_first(field)
    for name, own in field.items():
        if name in protected or not own:
            continue
        failed = [run.now_s for run in own.values() if run.failed]
        verdict = (
            (max(failed), "diverged or failed") if failed else verdict_by_target(field, name, seeds)
        )
        for at_s in comparison_times(horizon_s) if name not in near else ():
            verdict = verdict or verdict_by_loss(
                field, name, at_s, at_s <= horizon_s / 2, seeds == 1
            )
        if verdict:
            found[name] = verdict
    return found


def rank_of(runs: Sequence[RunState]) -> tuple[float, float]:
    """Return the sort key of a setting, smaller is better: runs without the target, then time or
    loss.
    """
    missing = [run for run in runs if run.reached_s is None]
    if missing:
        return len(missing), statistics.fmean(run.loss for run in runs)
    return 0, statistics.median(run.reached_s or 0.0 for run in runs)


def near_first(field: Mapping[str, CurvesBySeed]) -> set[str]:
    """Return the settings that were first at the target with some seed, or within `PATIENCE` of
    the first.
    """
    found = set[str]()
    for seed in {seed for runs in field.values() for seed in runs}:
        reached = {name: runs[seed].reached_s for name, runs in field.items() if seed in runs}
        times = {name: time_s for name, time_s in reached.items() if time_s is not None}
        found |= {
            name for name, time_s in times.items() if time_s <= PATIENCE * min(times.values())
        }
    return found


def verdict_by_target(
    field: Mapping[str, CurvesBySeed], name: str, seeds: int
) -> tuple[float, str] | None:
    """Return the reason if another setting reached the target with these seeds long ago, and
    this one has not.
    """
    own = field[name]
    others = [runs for other, runs in field.items() if other != name]
    reached = list[float]()
    for runs in others:
        times = [runs[seed].reached_s or math.inf for seed in own if seed in runs]
        reached += [max(times)] if len(times) == len(own) and max(times) < math.inf else []
    if not reached:
        return None
    latest_s = min(reached) * (TWICE if len(own) < min(2, seeds) else PATIENCE)
    over = [run.now_s for run in own.values() if run.reached_s is None and run.now_s >= latest_s]
    if not over:
        return None
    return max(over), (
        f"had not reached the target by {max(over):.4g} s; the best reached it within"
        f" {min(reached):.4g} s"
    )


def verdict_by_loss(
    field: Mapping[str, CurvesBySeed], name: str, at_s: float, early: bool, alone: bool
) -> tuple[float, str] | None:
    """Return why this setting is clearly inferior at this time; None if it is not, or if this is
    unknown.
    """
    standings = {
        n: {s: at for s, run in runs.items() if (at := run.state_at(at_s))}
        for n, runs in field.items()
    }
    own = standings[name]
    peers = {
        n: [at[s] for s in own] for n, at in standings.items() if own and own.keys() <= at.keys()
    }
    order = sorted(peers, key=lambda n: rank_of(peers[n]))
    safe = order[: math.ceil(len(order) * KEPT)]
    if not own or name in safe or all(run.reached_s for run in own.values()):
        return None
    best = field[order[0]]
    before = [best[s].state_at(at_s / 2) for s in own]
    gaps = [at.loss - then.loss for at, then in zip(own.values(), before, strict=True) if then]
    if len(gaps) == len(own) and min(gaps) > 0:
        more = statistics.fmean(gaps)
        return at_s, f"loss higher by {more:.3g} than the best had in half the time"
    gap = sum(at.loss for at in own.values()) - sum(at.loss for at in peers[order[0]])
    if alone and not early and 0 < gap < math.inf:
        return at_s, f"loss higher by {gap:.3g}, with one seed"
    return None


class Race:
    """The state of a race in a folder.

    Args: dropped is the list of `sweep.json`: settings that an earlier race in this folder dropped
    stay dropped; stays is the label of the setting that the others are compared with; seeds is the
    number of seeds that each setting will have, if the grid does not contain all of them yet.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        folder: Path,
        dropped: list[dict[str, Any]],
        protected: str,
        say: Callable[[str], None],
        seeds: int = 1,
    ) -> None:
        self.dropped, self.say = dropped, say
        self.dropped_hashes = {
            str(entry["hash"]) for entry in dropped
        }  # hashes of runs that need not run
        self.by_label: dict[str, list[Setting]] = {}  # by label
        for setting in settings:
            self.by_label.setdefault(label(setting, without="seed"), []).append(setting)
        before = {label(s, without="seed") for s in settings if s.hash in self.dropped_hashes}
        self.stays = {protected, *before}
        self.seeds = max(seeds, *map(len, self.by_label.values()))
        self.curve_readers = {s.hash: CurveReader(folder / s.hash, s.config) for s in settings}
        self.longest_s = max(setting.predicted_s or 0.0 for setting in settings)

    @property
    def order(self) -> list[Setting]:
        """The runs in their order: seed by seed, the baseline first.

        So the baseline's result with a seed is known before the others run with it.
        """
        teams = sorted(self.by_label.items(), key=lambda item: item[0] not in self.stays)
        return [team[k] for k in range(self.seeds) for _, team in teams if k < len(team)]

    def judge(self) -> None:
        """Read the progress of all runs, and drop the settings that it rules out."""
        courses = {digest: seen.read_curve() for digest, seen in self.curve_readers.items()}
        known = {digest: course for digest, course in courses.items() if course}
        over = {digest for digest, course in known.items() if course.ended}
        field = {
            name: {s.config["seed"]: known[s.hash] for s in team if s.hash in known}
            for name, team in self.by_label.items()
        }
        done = {name for name, team in self.by_label.items() if {s.hash for s in team} <= over}
        horizon_s = self.longest_s or max((run.now_s for run in known.values()), default=0.0)
        found = settings_to_drop(field, horizon_s, self.seeds, self.stays | done)
        for name, (at_s, reason) in found.items():
            for digest in [s.hash for s in self.by_label[name] if s.hash not in over]:
                reached_s = at_s if digest in known else 0.0
                self.dropped.append({"hash": digest, "at_s": reached_s, "reason": reason})
                self.dropped_hashes.add(digest)
            self.stays.add(name)
            self.show_line(f"dropped {name}: {reason}")


class CurveReader:
    """A reader of the metrics of a run that may still be writing them."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.row = path, dict[str, Any]()  # the latest metrics
        self._offset = 0
        self.loss = "test/loss" if config["stop"]["target_loss"] is None else "train/loss"
        self.times: list[float] = []
        self.losses: list[float] = []
        self.last: LearningCurve | None = None

    def read(self) -> None:
        """Read the new metrics."""
        rows, self._offset = jsonl.tail(self.path / METRICS, self._offset)
        if rows and self.times and rows[0]["time_s"] <= self.times[-1]:  # it was rewritten
            self.times, self.losses = [], []
        for row in rows:
            loss = row.get(self.loss)
            self.times.append(row["time_s"])
            self.losses.append(math.inf if loss is None else loss)
            self.row = row

    def read_curve(self) -> LearningCurve | None:
        """Read the new metrics and return the progress of the run; None if it has not begun."""
        if (self.last and self.last.ended) or not self.path.exists():
            return self.last
        summary = read_summary(self.path)
        self.read()
        ended = summary is not None and has_ended_by_itself(summary)
        failed = summary is not None and ended and summary["status"] != "finished"
        reached_s = summary.get("time_to_target_s") if summary else None
        self.last = LearningCurve(self.times, self.losses, reached_s, ended, failed)
        return self.last
