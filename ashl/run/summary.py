"""The outcome of a run as one record, `summary.json`: its totals, with lists of rows by worker, by
stage and by failure.

The values come from the monitor: evaluations, the counts of the lead rank, and each rank's time,
bytes and measures. Seconds have keys that end in `_s`. The comment above a key is its text in
docs/reference/records.md.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from ashl.run.evaluation import Evaluation, best_of
from ashl.run.metrics import aggregate_measures
from ashl.run.monitor import Monitor, Outage
from ashl.runtime.records import Counts, Heartbeat, TimeTotals
from ashl.runtime.time_accounting import KINDS
from ashl.task.contract import recorded_name
from ashl.tracking.straggler import find_straggler

SCHEMA = 1
SCORES = ("train_loss", "test_loss", "test_accuracy", "test_metric")
# classes of time, in the order in which excess time is taken from them
CLASSES = ("wait", "pull", "push", "compress", "compute", "down")


def balance_times(totals_ns: dict[str, int], time_ns: int, failed: bool) -> dict[str, float]:
    """Balance a worker's time by class, so that it adds up to the run's time.

    Clocks of ranks differ by microseconds. Missing time counts as waiting, or as down for a worker
    that has failed; excess time is taken from the classes in the order of `CLASSES`.
    Args: totals_ns, nanoseconds by class; time_ns, the run's time in nanoseconds; failed, True if
    the worker has failed and not rejoined.
    Returns: seconds by class, with keys such as `wait_s`.
    """
    totals = dict(totals_ns)
    excess = sum(totals.values()) - time_ns
    for kind in CLASSES:
        if excess < 0 and failed:
            kind = "down"
        # negative if time is missing; then the first class gets it
        taken = min(totals[kind], excess)
        totals[kind] -= taken
        excess -= taken
        if excess == 0:
            break
    return {f"{kind}_s": total / 1e9 for kind, total in totals.items()}


def summarise(
    monitor: Monitor, runtime: str, status: str, reason: str, pace: dict | None = None
) -> dict:
    """Return the outcome of a run, as in `summary.json`.

    The run's time is the end of its last stage. If the run has ended within a stage, by an error
    for example, it is the latest time of a heartbeat.
    Args: monitor, after the last record of the run; runtime, `sim`, `local` or `torchrun`; status
    and reason, see the keys `status` and `exit_reason`; pace, how well the processes kept the
    declared pace (`pacing_summary`), None if not paced.
    """
    plan = monitor.plan
    n = plan.num_workers
    run_state = monitor.run_state
    beats = {beat.rank: beat for beat in monitor.workers()}
    counts = monitor.counts() or zero_counts(n)
    time_ns = run_state.stages[-1].end_ns if run_state.stages else 0
    if monitor.final is None:
        time_ns = max([time_ns, *(beat.time_ns for beat in monitor.heartbeats.values())])
    outages = [outage for outage in run_state.outages if outage.time_ns <= time_ns]
    failed = {
        outage.worker
        for outage in outages
        if outage.rejoined_ns is None or outage.rejoined_ns > time_ns
    }
    workers = [
        worker_summary(
            rank, counts, monitor.final_totals.get(rank) or beats.get(rank), time_ns, rank in failed
        )
        for rank in range(n)
    ]
    time_s = time_ns / 1e9
    has_server = monitor.job.has_server
    last = run_state.evaluations[-1] if run_state.evaluations else None
    best = best_of(run_state.evaluations)
    return {
        # version of this record
        "schema": SCHEMA,
        # as configured; `runtime` is `sim`, `local` or `torchrun`
        "name": plan.name,
        "runtime": runtime,
        "seed": plan.seed,
        # `finished`, `failed`, `interrupted` or `diverged`: a loss or a parameter is not finite or
        # too large; the workers' models are unrelated; or the training loss ends more than 10 %
        # above that of the untrained model (in the first epoch, above ten times that loss)
        "status": status,
        # rule that ended the run (`epochs`, `steps`, `seconds`, `patience`, `target_accuracy`,
        # `target_loss` …), or the error
        "exit_reason": reason,
        # length of the run on the experiment's clock, seconds
        "time_s": time_s,
        # duration on the host, seconds
        "host_s": monitor.host_s,
        # `virtual` or `wall`
        "time_kind": "virtual" if runtime == "sim" else "wall",
        # number of workers
        "num_workers": n,
        # totals over the workers; a step is one minibatch
        "steps": counts.steps,
        "dropped_steps": sum(counts.dropped_by),
        # dropped steps by reason: `late` (or too stale), `stage_end` and `run_end` (in flight
        # then), `failure`, `diverged`; steps that a region of HALoS dropped are not in it
        "dropped_for": counts.dropped_for or {},
        # pushes that became part of the model, and their samples; without a server, merges
        "commits": counts.count_commits(has_server),
        "samples": counts.samples,
        # per second of `time_s`
        "steps_per_s": counts.steps / time_s if time_s else None,
        "samples_per_s": counts.samples / time_s if time_s else None,
        # a row for each failure, in order: `worker`, `time_s`, `reason` (`declared`, `random`, or
        # how the process ended or missed heartbeats), and `rejoined_s`, which is null if the worker
        # did not rejoin before the end
        "failed_workers": [outage_summary(outage, time_ns) for outage in outages],
        # counted steps per second, as a fraction of those that the plan predicts without failures;
        # null without a prediction
        "goodput": goodput(monitor),
        # bytes as sent, headers included
        "bytes_up": sum(worker["bytes_up"] for worker in workers),
        "bytes_down": sum(worker["bytes_down"] for worker in workers),
        # a row for each worker, see below
        "workers": workers,
        # with `overlap`: fraction of the collectives' time in which their workers did something
        # else; otherwise null
        "comm_hidden_share": monitor.hidden_share(),
        # Σ `wait_s` / (`num_workers` · `time_s`)
        "wait_share": (
            sum(worker["wait_s"] for worker in workers) / (n * time_s) if time_s else None
        ),
        # the slowest worker if its step takes at least 1.2 times the median: `worker`, `slowdown`
        # (relative to the median worker), `others_wait_share` (fraction of the run without
        # profiling in which the others waited, on average); otherwise null
        "straggler": straggler_of(monitor, workers, time_s),
        # largest lead, in commits, at which a worker was allowed to proceed; null without a server
        "max_lead": counts.max_lead if has_server else None,
        # groups that had to wait for another one; null except for partial all-reduce
        "conflicts": counts.conflicts,
        # last evaluation: `train_loss`, `test_loss`, `test_accuracy`, `test_metric`,
        # `consensus_distance`
        "final": scores_of(last, *SCORES, "consensus_distance"),
        # evaluation with the best metric, with its `time_s`; among equal ones that with the lowest
        # test loss
        "best": scores_of(best, *SCORES, "time_s") if best else None,
        # name of `test_metric` as the task defines it; `test_accuracy` is null if the metric is no
        # accuracy
        "metric": recorded_name(monitor.job.parts.task.metric) or None,
        # true if higher values of the metric are better
        "higher_is_better": monitor.job.parts.task.higher_is_better,
        # targets of `stop.*`, and the time of the first of the consecutive evaluations that reached
        # one
        "target_accuracy": plan.limits.target_accuracy,
        "target_loss": plan.limits.target_loss,
        "target_metric": plan.limits.target_metric,
        "time_to_target_s": run_state.target.reached_s,
        # a row for each stage that ended, see below
        "stages": stage_summaries(monitor, workers),
        # a row for each planned stage that never began: `name`, `until` (condition that would have
        # ended the stage before), `best` (best evaluation for that condition)
        "stages_not_begun": stages_not_begun(monitor),
        # hash of the final parameter vector; that of the mean model if each worker has its own
        "params_sha256": monitor.sha256,
        # means over the workers' latest measured messages: `relative_error`, `residual`, `cosine`
        # and `bits` (see `metrics.jsonl`), and in `bytes` the mean bytes of a message by use:
        # `headers`, `scales`, `values`, `indices`; `warning` if the codec is no contraction; null
        # without a measurement
        "compression": run_state.compression.report(),
        # for each measure of the run's code: the mean over the ranks of the `last` value, and the
        # `mean` over the run; null without measures
        "measures": aggregate_measures(monitor.measures()) or None,
        # fraction by which each worker of a paced real run took longer than declared (`workers`),
        # and the largest one (`slower_by`); empty for other real runs, null in virtual time
        "pace": pace,
        # of a real run, a row for each rank: `rank`, `host`, `device` and the usable `cores`; null
        # in virtual time
        "hosts": [placed._asdict() for _, placed in sorted(monitor.hosts.items())] or None,
    }


def zero_counts(num_workers: int) -> Counts:
    """Return the counts of a run that ended before it began."""
    zeros = [0] * num_workers
    return Counts(0, 0, 0, zeros, zeros, zeros, zeros, zeros, 0, None, None, math.nan, None)


def outage_summary(outage: Outage, time_ns: int) -> dict[str, Any]:
    """Return when and why a worker failed, and when it rejoined, if that was before the run's end.

    Args: time_ns, the run's end in nanoseconds.
    """
    rejoined = outage.rejoined_ns is not None and outage.rejoined_ns <= time_ns
    return {
        "worker": outage.worker,
        "time_s": outage.time_ns / 1e9,
        "reason": outage.cause,
        "rejoined_s": outage.rejoined_ns / 1e9 if rejoined else None,
    }


def goodput(monitor: Monitor) -> float | None:
    """Return the counted steps of the stages that have a prediction, as a fraction of the predicted
    ones: the steps without failures in the duration of these stages. None without a prediction.
    """
    steps = 0
    expected = 0.0
    start_ns = 0  # end of the previous stage
    before = 0  # steps up to then
    for end in monitor.run_state.stages:
        predicted = monitor.plan.stages[end.stage].predicted_steps_per_s
        if predicted is not None:
            steps += end.counts.steps - before
            expected += predicted * (end.end_ns - start_ns) / 1e9
        start_ns, before = end.end_ns, end.counts.steps
    return steps / expected if expected else None


def worker_summary(
    rank: int, counts: Counts, totals: TimeTotals | Heartbeat | None, time_ns: int, failed: bool
) -> dict[str, Any]:
    """Return the row of one worker: steps, commits, seconds by class, bytes and staleness.

    Args: counts, of the run; totals, the worker's final totals, or its last heartbeat if it has not
    ended, or None if it has sent neither: then its bytes are 0, and the run's whole time counts as
    waiting (as down if it has failed); time_ns, the run's time in nanoseconds; failed, True if it
    has failed and not rejoined.
    """
    commits = counts.commits[rank]
    return {
        # rank of the worker
        "rank": rank,
        # counted steps; pushes (without a server, rounds) of the worker that became part of the
        # model; dropped steps
        "steps": counts.steps_by[rank],
        "commits": commits,
        "dropped": counts.dropped_by[rank],
        **balance_times(totals.totals_ns if totals else dict.fromkeys(KINDS, 0), time_ns, failed),
        # bytes as sent and received, headers included
        "bytes_up": totals.bytes_up if totals else 0,
        "bytes_down": totals.bytes_down if totals else 0,
        # mean and maximum of the staleness of its pushes, in merges
        "staleness_mean": counts.stale_sum[rank] / commits if commits else None,
        "staleness_max": counts.stale_max[rank],
        # groups that the worker joined, in partial all-reduce; otherwise null
        "groups": counts.groups[rank] if counts.groups else None,
    }


def straggler_of(
    monitor: Monitor, workers: Sequence[dict[str, Any]], time_s: float
) -> dict[str, Any] | None:
    """Return the slowest worker in the training of a run, without its profiling stages.

    In the rows of the summary, `compute_s` includes dropped steps, and `steps` does not. Here both
    do.
    Args: workers, the rows of `summary.json`, by rank; time_s, of the run.
    """
    profiling = [Counter[str]() for _ in workers]  # ns of each worker's profiling, by class
    before: dict[int, dict[str, int]] = {}
    for stage, reached in zip(monitor.plan.stages, monitor.run_state.boundaries, strict=False):
        for rank in reached.keys() & range(len(workers)) if stage.is_profiling else ():
            profiling[rank].update(reached[rank])
            profiling[rank].subtract(before.get(rank, {}))
        before |= reached
    rows = [
        worker
        | {
            "steps": worker["steps"] + worker["dropped"],
            "compute_s": worker["compute_s"] - spent_ns["compute"] / 1e9,
            "wait_s": worker["wait_s"] - spent_ns["wait"] / 1e9,
        }
        for worker, spent_ns in zip(workers, profiling, strict=True)
    ]
    longest_ns = max((spent_ns.total() for spent_ns in profiling), default=0)
    return find_straggler(rows, time_s - longest_ns / 1e9)


def stage_summaries(monitor: Monitor, workers: list[dict[str, Any]]) -> list[dict]:
    """Return the row of each stage that has ended. Its values are differences between its end and
    the end of the stage before.

    Args: workers, the rows of `summary.json`, by rank; they have the waiting up to the run's end.
    """
    rows: list[dict] = []
    start_ns = 0
    waited_before = [0.0] * len(workers)
    before = zero_counts(len(workers))
    boundaries = monitor.run_state.boundaries
    has_server = monitor.job.has_server
    for end in monitor.run_state.stages:
        plan = monitor.plan.stages[end.stage]
        seconds = (end.end_ns - start_ns) / 1e9
        steps = end.counts.steps - before.steps
        waited = [worker["wait_s"] for worker in workers]
        if end.stage < len(boundaries):
            # a failed worker has not reached the boundary: all of its waiting counts here
            reached = boundaries[end.stage]
            for rank in reached.keys() & range(len(workers)):
                waited[rank] = reached[rank]["wait"] / 1e9
        wait_s = [after - before_s for after, before_s in zip(waited, waited_before, strict=True)]
        rows.append(
            {
                # name of the stage, and its span on the run's clock
                "name": plan.name,
                "start_s": start_ns / 1e9,
                "end_s": end.end_ns / 1e9,
                # plan of the stage, by worker
                "local_steps": [worker.local_steps for worker in plan.workers],
                "data_share": [worker.data_share for worker in plan.workers],
                "compression_ratio": [worker.compression_ratio for worker in plan.workers],
                # steps and commits of the stage, counted as those of the run, and its rate
                "steps": steps,
                "commits": (
                    end.counts.count_commits(has_server) - before.count_commits(has_server)
                ),
                "steps_per_s": steps / seconds if seconds else None,
                # time that workers waited, as a fraction and in seconds by worker
                "wait_share": sum(wait_s) / (len(workers) * seconds) if seconds else None,
                "wait_s": wait_s,
                # true for a stage that measures costs and learns nothing
                "profiling": plan.is_profiling,
                # bound that ends the stage, by rule, and the reason for which it ended
                "until": dict(plan.until),
                "exit_reason": end.reason,
            }
        )
        start_ns = end.end_ns
        before = end.counts
        waited_before = waited
    return rows


def stages_not_begun(monitor: Monitor) -> list[dict[str, Any]]:
    """Return the planned stages that never began.

    Each row has the rule that would have ended the previous stage. It also has the best value of
    that rule's measure in the evaluations of the last stage that ran.
    """
    run_state, planned = monitor.run_state, monitor.plan.stages
    last = run_state.stages[-1] if run_state.stages else None
    followed = last is not None and (
        last.reason == "profiled" or last.reason in planned[last.stage].until
    )
    begun = max(1, run_state.num_ended_stages + followed)
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
    """Return these fields of an evaluation. A value is None if it is not finite, or if there is no
    evaluation.
    """
    values = asdict(found) if found else {}
    return {key: finite_or_none(values.get(key)) for key in keys}


def finite_or_none(value: float | None) -> float | None:
    """Return a value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None
