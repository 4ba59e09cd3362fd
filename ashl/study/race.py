"""Race settings: runs go on to their end one after the other, and clearly inferior settings are
stopped.

No run is begun twice or paused, so a race never does more work than its grid. It begins with the
baseline, which is never dropped, and goes through the settings seed by seed. Of a setting that is
dropped, no other seed is begun.

Rule: settings are compared at times a factor of √2 apart, over the seeds with which both have come
that far. A comparison of losses never drops the better half. A setting is dropped in these cases:
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

from ashl.report.records import SWEEP
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

    def state_at_time(self, time_s: float) -> RunState | None:
        """Return the state at `time_s`; None if the run has not come so far or has no evaluation
        before.

        A run that has ended keeps its last state.
        """
        if self.failed:
            return RunState(math.inf, None)
        if not self.times or self.times[0] > time_s or (not self.ended and self.now_s < time_s):
            return None
        reached = self.reached_s is not None and self.reached_s <= time_s
        loss = self.losses[bisect_right(self.times, time_s) - 1]
        return RunState(loss, self.reached_s if reached else None)


CurvesBySeed = Mapping[int, LearningCurve]  # a setting's runs that have begun, by seed
Verdict = tuple[float, str]  # when a setting is dropped [s], and why


def comparison_times(horizon_s: float) -> list[float]:
    """Return the times at which settings are compared, up to the end of the longest run."""
    return [horizon_s / 2 ** (k / 2) for k in range(MOMENTS, -1, -1)]


def settings_to_drop(
    curves: Mapping[str, CurvesBySeed], horizon_s: float, seeds: int, protected: Collection[str]
) -> dict[str, Verdict]:
    """Return the settings to drop now, with the time and the reason.

    Args: curves has the runs of each setting; seeds is the number of runs of a setting; protected
    are the settings that are never dropped.
    """
    verdicts, near = dict[str, Verdict](), near_first(curves)
    for name, own in curves.items():
        if name in protected or not own:
            continue
        failed = [run.now_s for run in own.values() if run.failed]
        if failed:
            verdict = max(failed), "diverged or failed"
        else:
            verdict = verdict_by_target(curves, name, seeds)
        for at_s in comparison_times(horizon_s) if name not in near else ():
            decides = seeds == 1 and at_s > horizon_s / 2
            verdict = verdict or verdict_by_loss(curves, name, at_s, one_seed_decides=decides)
        if verdict:
            verdicts[name] = verdict
    return verdicts


def rank_of(runs: Sequence[RunState]) -> tuple[float, float]:
    """Return the sort key of a setting, smaller is better: runs without the target, then time or
    loss.
    """
    missing = [run for run in runs if run.reached_s is None]
    if missing:
        return len(missing), statistics.fmean(run.loss for run in runs)
    return 0, statistics.median(run.reached_s or 0.0 for run in runs)


def near_first(curves: Mapping[str, CurvesBySeed]) -> set[str]:
    """Return the settings that were first at the target with some seed, or within `PATIENCE` of
    the first.
    """
    found = set[str]()
    for seed in {seed for runs in curves.values() for seed in runs}:
        reached = {name: runs[seed].reached_s for name, runs in curves.items() if seed in runs}
        times = {name: time_s for name, time_s in reached.items() if time_s is not None}
        found |= {
            name for name, time_s in times.items() if time_s <= PATIENCE * min(times.values())
        }
    return found


def verdict_by_target(curves: Mapping[str, CurvesBySeed], name: str, seeds: int) -> Verdict | None:
    """Return a verdict if another setting reached the target with these seeds long ago, and this
    one has not.
    """
    own = curves[name]
    # latest time to the target of each other setting that reached it with all these seeds
    reached = list[float]()
    for other, runs in curves.items():
        times = [runs[seed].reached_s or math.inf for seed in own if seed in runs]
        if other != name and len(times) == len(own) and max(times) < math.inf:
            reached.append(max(times))
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
    curves: Mapping[str, CurvesBySeed], name: str, at_s: float, *, one_seed_decides: bool
) -> Verdict | None:
    """Return a verdict if this setting is clearly inferior at this time, as far as is known.

    Args: one_seed_decides is True if a higher loss than the best setting's is enough.
    """
    states = {
        other: {seed: state for seed, run in runs.items() if (state := run.state_at_time(at_s))}
        for other, runs in curves.items()
    }
    own = states[name]
    if not own or all(state.reached_s for state in own.values()):
        return None
    peers = {
        other: [known[seed] for seed in own]
        for other, known in states.items()
        if own.keys() <= known.keys()
    }
    order = sorted(peers, key=lambda other: rank_of(peers[other]))
    if name in order[: math.ceil(len(order) * KEPT)]:
        return None
    best = curves[order[0]]
    before = [best[seed].state_at_time(at_s / 2) for seed in own]
    gaps = [now.loss - then.loss for now, then in zip(own.values(), before, strict=True) if then]
    if len(gaps) == len(own) and min(gaps) > 0:
        more = statistics.fmean(gaps)
        return at_s, f"loss higher by {more:.3g} than the best had in half the time"
    gap = sum(state.loss for state in own.values()) - sum(state.loss for state in peers[order[0]])
    if one_seed_decides and 0 < gap < math.inf:
        return at_s, f"loss higher by {gap:.3g}, with one seed"
    return None


class Race:
    """The state of a race in a folder.

    Args: record is the content of `sweep.json`, which receives the dropped settings; those that an
    earlier race in this folder dropped stay dropped; protected is the label of a setting that is
    never dropped; report prints a line; seeds is the number of seeds that each setting will have,
    if the grid does not contain all of them yet.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        folder: Path,
        record: dict[str, Any],
        protected: str,
        report: Callable[[str], None],
        seeds: int = 1,
    ) -> None:
        self.file, self.record, self.report = folder / SWEEP, record, report
        self.dropped_hashes = {str(entry["hash"]) for entry in record["dropped"]}
        self.by_label: dict[str, list[Setting]] = {}  # the runs of a setting, one for each seed
        for setting in settings:
            self.by_label.setdefault(label(setting, without="seed"), []).append(setting)
        before = {label(s, without="seed") for s in settings if s.hash in self.dropped_hashes}
        self.protected = {protected, *before}  # and those that are dropped already
        self.seeds = max(seeds, *map(len, self.by_label.values()))
        self.curve_readers = {s.hash: CurveReader(folder / s.hash, s.config) for s in settings}
        self.longest_s = max(setting.predicted_s or 0.0 for setting in settings)

    @property
    def order(self) -> list[Setting]:
        """The runs in their order: seed by seed, the baseline first.

        So the baseline's result with a seed is known before the others run with it.
        """
        by_label = sorted(self.by_label.items(), key=lambda item: item[0] not in self.protected)
        return [runs[k] for k in range(self.seeds) for _, runs in by_label if k < len(runs)]

    def judge(self) -> None:
        """Read the progress of all runs, and drop the settings that it rules out."""
        read = {digest: reader.read_curve() for digest, reader in self.curve_readers.items()}
        known = {digest: curve for digest, curve in read.items() if curve}
        ended = {digest for digest, curve in known.items() if curve.ended}
        curves = {
            name: {s.config["seed"]: known[s.hash] for s in runs if s.hash in known}
            for name, runs in self.by_label.items()
        }
        done = {name for name, runs in self.by_label.items() if {s.hash for s in runs} <= ended}
        horizon_s = self.longest_s or max((curve.now_s for curve in known.values()), default=0.0)
        verdicts = settings_to_drop(curves, horizon_s, self.seeds, self.protected | done)
        for name, (at_s, reason) in verdicts.items():
            for digest in [s.hash for s in self.by_label[name] if s.hash not in ended]:
                dropped_s = at_s if digest in known else 0.0
                entry = {"hash": digest, "at_s": dropped_s, "reason": reason}
                self.record["dropped"].append(entry)
                self.dropped_hashes.add(digest)
            self.protected.add(name)
            jsonl.write_json(self.file, self.record)
            self.report(f"dropped {name}: {reason}")


class CurveReader:
    """A reader of the metrics of a run that may still be writing them."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.row: dict[str, Any] = {}  # the latest metrics
        self.loss = "test/loss" if config["stop"]["target_loss"] is None else "train/loss"
        self._offset = 0
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
