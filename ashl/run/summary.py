"""The outcome of a run as one flat record: `summary.json`."""

import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ashl.run.evaluation import Evaluation, best_of
from ashl.run.metrics import summed_up
from ashl.run.monitor import Monitor, Outage
from ashl.runtime.records import Counts, Heartbeat, TimeTotals
from ashl.runtime.time_accounting import KINDS
from ashl.task.contract import recorded_name

SCHEMA = 1
SCORES = ("train_loss", "test_loss", "test_accuracy", "test_metric")
CLASSES = (
    "wait",
    "pull",
    "push",
    "compress",
    "compute",
)  # in the order in which too much time is taken from them


def settled(totals_ns: dict[str, int], time_ns: int, absent: bool) -> dict[str, float]:
    """Seconds by class that add up to the run's time. Real clocks of several ranks differ by
    microseconds: what is missing was waiting (of a worker that is gone: it was down), what is too
    much is taken from waiting first.
    """
    totals = dict(totals_ns)
    excess = sum(totals.values()) - time_ns
    for kind in CLASSES:
        if excess < 0 and absent:
            kind = "down"
        taken = min(
            totals[kind], excess
        )  # negative where time is missing: all of it goes to the first
        totals[kind] -= taken
        excess -= taken
        if excess == 0:
            break
    return {f"{kind}_s": total / 1e9 for kind, total in totals.items()}


def summarise(
    monitor: Monitor, runtime: str, status: str, reason: str, pace: dict | None = None
) -> dict:
    """The outcome as one flat record (docs/outcome.md explains its keys)."""
    plan, n, run_state = monitor.plan, monitor.plan.num_workers, monitor.run_state
    beats = {beat.rank: beat for beat in monitor.workers()}
    counts = monitor.counts() or nothing(n)
    latest_ns = max((beat.time_ns for beat in monitor.beats.values()), default=0)
    time_ns = run_state.stages[-1].end_ns if run_state.stages else latest_ns
    outages = [absence for absence in run_state.outages if absence.time_ns <= time_ns]
    absent = {
        absence.worker
        for absence in outages
        if absence.rejoined_ns is None or absence.rejoined_ns > time_ns
    }
    workers = [
        worker_summary(
            rank, counts, monitor.ledgers.get(rank) or beats.get(rank), time_ns, rank in absent
        )
        for rank in range(n)
    ]
    time_s = time_ns / 1e9
    server = monitor.job.stages[0].topology.has_server
    last, best = run_state.evaluations[-1:], best_of(run_state.evaluations)
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "runtime": runtime,
        "seed": plan.seed,
        "status": status,
        "exit_reason": reason,
        "time_s": time_s,
        "host_s": monitor.host_s,
        "time_kind": "virtual" if runtime == "sim" else "wall",
        "num_workers": n,
        "steps": counts.steps,
        "dropped_steps": sum(counts.dropped_by),
        "dropped_for": counts.dropped_for or {},
        "commits": sum(counts.commits) if server else counts.merges,
        "samples": counts.samples,
        "steps_per_s": counts.steps / time_s if time_s else None,
        "samples_per_s": counts.samples / time_s if time_s else None,
        "failed_workers": [of_absence(absence, time_ns) for absence in outages],
        "goodput": goodput(monitor),
        "bytes_up": sum(w["bytes_up"] for w in workers),
        "bytes_down": sum(w["bytes_down"] for w in workers),
        "workers": workers,
        "comm_hidden_share": monitor.hidden_share(),
        "wait_share": sum(w["wait_s"] for w in workers) / (n * time_s) if time_s else None,
        "max_lead": counts.max_lead if server else None,
        "conflicts": counts.conflicts,
        "final": scores_of(last[0] if last else None, *SCORES, "consensus_distance"),
        "best": scores_of(best, *SCORES, "time_s") if best else None,
        "metric": recorded_name(monitor.job.parts.task.metric) or None,
        "higher_is_better": monitor.job.parts.task.higher_is_better,
        "target_accuracy": plan.limits.target_accuracy,
        "target_loss": plan.limits.target_loss,
        "target_metric": plan.limits.target_metric,
        "time_to_target_s": run_state.target.reached_s,
        "stages": stage_summaries(monitor, workers),
        "stages_not_begun": not_begun(monitor),
        "params_sha256": monitor.sha256,
        "compression": run_state.compression.report(),
        "measures": summed_up(monitor.measures()) or None,
        "pace": pace,
        "hosts": [placed._asdict() for _, placed in sorted(monitor.hosts.items())] or None,
    }


def nothing(num_workers: int) -> Counts:
    """The counts of a run that ended before it began."""
    zeros = [0] * num_workers
    return Counts(0, 0, 0, zeros, zeros, zeros, zeros, zeros, 0, None, None, math.nan, None)


def of_absence(absence: Outage, time_ns: int) -> dict[str, Any]:
    """Who was lost when and why, and when it was back, if that was before the end."""
    back = absence.rejoined_ns is not None and absence.rejoined_ns <= time_ns
    rejoined_s = absence.rejoined_ns / 1e9 if back else None
    return {
        "worker": absence.worker,
        "time_s": absence.time_ns / 1e9,
        "reason": absence.why,
        "rejoined_s": rejoined_s,
    }


def goodput(monitor: Monitor) -> float | None:
    """Steps that count per second, over those that the plan predicts where nothing fails; None
    without prediction.
    """
    steps, expected, start_ns, before = 0, 0.0, 0, 0
    for end in monitor.run_state.stages:
        predicted = monitor.plan.stages[end.stage].predicted_steps_per_s
        if predicted is not None:
            steps += end.counts.steps - before
            expected += predicted * (end.end_ns - start_ns) / 1e9
        start_ns, before = end.end_ns, end.counts.steps
    return steps / expected if expected else None


def worker_summary(
    rank: int, counts: Counts, ledger: TimeTotals | Heartbeat | None, time_ns: int, absent: bool
) -> dict[str, Any]:
    """What one worker did, and what its time went into."""
    commits = counts.commits[rank]
    return {
        "rank": rank,
        "steps": counts.steps_by[rank],
        "commits": commits,
        "dropped": counts.dropped_by[rank],
        **settled(ledger.totals_ns if ledger else dict.fromkeys(KINDS, 0), time_ns, absent),
        "bytes_up": ledger.bytes_up if ledger else 0,
        "bytes_down": ledger.bytes_down if ledger else 0,
        "staleness_mean": counts.stale_sum[rank] / commits if commits else None,
        "staleness_max": counts.stale_max[rank],
        "groups": counts.groups[rank] if counts.groups else None,
    }


def stage_summaries(monitor: Monitor, workers: list[dict[str, Any]]) -> list[dict]:
    """What each stage did; its waiting is the difference between two borders."""
    rows, start_ns = [], 0
    waited_before = [0.0] * len(workers)
    before = nothing(len(workers))
    borders = monitor.run_state.borders
    for end in monitor.run_state.stages:
        plan, seconds = monitor.plan.stages[end.stage], (end.end_ns - start_ns) / 1e9
        steps = end.counts.steps - before.steps
        if end.stage < len(borders):
            border = borders[end.stage]
            found = {rank: totals["wait"] / 1e9 for rank, totals in border.items()}
            waited = [
                found.get(w["rank"], w["wait_s"]) for w in workers
            ]  # of a failed worker: all of it
        else:
            waited = [w["wait_s"] for w in workers]
        wait_s = [after - before_s for after, before_s in zip(waited, waited_before, strict=True)]
        rows.append(
            {
                "name": plan.name,
                "start_s": start_ns / 1e9,
                "end_s": end.end_ns / 1e9,
                "local_steps": [w.local_steps for w in plan.workers],
                "data_share": [w.data_share for w in plan.workers],
                "compression_ratio": [w.compression_ratio for w in plan.workers],
                "steps": steps,
                "commits": sum(end.counts.commits) - sum(before.commits),
                "steps_per_s": steps / seconds if seconds else None,
                "wait_share": sum(wait_s) / (len(workers) * seconds) if seconds else None,
                "wait_s": wait_s,
                "profiling": str(plan.sync["_target_"]).endswith(".Profiling"),
                "until": dict(plan.until),
                "exit_reason": end.reason,
            }
        )
        start_ns, before, waited_before = end.end_ns, end.counts, waited
    return rows


def not_begun(monitor: Monitor) -> list[dict[str, Any]]:
    """The planned stages that never began, each with the rule that would have ended the stage
    before it, and with the best value of that rule in an evaluation of the last stage that ran.
    """
    run_state, planned = monitor.run_state, monitor.plan.stages
    last = run_state.stages[-1] if run_state.stages else None
    gave_way = last is not None and (
        last.reason == "profiled" or last.reason in planned[last.stage].until
    )
    begun = max(1, run_state.ended + gave_way)
    start_s = run_state.stages[begun - 2].end_ns / 1e9 if begun > 1 else 0.0
    seen = [found for found in run_state.evaluations if found.time_s >= start_s]
    losses = [found.train_loss for found in seen if math.isfinite(found.train_loss)]
    accuracies = [found.test_accuracy for found in seen if found.test_accuracy is not None]
    best = {"evaluated_loss": min(losses, default=None), "accuracy": max(accuracies, default=None)}
    return [
        {
            "name": stage.name,
            "until": dict(before.until),
            "best": {rule: best.get(rule) for rule in before.until},
        }
        for before, stage in pairwise(planned[begun - 1 :])
    ]


def scores_of(found: Evaluation | None, *keys: str) -> dict[str, float | None]:
    """These numbers of an evaluation; None for what is no number."""
    values = asdict(found) if found else {}
    return {key: finite(values.get(key)) for key in keys}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
