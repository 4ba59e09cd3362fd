"""A stage while it runs: its rules bound to its workers, and the tally by which its progress is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ashl.plan.plan import Limits, StagePlan, WorkerPlan, assigned
from ashl.plan.profile import Profile, WorkerProfile
from ashl.planner.assignment import Assignment
from ashl.runtime.effects import Tag

GO, NEXT, STOP = 0, 1, 2  # the word that every reply carries
OF_SHARDS = ("full", "statistics")  # estimators that are of all samples of a worker


class Push(NamedTuple):
    """What a worker pushed, decoded."""

    worker: int
    body: Any
    steps: int
    samples: int
    staleness: int
    loss: float
    step_s: float  # what a local step took
    push_s: float
    pull_s: float  # of the pull before


@dataclass
class Tally:
    """Progress as the server counts it (without one: as every worker does, alike).

    `commits[w]` pushes of worker w applied, `clocks[w]` those of this stage; `pulled[w]` the version of the model that
    w computes on; `version` merges so far; `waiting` the workers that have pushed and have no reply yet.
    """

    num_workers: int
    commits: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    steps_by: list[int] = field(default_factory=list)
    dropped_by: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    stale_sum: list[int] = field(default_factory=list)
    stale_max: list[int] = field(default_factory=list)
    waiting: dict[int, tuple[int, bool]] = field(default_factory=dict)  # to (staleness, late) of the push
    version: int = 0
    steps: int = 0
    samples: int = 0
    total_commits: int = 0
    max_lead: int = 0
    groups: list[int] | None = None  # how many each worker has averaged in, where workers meet in groups
    conflicts: int | None = None  # groups that had to wait for another one
    loss: float = math.nan  # running mean of the workers' minibatch losses
    diverged: str | None = None
    evals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # (seconds, commits, samples) at the last one
    end_ns: int = 0  # when the last stage ended
    start: dict[str, float] = field(default_factory=dict)  # commits, samples and seconds where this stage began
    best: tuple[float, int] = (math.inf, 0)  # the lowest running loss of this stage, and at how many commits
    rule_state: Any = None  # the state of this stage's sync rule, where it has one
    slowest: int = 0  # min(clocks)
    latest: int = 0  # the worker whose push came last
    _at_clock: dict[int, int] = field(default_factory=dict)  # how many workers have each tally
    _seen: int = 0

    def __post_init__(self) -> None:
        n = self.num_workers
        for name in ("commits", "steps_by", "dropped_by", "pulled", "stale_sum", "stale_max"):
            setattr(self, name, getattr(self, name) or [0] * n)
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """A stage begins: leads and limits are counted from here."""
        self.clocks = [0] * self.num_workers
        self._at_clock, self.slowest, self._seen = {0: self.num_workers}, 0, 0
        self.start = {"commits": self.total_commits, "samples": self.samples, "seconds": now_s}
        self.best = (math.inf, self.total_commits)
        self.rule_state = None

    def commit(self, worker: int, steps: int, samples: int) -> None:
        """A push of this worker is now part of the model."""
        tally = self.clocks[worker]
        self.clocks[worker] = tally + 1
        self.commits[worker] += 1
        self.total_commits += 1
        self._at_clock[tally + 1] = self._at_clock.get(tally + 1, 0) + 1
        self._at_clock[tally] -= 1
        if not self._at_clock[tally]:
            del self._at_clock[tally]
            if tally == self.slowest:
                self.slowest = tally + 1
        self.steps_by[worker] += steps
        self.steps += steps
        self.samples += samples

    def observe(self, worker: int, staleness: int, loss: float, mean: bool = False) -> None:
        """A push has come: how old the model was that it was computed on, and the loss it saw; `mean` where that is the
        mean of all workers, of which nobody knows whose it was that became infinite."""
        self.latest = worker
        self.stale_sum[worker] += staleness
        self.stale_max[worker] = max(self.stale_max[worker], staleness)
        self.loss = loss if math.isnan(self.loss) else self.loss + (loss - self.loss) / (2 * self.num_workers)
        if not math.isfinite(loss):
            whose = "the workers' mean loss" if mean else f"the loss of worker {worker}"
            self.diverged = f"{whose} became {loss} near step {self.steps + 1}"
        elif self.loss < 0.99 * self.best[0]:
            self.best = (self.loss, self.total_commits)

    def drop(self, worker: int, steps: int) -> None:
        self.dropped_by[worker] += steps

    def release(self, worker: int) -> None:
        """This worker goes on, on the current version."""
        self.max_lead = max(self.max_lead, self.clocks[worker] - self.slowest)
        self.pulled[worker] = self.version
        del self.waiting[worker]

    def behind(self) -> list[int]:
        """Workers that wait and whose model has been merged into a newer one: what a barrier lets go."""
        return [w for w in self._candidates(self.version) if self.pulled[w] < self.version]

    def within(self, staleness: float) -> list[int]:
        """Workers that wait and lead the slowest by at most `staleness` commits."""
        bound = self.slowest + staleness
        return [w for w in self._candidates(self.slowest) if self.clocks[w] <= bound]

    def _candidates(self, mark: int) -> Iterable[int]:
        """Only the latest worker's case can have changed, unless the mark that all are judged by has moved."""
        moved, self._seen = mark != self._seen, mark
        return self.waiting if moved else (self.latest,)

    def report(self) -> dict[str, Any]:
        """The counts that go into records, as plain values."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "merges": self.version,
            "commits": list(self.commits),
            "steps_by": list(self.steps_by),
            "dropped_by": list(self.dropped_by),
            "stale_sum": list(self.stale_sum),
            "stale_max": list(self.stale_max),
            "max_lead": self.max_lead,
            "groups": self.groups and list(self.groups),
            "conflicts": self.conflicts,
            "loss": self.loss,
            "diverged": self.diverged,
        }


def extra_ranks(topology: Any, sync: Any) -> int:
    """1 where a parameter server, or a coordinator (`ashl.topology.coordinator`), takes part as rank n; else 0."""
    return int(topology.has_server or any(getattr(part, "coordinated", False) for part in (topology, sync)))


@dataclass(frozen=True)
class Stage:
    """The rules of one stage bound together. `over` and `due` are judged in one place, at the home rank."""

    index: int
    plan: StagePlan
    topology: Any
    sync: Any
    aggregate: Any
    codec: Any  # of a worker's link, see `compression.link`
    trainer: Any
    limits: Limits
    epoch_samples: int
    following: bool = False  # whether another stage comes after this one
    planner: Any = None
    profile: Profile | None = None  # what the configuration declares of the workers
    bare_codec: Any = None  # without memory or schedule around it
    layout: tuple[Any, ...] = ()  # the model's layers, see `compression.layers`
    health_every: int | None = None  # rounds between two looks at what compression loses
    health_layers: bool = False
    health_mean: bool = False
    seed: int = 0  # of what all ranks draw alike: graphs, matchings, whom to meet
    nodes: tuple[int, ...] | None = None  # the machine of each worker, where the cluster says
    payload: Callable[[float | None], float] = field(default=lambda ratio: 1.0)  # bytes on the wire / dense bytes
    replan: Callable[[tuple[WorkerProfile, ...]], tuple[Profile, list[StagePlan]]] | None = (
        None  # from what was measured
    )

    @property
    def num_workers(self) -> int:
        return len(self.plan.workers)

    @property
    def pull_codec(self) -> Any:
        """What compresses a pull, which is a difference between models: some codecs have another form for it."""
        return self.bare_codec.pulled() if hasattr(self.bare_codec, "pulled") else self.bare_codec

    @property
    def server(self) -> int:
        return self.num_workers

    @property
    def home(self) -> int:
        """The rank that judges, counts and hands out snapshots."""
        return self.server if extra_ranks(self.topology, self.sync) else 0

    @property
    def replicas(self) -> bool:
        """Whether every worker has a model of its own, so that their mean is what is evaluated."""
        return getattr(self.topology, "replicas", False)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(range(self.num_workers))

    @property
    def resets(self) -> bool:
        """Whether momentum starts from zero here, instead of being handed over by the stage before."""
        return self.index > 0 and self.plan.handover.get("momentum") == "reset"

    @cached_property
    def quorum(self) -> int:
        """How many pushes make a merge."""
        return self.sync.quorum(self.num_workers)

    def doing(self, workers: tuple[WorkerPlan, ...]) -> Stage:
        """The stage with its workers doing something else from now on; their shards stay as they are."""
        return self if workers is self.plan.workers else replace(self, plan=replace(self.plan, workers=workers))

    def assigned(self, rows: Sequence[Assignment]) -> Stage:
        """The stage as planned during the run, with everybody's shard as planned."""
        workers = assigned(self.plan.workers, rows)
        trainer = self.trainer.reshard([w.data_share for w in workers])
        return replace(self, plan=replace(self.plan, workers=workers), trainer=trainer)

    def worker(self, rank: int) -> WorkerPlan:
        return self.plan.workers[rank]

    @cached_property
    def _weights(self) -> list[float]:
        """scale · w_i of all workers."""
        return self._weighed(self._sized)

    @property
    def estimator(self) -> str:
        """Which gradient the workers exchange, see `topology.estimate`."""
        if getattr(self.trainer, "statistics", 0):
            return "statistics"
        return getattr(self.sync, "estimator", getattr(self.codec, "estimator", "minibatch"))

    def samples_of(self, rank: int) -> int:
        """The samples of one gradient: those of a minibatch, or all that the worker has."""
        return self.trainer.shard_size(rank) if self.estimator in OF_SHARDS else self.worker(rank).batch

    @cached_property
    def _sized(self) -> tuple[WorkerPlan, ...]:
        """The workers with the samples that they compute at once."""
        if self.estimator not in OF_SHARDS:
            return self.plan.workers
        return tuple(replace(worker, batch=self.samples_of(rank)) for rank, worker in enumerate(self.plan.workers))

    def _weighed(self, workers: Sequence[WorkerPlan]) -> list[float]:
        weights = self.aggregate.weigh(workers)
        total = sum(weights) if self.aggregate.normalised else 1.0
        return [self.aggregate.scale * weight / total for weight in weights]

    def weights(self, members: Sequence[int]) -> list[float]:
        """What each member's body is multiplied with: scale · w_i with Σ w_i = 1, over all workers or, where the sync
        mode averages, over the pushes of the merge; a worker may have several of them."""
        if self.sync.averages:
            return self._weighed([self._sized[member] for member in members])
        return [self._weights[member] for member in members]

    def weights_of(self, pushes: Sequence[Push]) -> list[float]:
        """The same by what each push holds, where the sync mode averages: it need not be as planned."""
        if not self.sync.averages:
            return self.weights([push.worker for push in pushes])
        workers = self.plan.workers
        return self._weighed(
            [replace(workers[p.worker], local_steps=p.steps, batch=p.samples // p.steps) for p in pushes]
        )

    def tag(self, name: str, iteration: int = 0) -> Tag:
        return (name, self.index, iteration)

    @property
    def deadline_s(self) -> float:
        return math.inf if self.limits.seconds is None else self.limits.seconds

    def over(self, tally: Tally) -> str | None:
        """Why the run ends, judged from counts alone, so that every rank that counts alike decides alike."""
        return "diverged" if tally.diverged else self.spent(tally)

    def spent(self, tally: Tally) -> str | None:
        """The same where one rank alone knows of the workers' losses: it has to tell the others first."""
        if self.limits.steps is not None and tally.steps >= self.limits.steps:
            return "steps"
        if self.limits.epochs is not None and tally.samples >= self.limits.epochs * self.epoch_samples:
            return "epochs"
        return None

    def reached(self, tally: Tally, now_s: float, scores: Mapping[str, float | None] | None) -> str | None:
        """The rule by which this stage gives way to the next one (for the last stage: by which the run ends).

        loss: the running loss of the workers' minibatches is at most this. evaluated_loss, accuracy: as last evaluated.
        plateau: so many commits per worker without the running loss falling by 1 %. epochs, commits (per worker) and
        seconds count from the stage's start.
        """
        n, start, scores = self.num_workers, tally.start, scores or {}
        loss, accuracy = scores.get("train_loss"), scores.get("test_accuracy")
        now = {
            "loss": -tally.loss,
            "evaluated_loss": -math.inf if loss is None else -loss,
            "accuracy": -math.inf if accuracy is None else accuracy,
            "plateau": (tally.total_commits - tally.best[1]) / n,
            "epochs": (tally.samples - start["samples"]) / self.epoch_samples,
            "commits": (tally.total_commits - start["commits"]) / n,
            "seconds": now_s - start["seconds"],
        }
        for rule, bound in self.plan.until.items():
            if now[rule] >= (-bound if rule.endswith("loss") else bound):
                return rule
        return None

    def due(self, tally: Tally, now_s: float) -> bool:
        """Whether an evaluation is due at this commit: every so many seconds or commits; if neither, each epoch."""
        limits = self.limits
        seconds, commits, samples = tally.evals
        total = tally.total_commits
        if limits.eval_every_s is not None:
            due = now_s // limits.eval_every_s > seconds // limits.eval_every_s
        elif limits.eval_every_commits is not None:
            due = total // limits.eval_every_commits > commits // limits.eval_every_commits
        else:
            due = tally.samples // self.epoch_samples > samples // self.epoch_samples
        if due:
            tally.evals = [now_s, total, tally.samples]
        return due
