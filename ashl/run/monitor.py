"""Beside every run, off its clock: evaluates snapshots, judges targets, keeps the records, sums up the outcome."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ashl.plan.plan import Plan, assigned
from ashl.planner.assignment import assignment_of
from ashl.planning.build import Job
from ashl.run.health import Health
from ashl.run.mean_model import ModelSet, mean_of
from ashl.runtime.ledger import KINDS
from ashl.tracking.console import Progress
from ashl.tracking.recorder import Recorder

# What a checkpoint keeps
KEPT = ("stopping", "scores", "borders", "evaluations", "stages", "reached_s", "health", "_parts", "_held")


class Monitor:
    """The observer of a run, in the process that records it.

    In virtual time the kernel calls it directly and `stopping` acts at once; for real processes it is handed what
    their reporters sent, and passes `stopping` on.
    """

    def __init__(self, plan: Plan, job: Job, recorder: Recorder, progress: Progress, rounds: bool) -> None:
        self.plan, self.job, self.recorder, self.progress = plan, job, recorder, progress
        self.rounds = rounds
        self.stopping: str | None = None
        self.scores: dict[str, float | None] | None = None
        self.borders: list[dict[int, dict[str, int]]] = []  # by stage that gave way: each worker's totals until then
        self.beats: dict[int, dict] = {}
        self.read_beats: Callable[[], list[dict]] | None = None  # in virtual time: ask the nodes
        self.evaluations: list[dict[str, Any]] = []
        self.stages: list[dict] = []
        self.ledgers: dict[int, dict] = {}
        self.final: dict | None = None
        self.health = Health(4 * plan.num_params)
        self.not_finite: str | None = None  # what was no number before any loss was
        self.sha256: str | None = None
        self.reached_s: float | None = None
        self._parts = ModelSet(plan.num_workers) if job.stages[0].replicas else None
        self._held = 0
        self._started = time.monotonic()

    @property
    def host_s(self) -> float:
        return time.monotonic() - self._started

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"plan": self.plan.to_json(), "host_s": self.host_s} | {name: getattr(self, name) for name in KEPT}

    def go_on(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint has kept; the limits of the run are those of now."""
        self.plan = replace(Plan.from_json(state["plan"]), limits=self.plan.limits)
        self._started -= state["host_s"]
        for name in KEPT:
            setattr(self, name, state[name])

    def emit(self, record: dict) -> None:
        """A record from a rank."""
        kind = record["kind"]
        if kind == "beat":
            self.beats[record["rank"]] = record
        elif kind == "round":
            self.recorder.round(in_seconds(record))
        elif kind == "ledger":
            self.ledgers[record["rank"]] = record
        elif kind == "profile":
            self.recorder.document("profile.json", record["profile"])
        elif kind == "health":
            self.health.add(record)
        elif kind == "not_finite":
            self.not_finite = self.not_finite or f"{record['where']} is not finite in its round {record['round'] + 1}"
        elif kind == "plan":
            self.plan = replanned(self.plan, record["first"], record["stages"])
            self.recorder.document("plan.json", self.plan.to_json())
        elif kind == "border":
            while len(self.borders) <= record["stage"]:
                self.borders.append({})
            self.borders[record["stage"]][record["rank"]] = record["totals_ns"]
        else:
            if kind == "stage":
                self.stages.append(record)
            self.recorder.round(in_seconds(record))

    def snapshot(self, record: dict, params: Any) -> None:
        """Evaluate a model: metrics, best so far, target. Where every worker has its own, wait until all have come."""
        if "of" in record:
            self.health.part(record, params, self.plan.num_workers)
            return
        if self._parts is not None:
            whole = self._parts.add(record, params)
            if whole is None:
                return
            record, params = whole
        final = bool(record.get("final"))
        if final:
            self.final = record
        if not isinstance(params, np.ndarray) and not hasattr(params, "numpy"):
            return  # a run without gradients has nothing to evaluate
        if final:
            self.sha256 = hashlib.sha256(params.numpy().tobytes()).hexdigest()
            last = self.evaluations[-1] if self.evaluations else None
            if last and last["version"] == record["merges"] and distance_of(last) == distance_of(record):
                self.mark_diverged(record, last)
                return  # the model has not changed since the last evaluation; `conclude` writes its line
        scores = self.scores = self.job.learner.evaluate(params) | distance_of(record)
        self.mark_diverged(record, scores)
        time_s = record["time_ns"] / 1e9
        self.evaluations.append({**scores, "time_s": time_s, "version": record["merges"]})
        self.judge(scores, time_s)
        if not final:
            rows = [{**beat, "wait_s": beat["totals_ns"]["wait"] / 1e9} for beat in self.current_beats()]
            self.recorder.metric(self.metrics(record, scores, time_s, rows))

    def evaluate_paused(self, models: list[Any], time_s: float) -> None:
        """Evaluate a run that stands still; only its summary says so."""
        workers = self.plan.num_workers
        params = models[self.plan.home] if self._parts is None else mean_of(models[:workers])[0]
        self.evaluations.append({**self.job.learner.evaluate(params), "time_s": time_s, "version": None})

    def conclude(self, summary: dict) -> None:
        """The last line of metrics.jsonl, written once the ranks have accounted for what lies past the end: it agrees
        with the summary to the byte."""
        if self.final is not None and self.evaluations and summary["time_s"]:
            last = self.evaluations[-1]
            self.recorder.metric(self.metrics(self.final, last, summary["time_s"], summary["workers"]))

    def mark_diverged(self, record: dict, scores: dict) -> None:
        """A run that ends with a model of NaN has diverged, whether or not a worker lived to see it."""
        if record.get("final") and not record["diverged"] and not math.isfinite(scores["train_loss"]):
            record["diverged"] = f"the model's loss is {scores['train_loss']} after step {record['steps']}"

    def judge(self, scores: dict, time_s: float) -> None:
        """A target counts when it held for so many evaluations in a row; its time is that of the last of them."""
        limits = self.plan.limits
        asked = [
            reason
            for reason, target, hit in (
                ("target_accuracy", limits.target_accuracy, at_least(scores["test_accuracy"], limits.target_accuracy)),
                ("target_loss", limits.target_loss, at_least(limits.target_loss, scores["train_loss"])),
            )
            if target is not None and hit
        ]
        self._held = self._held + 1 if asked else 0
        if asked and self._held >= limits.target_hold and self.reached_s is None:
            self.reached_s = time_s
            self.stopping = self.stopping or asked[0]

    def metrics(self, record: dict, scores: dict, time_s: float, workers: list[dict]) -> dict:
        """One line of metrics.jsonl, under the names that MLflow shows. Of each worker: rank, wait_s and bytes."""
        waited = sum(worker["wait_s"] for worker in workers)
        up, down = sum(w["bytes_up"] for w in workers), sum(w["bytes_down"] for w in workers)
        pushes = sum(record["commits"])
        return {
            "time_s": time_s,
            "host_s": self.host_s,
            "step": record["steps"],
            "commits": pushes,
            "samples": record["samples"],
            "bytes_up": up,
            "bytes_down": down,
            "test/acc": scores["test_accuracy"],
            "test/loss": scores["test_loss"],
            "train/loss": scores["train_loss"],
            "train/batch_loss": record["loss"],
            **{key.replace("_", "/"): value for key, value in distance_of(record).items()},
            "perf/samples_per_s": record["samples"] / time_s if time_s else None,
            "perf/wait_share": waited / (len(workers) * time_s) if workers and time_s else None,
            "staleness/mean": sum(record["stale_sum"]) / pushes if pushes else None,
            "comm/mb_up": up / 1e6,
            "comm/mb_down": down / 1e6,
            "time/s": time_s,
            **self.health.metrics(),
            **{f"wait/w{worker['rank']}": worker["wait_s"] / time_s if time_s else 0.0 for worker in workers},
        }

    def current_beats(self) -> list[dict]:
        """How each worker stands."""
        if self.read_beats is not None:
            self.beats = {beat["rank"]: beat for beat in self.read_beats()}
        return [beat for rank, beat in sorted(self.beats.items()) if rank < self.plan.num_workers]

    def tick(self) -> None:
        """Draw the progress where it is due."""
        host_s = self.host_s
        if self.progress.due(host_s):
            self.progress.update(self.view(host_s))

    def counts(self) -> dict | None:
        """The latest counts of the home rank."""
        if self.final is not None:
            return self.final
        beat = self.beats.get(self.plan.home)
        if beat and beat["counts"]:
            return beat["counts"]
        return self.stages[-1] if self.stages else None

    def view(self, host_s: float) -> dict:
        """What a person sees while it runs."""
        beats, counts = self.current_beats(), self.counts() or {}
        time_s = max((beat["time_ns"] for beat in self.beats.values()), default=0) / 1e9
        done = self.done(counts, time_s)
        last = self.evaluations[-1] if self.evaluations else {}
        waits = [beat["totals_ns"]["wait"] / 1e9 / time_s if time_s else 0.0 for beat in beats]
        return {
            "time_s": time_s,
            "host_s": host_s,
            "stage": self.plan.stages[min(len(self.stages), len(self.plan.stages) - 1)].name,
            "steps": counts.get("steps", 0),
            "commits": sum(counts.get("commits", ())),
            "loss": counts.get("loss"),
            "accuracy": last.get("test_accuracy"),
            "samples_per_s": counts.get("samples", 0) / time_s if time_s else None,
            "wait_share": sum(waits) / len(waits) if waits else None,
            "progress": done,
            "eta_host_s": host_s * (1 - done) / done if done else None,
            "workers": [
                {
                    "rank": beat["rank"],
                    "step": beat["steps"],
                    "samples_per_s": beat["steps"] * self.plan.stages[0].workers[beat["rank"]].batch / time_s
                    if time_s
                    else None,
                    "wait_share": wait,
                    "staleness": beat["staleness"],
                    "loss": beat["loss"],
                }
                for beat, wait in zip(beats, waits, strict=True)
            ],
        }

    def done(self, counts: dict, time_s: float) -> float | None:
        """The share of the run that is behind us, by whichever limit is nearest."""
        limits, epoch = self.plan.limits, len(self.job.data.train)
        shares = [
            counts.get("samples", 0) / (limits.epochs * epoch) if limits.epochs else None,
            counts.get("steps", 0) / limits.steps if limits.steps else None,
            time_s / limits.seconds if limits.seconds else None,
        ]
        return min(1.0, max((share for share in shares if share is not None), default=0.0))


def replanned(plan: Plan, first: int, stages: list[list[list[float]]]) -> Plan:
    """The plan with (H, share, ratio, cycle) by worker as planned during the run, from stage `first` on."""
    after = [
        replace(stage, workers=assigned(stage.workers, [assignment_of(row) for row in rows]))
        for stage, rows in zip(plan.stages[first:], stages, strict=True)
    ]
    return replace(plan, stages=(*plan.stages[:first], *after))


def in_seconds(record: dict) -> dict:
    """A record with its times as seconds, and each class's total."""
    record = dict(record)
    spans = record.pop("spans_ns", None)
    for key in [key for key in record if key.endswith("_ns")]:
        record[key.removesuffix("_ns") + "_s"] = record.pop(key) / 1e9
    if spans is not None:
        totals = dict.fromkeys(KINDS, 0)
        for kind, start, end in spans:
            totals[kind] += end - start
        record |= {f"{kind}_s": total / 1e9 for kind, total in totals.items()}
        record["spans"] = [[kind, start / 1e9, end / 1e9] for kind, start, end in spans]
    return record


def distance_of(record: dict) -> dict[str, float]:
    """How far the workers' models are apart, where each has its own."""
    return {key: record[key] for key in ("consensus_distance",) if key in record}


def at_least(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value >= bound
