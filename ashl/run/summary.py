"""The outcome of a run as one flat record: `summary.json`."""

from __future__ import annotations

import math
from typing import Any

from ashl.run.monitor import Monitor
from ashl.runtime.ledger import KINDS

SCHEMA = 1
SCORES = ("train_loss", "test_loss", "test_accuracy")


def settled(totals_ns: dict[str, int], time_ns: int) -> dict[str, float]:
    """Seconds by class that add up to the run's time. Real clocks of several ranks differ by microseconds: what is
    missing was waiting, what is too much is taken from waiting first."""
    totals = dict(totals_ns)
    excess = sum(totals.values()) - time_ns
    for kind in ("wait", "pull", "push", "compress", "compute"):
        taken = min(totals[kind], excess)  # negative where time is missing: all of it goes to wait
        totals[kind] -= taken
        excess -= taken
        if excess == 0:
            break
    return {f"{kind}_s": total / 1e9 for kind, total in totals.items()}


def summarise(monitor: Monitor, runtime: str, status: str, reason: str, pace: dict | None = None) -> dict:
    """The outcome as one flat record (docs/outcome.md explains its keys)."""
    plan, n = monitor.plan, monitor.plan.num_workers
    counts = monitor.counts() or {}
    beats = {beat["rank"]: beat for beat in monitor.current_beats()}
    ends = [stage["end_ns"] for stage in monitor.stages]
    time_ns = ends[-1] if ends else max((beat["time_ns"] for beat in monitor.beats.values()), default=0)
    zeros = dict.fromkeys(KINDS, 0)
    commits = counts.get("commits", [0] * n)
    workers: list[dict[str, Any]] = []
    for rank in range(n):
        ledger = monitor.ledgers.get(rank) or beats.get(rank) or {"totals_ns": zeros, "bytes_up": 0, "bytes_down": 0}
        pushes = commits[rank]
        workers.append(
            {
                "rank": rank,
                "steps": counts.get("steps_by", [0] * n)[rank],
                "commits": pushes,
                "dropped": counts.get("dropped_by", [0] * n)[rank],
                **settled(ledger["totals_ns"], time_ns),
                "bytes_up": ledger["bytes_up"],
                "bytes_down": ledger["bytes_down"],
                "staleness_mean": counts["stale_sum"][rank] / pushes if pushes else None,
                "staleness_max": counts.get("stale_max", [0] * n)[rank],
                "groups": counts["groups"][rank] if counts.get("groups") else None,
            }
        )
    time_s = time_ns / 1e9
    steps, samples = counts.get("steps", 0), counts.get("samples", 0)
    server = monitor.job.stages[0].topology.has_server
    last = monitor.evaluations[-1] if monitor.evaluations else {}
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
        "steps": steps,
        "dropped_steps": sum(counts.get("dropped_by", ())),
        "commits": sum(commits) if server else counts.get("merges", 0),
        "samples": samples,
        "steps_per_s": steps / time_s if time_s else None,
        "samples_per_s": samples / time_s if time_s else None,
        "bytes_up": sum(w["bytes_up"] for w in workers),
        "bytes_down": sum(w["bytes_down"] for w in workers),
        "workers": workers,
        "wait_share": sum(w["wait_s"] for w in workers) / (n * time_s) if time_s else None,
        "max_lead": counts.get("max_lead") if server else None,
        "conflicts": counts.get("conflicts"),
        "final": {key: finite(last.get(key)) for key in (*SCORES, "consensus_distance")},
        "best": best_of(monitor.evaluations),
        "target_accuracy": plan.limits.target_accuracy,
        "target_loss": plan.limits.target_loss,
        "time_to_target_s": monitor.reached_s,
        "stages": stage_summaries(monitor, workers),
        "params_sha256": monitor.sha256,
        "compression": monitor.health.report(),
        "pace": pace,
    }


def stage_summaries(monitor: Monitor, workers: list[dict[str, Any]]) -> list[dict]:
    """What each stage did; its waiting is the difference between two borders."""
    rows, start_ns = [], 0
    before: dict[str, Any] = {"steps": 0, "commits": [0]}
    waited_before = 0.0
    for index, (plan, record) in enumerate(zip(monitor.plan.stages, monitor.stages, strict=False)):
        seconds = (record["end_ns"] - start_ns) / 1e9
        steps = record["steps"] - before["steps"]
        if index < len(monitor.borders):
            waited = sum(totals["wait"] for totals in monitor.borders[index].values()) / 1e9
        else:
            waited = sum(w["wait_s"] for w in workers)
        rows.append(
            {
                "name": plan.name,
                "start_s": start_ns / 1e9,
                "end_s": record["end_ns"] / 1e9,
                "local_steps": [w.local_steps for w in plan.workers],
                "data_share": [w.data_share for w in plan.workers],
                "compression_ratio": [w.compression_ratio for w in plan.workers],
                "steps": steps,
                "commits": sum(record["commits"]) - sum(before["commits"]),
                "steps_per_s": steps / seconds if seconds else None,
                "wait_share": (waited - waited_before) / (len(workers) * seconds) if seconds else None,
                "exit_reason": record["reason"],
            }
        )
        start_ns, before, waited_before = record["end_ns"], record, waited
    return rows


def best_of(evaluations: list[dict]) -> dict | None:
    """The evaluation with the best accuracy, or the lowest loss where there is no accuracy."""
    scored = [e for e in evaluations if finite(e["test_loss"]) is not None]
    if not scored:
        return None
    best = max(scored, key=lambda e: (e["test_accuracy"] or 0.0, -e["test_loss"]))
    return {**{key: finite(best[key]) for key in SCORES}, "time_s": best["time_s"]}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
