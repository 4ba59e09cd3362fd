"""Beside every run, off its clock: takes in what the ranks say, has snapshots evaluated, keeps the
records.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from torch import Tensor

from ashl.errors import AshlError
from ashl.learn.device import to_host
from ashl.learn.weights import BEST, FINAL
from ashl.plan.plan import PATIENCE, Limits, Plan, assigned
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
    is_out_of_patience,
    make_model_set,
    scores_of,
    why_diverged,
)
from ashl.run.metrics import CompressionStats, Waited, metrics_line, values_of
from ashl.runtime.records import (
    CompressionReport,
    Counts,
    Heartbeat,
    Joined,
    Lost,
    Measures,
    NotFinite,
    Placed,
    PlanMade,
    ProfileMeasured,
    Record,
    Replan,
    Round,
    Rounds,
    Snapshot,
    StageBoundary,
    StageEnd,
    TimeTotals,
    UpdateShown,
)
from ashl.size_only import Vector
from ashl.task.contract import ACCURACY, recorded_name
from ashl.tracking.console import Frame, Progress, WorkerFrame, seconds
from ashl.tracking.events import as_event
from ashl.tracking.recorder import Recorder


@dataclass
class Outage:
    """A worker that was lost: when, why, and when it was back."""

    worker: int
    time_ns: int
    why: str
    rejoined_ns: int | None = None


@dataclass
class MonitorState:
    """What the monitor knows of a run, and a checkpoint keeps."""

    compression: CompressionStats
    parts: ModelSet | None  # where every worker has a model of its own
    stopping: str | None = None
    scores: dict[str, float | None] | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    target: Target = field(default_factory=Target)
    stages: list[StageEnd] = field(default_factory=list)
    best: Tensor | None = None  # the model of the best evaluation
    best_state: Any = None  # ... and what forward passes had changed beside its parameters
    outages: list[Outage] = field(default_factory=list)  # in the order in which they began
    borders: list[dict[int, dict[str, int]]] = field(
        default_factory=list
    )  # by stage that gave way, by worker: totals

    @property
    def ended(self) -> int:
        """How many stages are over; of the end of one nobody may have heard, where its home rank
        was lost just then.
        """
        return self.stages[-1].stage + 1 if self.stages else 0


class Monitor:
    """The observer of a run, in the process that records it.

    In virtual time the kernel calls it directly and `stopping` acts at once; for real processes it
    is handed what their reporters sent, and passes `stopping` on.
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
        self.plan, self.job, self.recorder, self.progress = plan, job, recorder, progress
        self.rounds, self.weights = rounds, weights
        self.run_state = MonitorState(
            CompressionStats(4 * plan.num_params), make_model_set(job.stages[0])
        )
        self.beats: dict[int, Heartbeat] = {}
        self.read_beats: Callable[[], list[Heartbeat]] | None = (
            None  # in virtual time: ask the nodes
        )
        self.ledgers: dict[int, TimeTotals] = {}
        self.hosts: dict[int, Placed] = {}  # of real processes
        self.final: Counts | None = None
        self.not_finite: str | None = None  # what was no number before any loss was
        self.sha256: str | None = None
        self.states_travel = (
            False  # whether workers send what their modules keep, the last after their last model
        )
        self._waiting: EvaluatedModel | None = None  # the last model, until they have
        self.refused = 0  # messages that came to a real run and were not of it
        self._started = time.monotonic()
        self._state_host_s: float | None = None  # in the latest `state`

    @property
    def stopping(self) -> str | None:
        return self.run_state.stopping

    @stopping.setter
    def stopping(self, reason: str | None) -> None:
        self.run_state.stopping = reason

    @property
    def scores(self) -> dict[str, float | None] | None:
        return self.run_state.scores

    @property
    def current_outages(self) -> dict[int, Outage]:
        """Who is gone now."""
        return {
            absence.worker: absence
            for absence in self.run_state.outages
            if absence.rejoined_ns is None
        }

    @property
    def host_s(self) -> float:
        return time.monotonic() - self._started

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        self._state_host_s = self.host_s
        constants = self.job.learner.constants()
        known = {"plan": self.plan.to_json(), "host_s": self._state_host_s, "books": self.run_state}
        return known | {"constants": constants}

    def resume_from(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint has kept; when the run ends, and where it runs, is as
        of now.
        """
        now = self.plan
        before = Plan.from_json(state["plan"])
        self.plan = replace(
            before, limits=now.limits, runtime=now.runtime, choices=now.choices, notes=now.notes
        )
        if (
            state["host_s"] != self._state_host_s
        ):  # its own state, read back, holds nothing from before it
            self._started -= state["host_s"]
        self.run_state = state["books"]
        self.job.learner.set_constants(state["constants"])
        self.job.learner.set_constants(state["constants"])
        if self.run_state.best is not None:
            self.save(
                BEST, self.run_state.best, self.run_state.best_state
            )  # what came after the checkpoint has not been

    def emit(self, record: Record) -> None:
        """A record from a rank."""
        match record:
            case Round() | Replan():
                self.recorder.event(as_event(record))
            case Heartbeat():
                self.beats[record.rank] = record
            case Placed():
                self.hosts[record.rank] = record
            case Lost(rank, time_ns, why):
                self.run_state.outages.append(Outage(rank, time_ns, why))
                self.show_line(
                    f"worker {rank} failed at {seconds(time_ns / 1e9)} ({why}); the run continues"
                    " without it"
                )
                self.recorder.event(as_event(record))
                for whole in (
                    self.run_state.parts.exclude_worker(rank) if self.run_state.parts else ()
                ):
                    self.evaluate(whole)
            case Joined(rank, time_ns):
                self.current_outages[rank].rejoined_ns = time_ns
                self.show_line(f"worker {rank} rejoined at {seconds(time_ns / 1e9)}")
                if self.run_state.parts:
                    self.run_state.parts.restore_worker(rank)
                self.recorder.event(as_event(record))
            case TimeTotals():
                self.ledgers[record.rank] = record
            case StageEnd() if record.stage < self.run_state.ended:
                # from who stands in for a home rank that was lost after it had reported to us, and
                # to nobody else
                pass
            case StageEnd():
                self.run_state.stages.append(record)
                self.recorder.event(as_event(record))
            case StageBoundary(rank, stage, totals_ns):
                while len(self.run_state.borders) <= stage:
                    self.run_state.borders.append({})
                self.run_state.borders[stage][rank] = totals_ns
            case CompressionReport():
                self.run_state.compression.add(record)
            case NotFinite(_, where, number):
                self.not_finite = (
                    self.not_finite or f"{where} is not finite in its round {number + 1}"
                )
            case ProfileMeasured(_, profile):
                self.recorder.document("profile.json", self.locate_profile(profile))
            case PlanMade(_, first, stages):
                self.plan = replanned(self.plan, first, stages)
                self.recorder.document("plan.json", self.plan.to_json())

    def show_line(self, text: str) -> None:
        """Show a line at once. In virtual time, where many workers may fail in a second, the
        outcome tells it.
        """
        if self.read_beats is None:
            self.progress.say(text)

    def locate_profile(self, profile: str) -> str:
        """A profile with the host and the device of each worker, and the server's host, where ranks
        reported them.
        """
        known = Profile.from_json(profile)
        workers = list(known.workers)
        for rank, placed in self.hosts.items():
            if rank < len(workers):
                workers[rank] = replace(workers[rank], host=placed.host, device=placed.device)
            else:
                known = replace(known, server_host=placed.host)
        return replace(known, workers=tuple(workers)).to_json()

    def snapshot(self, record: Snapshot | UpdateShown, vector: Vector | None) -> None:
        """Evaluate a model: metrics, best so far, target. Where every worker has its own, wait
        until all have come.
        """
        vector = to_host(vector) if isinstance(vector, Tensor) else vector
        if isinstance(record, UpdateShown):
            if isinstance(vector, Tensor):
                self.run_state.compression.update(record, vector, self.plan.num_workers)
        elif self.run_state.parts is None:
            self.evaluate(EvaluatedModel(record, vector))
        elif whole := self.run_state.parts.add(record, vector):
            self.evaluate(whole)

    def set_module_state(self, rank: int, state: Any) -> None:
        """What forward passes have changed of a worker's module."""
        if state is not None:
            self.job.learner.set_worker_state(rank, state)

    def evaluate_pending(self) -> None:
        """All have said all: evaluate the last model, where that has waited for what the modules
        keep beside it.
        """
        whole, self._waiting, self.states_travel = self._waiting, None, False
        if whole is not None:
            self.evaluate(whole)

    def evaluate(self, whole: EvaluatedModel) -> None:
        """Score one model; the last line of the metrics is left to `conclude`."""
        record, params, distance = whole
        counts = record.counts
        assert counts is not None
        if record.final:
            self.final = counts
        if not isinstance(params, Tensor):
            return  # a run without gradients has nothing to evaluate
        if record.final and self.states_travel and self.job.learner.carries:
            self._waiting = whole
            return
        last = self.run_state.evaluations[-1] if self.run_state.evaluations else None
        if record.final:
            self.sha256 = hashlib.sha256(params.numpy().tobytes()).hexdigest()
            self.save(FINAL, params)
            if (
                last
                and not self.job.learner.carries
                and (last.merges, last.consensus_distance) == (counts.merges, distance)
            ):
                self.final = self.with_divergence(counts, last, params)
                return  # the model has not changed since the last evaluation
        found = self.score(params, record.time_ns / 1e9, counts.merges, distance)
        if record.final:
            self.final = self.with_divergence(counts, found, params)
        hit = self.run_state.target.judge(self.plan.limits, found)
        self.stopping = self.stopping or hit
        if self.stopping is None and is_out_of_patience(
            self.plan.limits, self.run_state.evaluations
        ):
            self.stopping = PATIENCE
        if not record.final:
            waited = [
                Waited(b.rank, b.totals_ns["wait"] / 1e9, b.bytes_up, b.bytes_down)
                for b in self.workers()
            ]
            self.recorder.metric(self.metrics_row(counts, found, found.time_s, waited))

    def score(
        self, params: Tensor, time_s: float, merges: int | None, distance: float | None = None
    ) -> Evaluation:
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
        why = why_diverged(counts, found, params, self.job.learner, self.plan.num_workers)
        return counts._replace(diverged=why)

    def shown_ns(self, merges: int) -> int | None:
        """When the last model after at most so many merges was shown, where servers show their
        pieces each for itself; None while some are still to come.
        """
        parts = self.run_state.parts
        if parts is None or not parts.shards:
            return 0
        found = [
            one.time_s
            for one in self.run_state.evaluations
            if one.merges is not None and one.merges <= merges
        ]
        return None if parts.has_pending(merges) else round(max(found, default=0.0) * 1e9)

    def save(self, name: str, params: Tensor, own: Any = None) -> None:
        """Leave a model in the run folder, where weights are wanted."""
        if self.weights:
            weights.write(self.recorder.run_dir / name, self.job.learner.state_dict(params, own))

    def write_final_metrics(self, summary: Mapping[str, Any]) -> None:
        """The last line of metrics.jsonl, written once the ranks have accounted for what lies past
        the end: it agrees with the summary to the byte.
        """
        if self.final is not None and self.run_state.evaluations and (time_s := summary["time_s"]):
            workers = [Waited(*(w[key] for key in Waited._fields)) for w in summary["workers"]]
            self.recorder.metric(
                self.metrics_row(self.final, self.run_state.evaluations[-1], time_s, workers)
            )

    def metrics_row(
        self, counts: Counts, found: Evaluation, time_s: float, workers: Sequence[Waited]
    ) -> dict[str, Any]:
        extra = self.run_state.compression.metrics() | values_of(self.measures())
        if (hidden := self.hidden_share()) is not None:
            extra["perf/comm_hidden_share"] = hidden
        if own := self.own_metric(found):
            extra = {f"test/{own[0]}": own[1], **extra}
        return metrics_line(counts, found, time_s, self.host_s, workers, extra)

    def own_metric(self, found: Evaluation) -> tuple[str, float] | None:
        """The task's metric and its value, where it is another one than the accuracy."""
        name, value = recorded_name(self.job.parts.task.metric), found.test_metric
        return None if name in ("", ACCURACY) or value is None else (name, value)

    def hidden_share(self) -> float | None:
        """The share of the collectives' time in which their workers did something else; None where
        nothing overlaps.
        """
        if all(stage.overlap.serial and not stage.delayed for stage in self.job.stages):
            return None
        beats = [
            beats
            for rank, beats in (self.beats | self.ledgers).items()
            if rank < self.plan.num_workers
        ]
        moving = sum(of.collective_ns for of in beats)
        shown = sum(of.totals_ns["push"] + of.totals_ns["pull"] for of in beats)
        return max(0.0, 1 - shown / moving) if moving else None

    def measures(self) -> list[Measures]:
        """What the ranks have measured, as they said last."""
        return [beat.measures for _, beat in sorted((self.beats | self.ledgers).items())]

    def workers(self) -> list[Heartbeat]:
        """How each worker stands."""
        if self.read_beats is not None:
            self.beats = {beat.rank: beat for beat in self.read_beats()}
        return [beat for rank, beat in sorted(self.beats.items()) if rank < self.plan.num_workers]

    def counts(self) -> Counts | None:
        """The latest counts of the home rank, or of the one that stands in for it."""
        stages, beats = (
            self.run_state.stages,
            sorted(self.beats.values(), key=lambda beat: beat.time_ns),
        )
        latest = next((beat.counts for beat in reversed(beats) if beat.counts), None)
        return self.final or latest or (stages[-1].counts if stages else None)

    def draw_progress(self) -> None:
        """Draw the progress where it is due."""
        if self.progress.due(host_s := self.host_s):
            workers, found = self.workers(), next(reversed(self.run_state.evaluations), None)
            epoch = len(self.job.data.train)
            virtual = self.read_beats is not None
            args = (
                self.plan,
                self.run_state.ended,
                self.counts(),
                workers,
                self.current_outages.keys(),
                epoch,
            )
            self.progress.update(
                view(*args, found, found and self.own_metric(found), host_s, virtual)
            )


def replanned(plan: Plan, first: int, stages: Sequence[Sequence[Sequence[float]]]) -> Plan:
    """The plan with (H, share, ratio, cycle) by worker as planned during the run, from stage
    `first` on. Raises AshlError where it is none of these workers.
    """
    try:
        after = [
            replace(stage, workers=assigned(stage.workers, [assignment_of(row) for row in rows]))
            for stage, rows in zip(plan.stages[first:], stages, strict=True)
        ]
    except (ValueError, OverflowError) as error:
        raise AshlError(f"a plan came that does not fit this run: {error}") from error
    return replace(plan, stages=(*plan.stages[:first], *after))


def view(
    plan: Plan,
    ended: int,
    counts: Counts | None,
    beats: Sequence[Heartbeat],
    absent: Collection[int],
    epoch_samples: int,
    found: Evaluation | None,
    metric: tuple[str, float] | None,
    host_s: float,
    virtual: bool,
) -> Frame:
    """How the run stands, after so many stages that have ended; `found` and `metric`: by the last
    evaluation.
    """
    time_s = max((beat.time_ns for beat in beats), default=0) / 1e9
    done = share_done(plan.limits, counts, time_s, epoch_samples)
    passed_s = host_s if virtual else time_s  # processes took time to start
    waits = [waited(beat, time_s) for beat in beats]
    batches = [worker.batch for worker in plan.stages[0].workers]
    workers = [
        worker_frame(beat, batches[beat.rank], time_s, beat.rank in absent) for beat in beats
    ]
    return Frame(
        time_s=time_s,
        host_s=host_s,
        stage=plan.stages[min(ended, len(plan.stages) - 1)].name,
        steps=counts.steps if counts else 0,
        commits=sum(counts.commits) if counts else 0,
        loss=counts.loss if counts else None,
        accuracy=found.test_accuracy if found else None,
        metric=metric,
        samples_per_s=counts.samples / time_s if counts and time_s else None,
        wait_share=fmean(waits) if waits else None,
        progress=done,
        eta_host_s=passed_s * (1 - done) / done if done else None,
        workers=workers,
    )


def worker_frame(beat: Heartbeat, batch: int, time_s: float, absent: bool) -> WorkerFrame:
    return WorkerFrame(
        rank=beat.rank,
        step=beat.steps,
        samples_per_s=beat.steps * batch / time_s if time_s else None,
        wait_share=waited(beat, time_s),
        staleness=beat.staleness,
        loss=beat.loss,
        down=absent,
    )


def waited(beat: Heartbeat, time_s: float) -> float:
    return beat.totals_ns["wait"] / 1e9 / time_s if time_s else 0.0


def share_done(limits: Limits, counts: Counts | None, time_s: float, epoch_samples: int) -> float:
    """The share of the run that is behind us, by whichever limit is nearest."""
    steps, samples = (counts.steps, counts.samples) if counts else (0, 0)
    shares = [
        samples / (limits.epochs * epoch_samples) if limits.epochs else 0.0,
        steps / limits.steps if limits.steps else 0.0,
        time_s / limits.seconds if limits.seconds else 0.0,
    ]
    return min(1.0, max(shares))
