"""The observer of a run: it receives the ranks' records, evaluates models, and writes the records.

In virtual time the kernel calls the monitor directly. On processes the controller passes on what
the ranks sent. Evaluation takes no time on the run's clock. `MonitorState` is the part that a
checkpoint saves.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from torch import Tensor

from ashl.device import to_host
from ashl.errors import AshlError
from ashl.learn.weights import BEST, FINAL
from ashl.plan.plan import PATIENCE, Limits, Plan, assign_work
from ashl.plan.profile import Profile
from ashl.planner.assignment import assignment_of
from ashl.planning.instantiate import Job
from ashl.run import weights
from ashl.run.evaluation import (
    EvaluatedModel,
    Evaluation,
    ModelSet,
    Target,
    best_of,
    find_divergence,
    is_out_of_patience,
    make_model_set,
    scores_of,
)
from ashl.run.metrics import CompressionStats, metrics_line, values_of
from ashl.runtime.records import (
    CompressionReport,
    Counts,
    Heartbeat,
    Measures,
    NotFinite,
    Placed,
    PlanMade,
    ProfileMeasured,
    Record,
    Replan,
    Round,
    Rounds,
    RunEnding,
    Snapshot,
    StageBoundary,
    StageEnd,
    TimeTotals,
    WorkerFailed,
    WorkerRejoined,
)
from ashl.size_only import Vector
from ashl.task.contract import ACCURACY, recorded_name
from ashl.tracking.console import Frame, Progress, WorkerFrame, seconds
from ashl.tracking.events import as_event
from ashl.tracking.recorder import Recorder
from ashl.tracking.straggler import StragglerFinder, describe_straggler

logger = logging.getLogger(__name__)


@dataclass
class Outage:
    """A worker's failure, on the run's clock, and its rejoin."""

    worker: int
    time_ns: int
    cause: str
    rejoined_ns: int | None = None
    totals: Heartbeat | None = None  # at the failure; None in virtual time


@dataclass
class MonitorState:
    """The monitor's state of a run, which a checkpoint saves."""

    compression: CompressionStats
    parts: ModelSet | None  # incomplete models, if no rank holds the whole model
    stop_reason: str | None = None  # the reason why the run is to stop
    scores: dict[str, float | None] | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    target: Target = field(default_factory=Target)
    stages: list[StageEnd] = field(default_factory=list)
    best: Tensor | None = None  # the model of the best evaluation
    best_state: Any = None  # its module's state: the values that forward passes change
    outages: list[Outage] = field(default_factory=list)  # in the order of the failures
    # by stage that ended before the last one, by worker: totals of its time at the boundary
    boundaries: list[dict[int, dict[str, int]]] = field(default_factory=list)

    @property
    def num_ended_stages(self) -> int:
        """Return the number of stages that have ended.

        The record of a stage's end may be missing, if its lead rank failed then; the record of the
        next stage shows it.
        """
        return self.stages[-1].stage + 1 if self.stages else 0

    def discard_later_outages(self, saved_ns: Callable[[int], float]) -> None:
        """Discard the failures of each worker after the run time `saved_ns(worker)`."""
        later = [outage for outage in self.outages if outage.time_ns > saved_ns(outage.worker)]
        for outage in later:
            self.outages.remove(outage)
            if self.parts:
                self.parts.restore_worker(outage.worker)

    def reopen_outages(self, absent: Collection[int]) -> None:
        """Discard the last rejoins of these workers, which have no part of the checkpoint."""
        latest = {outage.worker: outage for outage in self.outages}
        for rank in absent:
            latest[rank].rejoined_ns = None


class Monitor:
    """The observer of a run, in the process that records it.

    Setting `stop_reason` ends the run: in virtual time at once, on processes once the ranks have
    received it.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        recorder: Recorder,
        progress: Progress,
        *,
        rounds: Rounds,
        weights: bool,
    ) -> None:
        """Args: rounds, which rounds are recorded; weights, True to write final.pt and best.pt."""
        self.plan = plan
        self.job = job
        self.recorder = recorder
        self.progress = progress
        self.rounds = rounds
        self.weights = weights
        self.run_state = MonitorState(
            CompressionStats(4 * plan.num_params), make_model_set(job.stages[0])
        )
        self.heartbeats: dict[int, Heartbeat] = {}  # the latest heartbeat by rank
        # reads the heartbeats of all ranks, in virtual time only
        self.read_heartbeats: Callable[[], list[Heartbeat]] | None = None
        self.stragglers = StragglerFinder()
        self.final_totals: dict[int, TimeTotals] = {}  # final totals by rank
        self.hosts: dict[int, Placed] = {}  # by rank, on processes only
        self.final: Counts | None = None  # counts of the last model
        self.not_finite: str | None = None  # what was not finite before any loss was
        self.sha256: str | None = None  # hash of the last model
        # True if the workers' module states arrive as records, the final one after the last model;
        # in virtual time the learner has them
        self.receives_worker_states = False
        # the last model, until the final module states are there
        self._waiting: EvaluatedModel | None = None
        self._started_s = time.monotonic()
        self._state_host_s: float | None = None  # host seconds in the latest `state`

    @property
    def stop_reason(self) -> str | None:
        return self.run_state.stop_reason

    @stop_reason.setter
    def stop_reason(self, reason: str | None) -> None:
        self.run_state.stop_reason = reason

    @property
    def scores(self) -> dict[str, float | None] | None:
        return self.run_state.scores

    @property
    def current_outages(self) -> dict[int, Outage]:
        """Return the outages of workers that have not rejoined, by worker."""
        return {
            outage.worker: outage for outage in self.run_state.outages if outage.rejoined_ns is None
        }

    @property
    def host_s(self) -> float:
        return time.monotonic() - self._started_s

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves of the monitor."""
        self._state_host_s = self.host_s
        constants = self.job.learner.constants()
        known = {
            "plan": self.plan.to_json(),
            "host_s": self._state_host_s,
            "run_state": self.run_state,
        }
        return known | {"constants": constants}

    def resume_from(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint saved. Stop limits and runtime stay those of this process."""
        now = self.plan
        before = Plan.from_json(state["plan"])
        self.plan = replace(
            before, limits=now.limits, runtime=now.runtime, choices=now.choices, notes=now.notes
        )
        # a state that this process has saved itself adds no time from before it
        if state["host_s"] != self._state_host_s:
            self._started_s -= state["host_s"]
        self.run_state = state["run_state"]
        self.job.learner.set_constants(state["constants"])
        if self.run_state.best is not None:
            # best.pt may hold a model of later than the checkpoint
            self.save(BEST, self.run_state.best, self.run_state.best_state)

    def emit(self, record: Record) -> None:
        """Apply a record of a rank, and write what is recorded of it."""
        match record:
            case Round() | Replan():
                self.recorder.event(as_event(record))
            case Heartbeat():
                self.heartbeats[record.rank] = record
            case Placed():
                self.hosts[record.rank] = record
            case WorkerFailed() | WorkerRejoined():
                self.record_membership(record)
            case TimeTotals():
                self.final_totals[record.rank] = record
            case StageEnd() | StageBoundary() | RunEnding():
                self.record_stage(record)
            case CompressionReport():
                self.run_state.compression.add(record)
            case NotFinite(_, where, number):
                self.not_finite = (
                    self.not_finite or f"{where} is not finite in its round {number + 1}"
                )
            case ProfileMeasured() | PlanMade():
                self.record_plan(record)

    def record_plan(self, record: ProfileMeasured | PlanMade) -> None:
        """Write a profile or a plan that was made during the run."""
        if isinstance(record, ProfileMeasured):
            return self.recorder.document("profile.json", self.locate_profile(record.profile))
        self.plan = with_new_assignments(self.plan, record.first, record.stages)
        self.recorder.document("plan.json", self.plan.to_json())

    def record_stage(self, record: StageEnd | StageBoundary | RunEnding) -> None:
        """Record the end of a stage or of the run, or a worker's totals at a stage boundary."""
        if isinstance(record, RunEnding):
            if self.run_state.parts is not None:
                self.run_state.parts.end_ns = record.time_ns
        elif isinstance(record, StageBoundary):
            while len(self.run_state.boundaries) <= record.stage:
                self.run_state.boundaries.append({})
            self.run_state.boundaries[record.stage][record.rank] = record.totals_ns
        # else from the survivor in place of a lead rank that failed after its report
        elif record.stage >= self.run_state.num_ended_stages:
            self.run_state.stages.append(record)
            self.recorder.event(as_event(record))

    def record_membership(self, record: WorkerFailed | WorkerRejoined) -> None:
        """Record that a worker failed or rejoined, and evaluate models that are complete now."""
        rank, parts = record.rank, self.run_state.parts
        self.recorder.event(as_event(record))
        at = seconds(record.time_ns / 1e9)
        if isinstance(record, WorkerRejoined):
            self.current_outages[rank].rejoined_ns = record.time_ns
            self.show_line(f"worker {rank} rejoined at {at}")
            if parts:
                parts.restore_worker(rank)
            return
        outage = Outage(rank, record.time_ns, record.why, totals=self.heartbeats.get(rank))
        self.run_state.outages.append(outage)
        self.show_line(f"worker {rank} failed at {at} ({record.why}); the run continues without it")
        for whole in parts.exclude_worker(rank) if parts else ():
            self.evaluate(whole)

    def show_line(self, text: str) -> None:
        """Show a line at once, on processes only: in virtual time many workers may fail in a
        second. The outcome lists them.
        """
        if self.read_heartbeats is None:
            self.progress.print_line(text)

    def locate_profile(self, profile: str) -> str:
        """Return a profile with the host and device of each worker and the host of the server, as
        far as ranks reported them.
        """
        known = Profile.from_json(profile)
        workers = list(known.workers)
        for rank, placed in self.hosts.items():
            if rank < len(workers):
                workers[rank] = replace(workers[rank], host=placed.host, device=placed.device)
            else:
                known = replace(known, server_host=placed.host)
        return replace(known, workers=tuple(workers)).to_json()

    def snapshot(self, record: Snapshot, vector: Vector | None) -> None:
        """Evaluate a model, once the snapshots of all ranks that hold a part of it are there."""
        vector = to_host(vector) if isinstance(vector, Tensor) else vector
        if self.run_state.parts is None:
            self.evaluate(EvaluatedModel(record, vector))
        elif whole := self.run_state.parts.add(record, vector):
            self.evaluate(whole)

    def evaluate_pending(self) -> None:
        """Evaluate the last model if it has waited for the states of the workers' modules.

        Call it after the last record.
        """
        self.receives_worker_states = False
        if (whole := self._waiting) is not None:
            self._waiting = None
            self.evaluate(whole)

    def evaluate(self, whole: EvaluatedModel) -> None:
        """Evaluate one model: metrics, best so far, targets, patience and divergence.

        `write_final_metrics` writes the line of the last model.
        """
        record, params, distance = whole
        counts = record.counts
        assert counts is not None
        if record.final:
            self.final = counts
        if not isinstance(params, Tensor):
            return  # a run without gradients has nothing to evaluate
        if record.final and self.receives_worker_states and self.job.learner.carries:
            self._waiting = whole
            return
        if record.final:
            self.sha256 = hashlib.sha256(params.numpy().tobytes()).hexdigest()
            self.save(FINAL, params)
            if last := self.unchanged_since(counts, distance):
                self.final = self.with_divergence(counts, last, params)
                return
        found = self.score(params, record.time_ns / 1e9, counts.merges, distance)
        if record.final:
            self.final = self.with_divergence(counts, found, params)
        hit = self.run_state.target.judge(self.plan.limits, self.run_state.evaluations)
        self.stop_reason = self.stop_reason or hit
        if self.stop_reason is None and is_out_of_patience(
            self.plan.limits, self.run_state.evaluations
        ):
            self.stop_reason = PATIENCE
        if not record.final:
            waited = [
                beat._asdict() | {"wait_s": beat.totals_ns["wait"] / 1e9} for beat in self.workers()
            ]
            self.recorder.metric(self.metrics_row(counts, found, found.time_s, waited))

    def unchanged_since(self, counts: Counts, distance: float | None) -> Evaluation | None:
        """Return the latest evaluation if the model has not changed since, else None."""
        if not self.run_state.evaluations or self.job.learner.carries:
            return None
        last = self.run_state.evaluations[-1]
        same = (last.merges, last.consensus_distance) == (counts.merges, distance)
        return last if same else None

    def score(
        self, params: Tensor, time_s: float, merges: int | None, distance: float | None = None
    ) -> Evaluation:
        """Compute the scores of a model, add them to the evaluations, and save a new best model."""
        scores = self.job.learner.evaluate(params)
        train_loss, test_loss = scores["train_loss"], scores["test_loss"]
        assert train_loss is not None
        assert test_loss is not None
        found = Evaluation(
            time_s=time_s,
            merges=merges,
            train_loss=train_loss,
            test_loss=test_loss,
            test_accuracy=scores["test_accuracy"],
            test_metric=scores["test_metric"],
            higher_is_better=self.job.parts.task.higher_is_better,
            consensus_distance=distance,
        )
        self.run_state.evaluations.append(found)
        self.run_state.scores = scores_of(self.run_state.evaluations)
        if best_of(self.run_state.evaluations) is found:
            self.run_state.best, self.run_state.best_state = params, self.job.learner.mean_state()
            self.save(BEST, params)
        return found

    def with_divergence(self, counts: Counts, found: Evaluation, params: Tensor) -> Counts:
        """Return the last counts, with the reason if the run has diverged."""
        why = find_divergence(counts, found, params, self.job.learner, self.plan.num_workers)
        return counts._replace(diverged=why)

    def save(self, name: str, params: Tensor, own: Any = None) -> None:
        """Write a model into the run folder, unless run.save_weights=false."""
        if self.weights:
            weights.write(self.recorder.run_dir / name, self.job.learner.state_dict(params, own))

    def write_final_metrics(self, summary: Mapping[str, Any]) -> None:
        """Write the last line of metrics.jsonl, with the same numbers as the summary.

        Call it once all ranks have reported their final totals.
        """
        if self.final is not None and self.run_state.evaluations and (time_s := summary["time_s"]):
            last = self.run_state.evaluations[-1]
            self.recorder.metric(self.metrics_row(self.final, last, time_s, summary["workers"]))

    def metrics_row(
        self, counts: Counts, found: Evaluation, time_s: float, workers: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a line of metrics.jsonl."""
        extra = self.run_state.compression.metrics() | values_of(self.measures())
        if (hidden := self.hidden_share()) is not None:
            extra["perf/comm_hidden_share"] = hidden
        if own := self.own_metric(found):
            extra = {f"test/{own[0]}": own[1], **extra}
        return metrics_line(
            counts,
            found,
            time_s,
            self.host_s,
            workers,
            extra,
            has_server=self.job.has_server,
        )

    def own_metric(self, found: Evaluation) -> tuple[str, float] | None:
        """Return the task's metric and its value; None if there is none or it is the accuracy."""
        name, value = recorded_name(self.job.parts.task.metric), found.test_metric
        return None if name in ("", ACCURACY) or value is None else (name, value)

    def hidden_share(self) -> float | None:
        """Return the fraction of the collectives' time that overlapped with other work of their
        workers; None if nothing overlaps.
        """
        if all(stage.overlap.serial and not stage.delayed_overlap for stage in self.job.stages):
            return None
        beats = [
            beat
            for rank, beat in (self.heartbeats | self.final_totals).items()
            if rank < self.plan.num_workers
        ]
        collective_ns = sum(beat.collective_ns for beat in beats)
        exposed_ns = sum(beat.totals_ns["push"] + beat.totals_ns["pull"] for beat in beats)
        return max(0.0, 1 - exposed_ns / collective_ns) if collective_ns else None

    def measures(self) -> list[Measures]:
        """Return the latest measures of all ranks, in rank order."""
        return [beat.measures for _, beat in sorted((self.heartbeats | self.final_totals).items())]

    def workers(self) -> list[Heartbeat]:
        """Return the latest heartbeat of each worker that has sent one, in rank order."""
        if self.read_heartbeats is not None:
            self.heartbeats = {beat.rank: beat for beat in self.read_heartbeats()}
        return [
            beat for rank, beat in sorted(self.heartbeats.items()) if rank < self.plan.num_workers
        ]

    def counts(self) -> Counts | None:
        """Return the latest counts of the lead rank, or of the survivor in its place. Before its
        first heartbeat they are those of the last stage that ended; None if none has.
        """
        stages = self.run_state.stages
        return self.running_counts() or (stages[-1].counts if stages else None)

    def running_counts(self) -> Counts | None:
        """Return the counts of the last model, or of the latest heartbeat that has counts; None if
        the lead rank has not begun or resumed its work.
        """
        beats = sorted(self.heartbeats.values(), key=lambda beat: beat.time_ns)
        latest = next((beat.counts for beat in reversed(beats) if beat.counts), None)
        return self.final or latest

    def watch_stragglers(self) -> None:
        """Warn once of each straggler, on processes only: virtual time has declared ones."""
        running = [beat for beat in self.workers() if beat.rank not in self.current_outages]
        rows = [
            {
                "rank": beat.rank,
                "steps": beat.steps,
                "compute_s": beat.totals_ns["compute"] / 1e9,
                "wait_s": beat.totals_ns["wait"] / 1e9,
            }
            for beat in running
        ]
        time_s = max((beat.time_ns for beat in running), default=0) / 1e9
        if found := self.stragglers.observe(rows, time_s):
            text = describe_straggler(found)
            logger.warning("%s", text)
            if not self.progress.has_table:  # the table shows the latest verdict
                self.show_line(text)

    def draw_progress(self) -> None:
        """Draw the progress table, if it is due."""
        if self.read_heartbeats is None:
            self.watch_stragglers()
        host_s = self.host_s
        if not self.progress.due(host_s):
            return
        found = next(reversed(self.run_state.evaluations), None)
        frame = make_frame(
            self.plan,
            self.run_state.num_ended_stages,
            # not `counts()`: after a resume, a frame would show those of an ended stage at time 0
            self.running_counts(),
            self.workers(),
            self.current_outages.keys(),
            len(self.job.data.train),
            found,
            found and self.own_metric(found),
            host_s,
            virtual=self.read_heartbeats is not None,
            has_server=self.job.has_server,
        )
        self.progress.update(frame._replace(straggler=describe_straggler(self.stragglers.found)))


def with_new_assignments(
    plan: Plan, first: int, stages: Sequence[Sequence[Sequence[float]]]
) -> Plan:
    """Return the plan with new assignments from stage `first` on.

    Args: stages, by stage and worker: local steps H, data share, compression ratio, cycle seconds.
    Raises: AshlError if they do not fit the plan's stages and workers.
    """
    try:
        after = [
            replace(
                stage,
                workers=assign_work(stage.workers, [assignment_of(row) for row in rows]),
            )
            for stage, rows in zip(plan.stages[first:], stages, strict=True)
        ]
    except (ValueError, OverflowError) as error:
        raise AshlError(f"the new plan does not fit this run: {error}") from error
    return replace(plan, stages=(*plan.stages[:first], *after))


def make_frame(
    plan: Plan,
    ended: int,
    counts: Counts | None,
    beats: Sequence[Heartbeat],
    failed: Collection[int],
    epoch_samples: int,
    found: Evaluation | None,
    metric: tuple[str, float] | None,
    host_s: float,
    virtual: bool,
    has_server: bool,
) -> Frame:
    """Make one frame of the progress table.

    Args: ended, the number of stages that have ended; failed, workers that have not rejoined;
    found and metric, of the latest evaluation; virtual, True in virtual time; has_server, True if a
    server holds the model.
    """
    time_s = max((beat.time_ns for beat in beats), default=0) / 1e9
    done = share_done(plan.limits, counts, time_s, epoch_samples)
    # on processes, host time includes the time to start them
    passed_s = host_s if virtual else time_s
    workers = [
        WorkerFrame(
            rank=beat.rank,
            step=beat.steps,
            samples_per_s=(
                beat.steps * plan.stages[0].workers[beat.rank].batch / time_s if time_s else None
            ),
            wait_share=beat.totals_ns["wait"] / 1e9 / time_s if time_s else 0.0,
            staleness=beat.staleness,
            loss=beat.loss,
            down=beat.rank in failed,
        )
        for beat in beats
    ]
    return Frame(
        time_s=time_s,
        host_s=host_s,
        stage=plan.stages[min(ended, len(plan.stages) - 1)].name,
        steps=counts.steps if counts else 0,
        commits=counts.count_commits(has_server) if counts else 0,
        loss=counts.loss if counts else None,
        accuracy=found.test_accuracy if found else None,
        metric=metric,
        samples_per_s=counts.samples / time_s if counts and time_s else None,
        wait_share=fmean(worker.wait_share or 0.0 for worker in workers) if workers else None,
        progress=done,
        eta_host_s=passed_s * (1 - done) / done if done else None,
        workers=workers,
    )


def share_done(limits: Limits, counts: Counts | None, time_s: float, epoch_samples: int) -> float:
    """Return the fraction of the run that is done, by the stop limit that is nearest."""
    steps, samples = (counts.steps, counts.samples) if counts else (0, 0)
    shares = [
        samples / (limits.epochs * epoch_samples) if limits.epochs else 0.0,
        steps / limits.steps if limits.steps else 0.0,
        time_s / limits.seconds if limits.seconds else 0.0,
    ]
    return min(1.0, max(shares))
