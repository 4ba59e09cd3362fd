"""A stage while it runs: the rules of a plan bound to its workers, and the contracts of sync modes
and topologies.

`Rule` and `Topology` are the bases of the options `sync` and `topology`. `Stage` is frozen. Methods
that begin with `with_`, and `restricted_to`, `truncate_last_round` and `fragment`, return another
stage for a round, a set of survivors or a part of the model. `once` caches what all ranks of a
simulation look up of the same stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from ashl.aggregate.weighted import Push, Weighted
from ashl.cluster.spec import ContentionCosts
from ashl.compression.contract import Codec, Estimator, Keeps, Layout
from ashl.learn.trainer import AnyTrainer
from ashl.option import Contract, Count, Duration
from ashl.outer.contract import Outer
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.none import Serial
from ashl.overlap.timeline import Bucket, merge_buckets, untimed_timeline
from ashl.plan.alpha_beta import LARGE, AlphaBeta
from ashl.plan.plan import Limits, StagePlan, WorkerPlan, assigned
from ashl.plan.profile import CodecCost, Profile, WorkerProfile
from ashl.planner.assignment import Assignment, Planner
from ashl.runtime.effects import Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.stage.fragment import Fragment
from ashl.stage.progress import Progress
from ashl.stage.stopping import StopCriteria

Loop = Callable[
    [RankContext, "Stage", Any], Coroutine[Any, Any, int]
]  # of one rank through one stage; its last word
Members = tuple[int, ...]  # sorted ranks

CODEC, WEIGHTS, PULLS, STATISTICS = (
    "codec",
    "weights",
    "pulls",
    "statistics",
)  # what a topology may carry
OVERLAP, DELAY = (
    "overlap",
    "delay",
)  # whether a gradient may travel in parts, and work while the next is computed
OUTER = "outer"  # ... and whether it merges updates, so that an outer optimizer may step on them
# ... and whether it goes on without a worker that is lost, and with one that comes
FAULT_TOLERANT = "fault_tolerant"
CAPABILITIES = frozenset({CODEC, WEIGHTS, PULLS, STATISTICS, OUTER, OVERLAP, DELAY, FAULT_TOLERANT})


class Network(Protocol):
    """What transfers cost, uncontended, in nanoseconds."""

    def transfer_ns(self, src: int, dst: int, nbytes: int) -> int: ...

    def all_reduce_ns(self, group: Members, nbytes: int, now_ns: int) -> int: ...

    def all_gather_ns(self, group: Members, total: int, now_ns: int) -> int: ...


class Rule(Contract, group="sync", strict=True):
    """What every sync mode says, whichever loop asks it. A field of the option may stand in for any
    of these.
    """

    # what travels, see `topology.local_work`
    exchange: ClassVar[Literal["gradient", "difference", "accumulated"]] = "difference"
    averages: ClassVar[bool] = (
        False  # whether weights are renormalised over a merge, not over all workers
    )
    local_steps: ClassVar[Count | Literal["plan"]] = (
        1  # H between two exchanges; "plan" = the plan's, by worker
    )
    whole_steps: ClassVar[bool] = (
        False  # whether each of a round's n merges steps as far as one of BSP
    )
    in_rounds: ClassVar[bool] = (
        False  # whether nobody goes on before all have, so that the last round may be cut short
    )
    interval_s: ClassVar[Duration] = (
        0.0  # seconds of the first local work, where seconds count instead of H
    )
    estimator: ClassVar[Estimator | None] = (
        None  # of the gradient, see `topology.estimate`; None = the codec says
    )
    resizes: ClassVar[bool] = (
        False  # whether batches change, so that weights have to follow the samples
    )
    coordinated: ClassVar[bool] = False  # whether a coordinator takes part as rank n
    momentum_travels: ClassVar[bool] = (
        False  # whether the optimizer's momentum goes along in every message
    )
    codecs: ClassVar[
        tuple[dict[str, Any], ...]
    ] = ()  # whose encoding is timed then, beside the chosen one's, as specs
    after_adam: ClassVar[bool] = (
        False  # whether it goes on with the moments that Adam has left in the stage before
    )
    per_layer_group: ClassVar[bool] = (
        False  # whether costs are measured by layer group, and of large messages and of sums
    )
    supports: ClassVar[frozenset[str] | None] = None  # None = what the topology supports

    def quorum(self, num_workers: int) -> int:
        """How many workers' work makes a merge. Raises UsageError where there are not so many."""
        return num_workers

    def step(self, stage: Stage, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        """(moments, outer moments, model) after a merge of this sum: one outer step, or one of the
        optimizer where gradients are merged. Moments are None where each worker keeps its own.
        `state` stays as it is.
        """
        if self.exchange == "difference":
            return None, *stage.outer.step(state.outer_state, state.params, update, lr)
        exact, place = stage.link.traits.lossless, f"at merge {state.version}"
        moments, params = stage.trainer.apply(state.params, state.moments, update, lr, exact, place)
        return moments, state.outer_state, params

    def sums_whole(self, stage: Stage, progress: Progress) -> bool:
        """Whether the next sum over all workers is of updates as they are, whatever the codec."""
        return False

    def loop(self, stage: Stage, rank: int) -> Loop | None:
        """The loop of this rank, where the topology's does not serve."""
        return None

    def links(self, stage: Stage, rank: int) -> Members:
        """The ranks that such a loop exchanges messages with, beyond the topology's."""
        return ()


class Topology(Contract, group="topology"):
    """How models meet: the mechanism of an exchange, with the loop of each role."""

    policy_type: ClassVar[type[Rule] | tuple[type[Rule], ...]]  # the rules that its loops ask
    supports: ClassVar[
        frozenset[str]
    ]  # what travels beside plain updates; what it lacks is refused
    has_server: ClassVar[bool] = False  # whether rank n holds the model
    coordinated: ClassVar[bool] = False  # whether a coordinator takes part as rank n
    replicas: ClassVar[bool] = (
        False  # whether every worker has a model of its own, so that their mean is evaluated
    )
    pull_ratio: ClassVar[float | None] = None  # density of what a pull changes
    servers: ClassVar[int] = 1  # that hold the model together, where there are servers
    algorithm: ClassVar[str | None] = (
        None  # of its sums, where one is asked for, see `ashl.cluster.all_reduce_rounds`
    )

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        """Raises UsageError where it is wrong for so many workers or for this sync mode."""

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        """How many servers and coordinators take part beside the workers, with the machine of each
        worker where it is known.
        """
        return int(self.has_server or self.coordinated)

    def server_of(self, stage: Stage, rank: int) -> int:
        """The server that this worker talks to, where there is one."""
        return stage.server

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The ranks that this one exchanges messages with."""
        raise NotImplementedError

    def notified_on_failure(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """The ranks that have to know when this one is gone."""
        return self.links(stage, rank)

    def groups(self, stage: Stage) -> Sequence[Members]:
        """Groups that are known before the run, so that processes can set them up."""
        return (stage.workers,) if stage.sync.per_layer_group and stage.num_workers > 1 else ()

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What an exchange takes, uncontended."""
        raise NotImplementedError

    def begin(self, ctx: RankContext, stage: Stage) -> Any:
        """A rank's state before the first stage: the initial model, alike everywhere."""
        raise NotImplementedError

    async def join(
        self, ctx: RankContext, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        """A worker comes while the others run: the stage that they are in, and its state there;
        None where the run is over. For topologies that carry churn. From a checkpoint, where all
        come anew, with (stage, state) of this rank as they were kept; a server has them gather.
        """
        raise NotImplementedError

    def role(self, stage: Stage, rank: int) -> Loop:
        """The loop of this rank."""
        raise NotImplementedError


def extra_ranks(topology: Topology, sync: Rule | None, nodes: tuple[int, ...] | None) -> int:
    """How many take part beside the workers, from rank n on: 1 where there is a parameter server or
    a coordinator (`ashl.topology.coordinator`), more where servers are a tree; else 0.
    """
    return topology.extra_ranks(nodes) or int(sync is not None and sync.coordinated)


T = TypeVar("T")
Replan = Callable[
    [
        tuple[WorkerProfile, ...],
        float,
        float | None,
        AlphaBeta | None,
        ContentionCosts | None,
        tuple[CodecCost, ...],
    ],
    tuple[Profile, list[StagePlan]],
]
SERIAL = Serial()
GO, NEXT, STOP, LAST = (
    0,
    1,
    2,
    3,
)  # the word that every reply carries; LAST: hand in what you have, and no more
WORDS = 2**20  # bytes of what workers may tell each other of those who are lost
FEW = 8  # stages that hold shards of their own
OF_SHARDS = ("full", "statistics")  # estimators that are of all samples of a worker


@dataclass(frozen=True)
class Stage:
    """The rules of one stage bound together."""

    index: int
    plan: StagePlan
    topology: Topology
    sync: Rule
    aggregate: Weighted
    outer: Outer
    codec: Codec  # of a worker's link, see `compression.wrappers.compose`
    trainer: AnyTrainer
    limits: Limits
    epoch_samples: int
    following: bool = False  # whether another stage comes after this one
    new_outer: bool = False  # whether the stage before had another outer optimizer
    planner: Planner | None = None
    profile: Profile | None = None  # what the configuration declares of the workers
    layout: Layout = ()  # the model's layers
    overlap: Overlap = SERIAL
    parts: tuple[Bucket, ...] = ()  # its layer groups, where messages are made of them
    fragments: tuple[Fragment, ...] = ()  # of the model, where each is exchanged by itself
    size: int | None = None  # elements that are exchanged, where they are those of a fragment
    links: tuple[
        CompressionPipeline, ...
    ] = ()  # of each such message, where a codec works in it by itself
    timed: tuple[
        tuple[str, CompressionPipeline], ...
    ] = ()  # codecs whose cost is measured: class, and link of the whole model
    compression_stats_every: int | None = None  # rounds between two looks at what compression loses
    compression_stats_per_layer: bool = False
    compression_stats_vs_mean: bool = False
    seed: int = 0  # of what all ranks draw alike: graphs, matchings, whom to meet
    nodes: tuple[int, ...] | None = None  # the machine of each worker, where the cluster says
    answer_block: int = (
        1  # workers that several servers answer while one worker takes in all its pieces
    )
    min_workers: int = 1  # of fewer, no run goes on
    reshards: bool = False  # whether the data of those who are gone are with the others meanwhile
    joins: bool = False  # whether workers may come while it goes on
    elastic: bool = False  # whether it goes on without a worker that is lost
    gone: frozenset[int] = frozenset()  # who takes no part any more, where no server counts
    payload: Callable[[float | None], float] = field(
        default=lambda ratio: 1.0
    )  # bytes on the wire / dense bytes
    # from what was measured: of the workers, the server's seconds of a step and bytes per second,
    # sums, and all else
    replan: Replan | None = None

    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, fn: Callable[[Stage], T], key: Hashable = None) -> T:
        """What all ranks look up of this stage: fn(stage), computed for the first that asks. A
        function that is made anew for each of them has a `key` in common.
        """
        key = key or fn
        if key not in self._cache:
            self._cache[key] = fn(self)
        return self._cache[key]

    @property
    def num_workers(self) -> int:
        return len(self.plan.workers)

    @cached_property
    def link(self) -> CompressionPipeline:
        """How updates travel, and pulls."""
        size = self.size or (1 + self.sync.momentum_travels) * self.trainer.num_params
        return CompressionPipeline(self.codec, size, device=self.trainer.device)

    def fragment(self, k: int) -> Stage:
        """The stage as it is for one fragment of the model alone."""
        own = self.fragments[k]
        its = {"size": own.size, "layout": own.layout, "codec": own.codec, "outer": own.outer}
        return self.cached(
            lambda whole: replace(whole, fragments=(), compression_stats_vs_mean=False, **its),
            ("fragment", k),
        )

    @property
    def most_bytes(self) -> int:
        """Bytes that no message exceeds."""
        return max(
            self.link.most_bytes,
            LARGE[-1] if self.sync.per_layer_group else 0,
            WORDS if self.elastic else 0,
        )

    @property
    def server(self) -> int:
        return self.num_workers

    @property
    def lead_rank(self) -> int:
        """The rank that judges, counts and hands out snapshots."""
        return self.server if extra_ranks(self.topology, self.sync, self.nodes) else self.workers[0]

    @property
    def replicas(self) -> bool:
        """Whether every worker has a model of its own, so that their mean is what is evaluated."""
        return self.topology.replicas

    @cached_property
    def messages(self) -> tuple[Bucket, ...]:
        """What each message of a gradient holds that travels in parts, in the order in which they
        are ready. One alone that is to be summed as it is goes as without overlap.
        """
        if self.overlap.serial or not self.parts:
            return ()
        found = merge_buckets(self.parts, self.overlap.messages(untimed_timeline(self.parts)))
        whole = len(found) == 1 and not (
            self.overlap.overlaps_next_forward or self.links or self.topology.has_server
        )
        return () if whole else found

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The elements [start, stop) of each."""
        return [(message.start, message.stop) for message in self.messages]

    @cached_property
    def ready(self) -> tuple[tuple[float, Tag], ...]:
        """When each is there, as the parts of a computation: the share of the step, and the tag."""
        return tuple(
            (message.ready, self.tag("part", k)) for k, message in enumerate(self.messages)
        )

    @cached_property
    def push_share(self) -> float:
        """Of the work of a whole push, what merging one takes a server of a piece of the model, or
        that of a part.
        """
        if self.overlap.by_slice or self.overlap.fragments:
            return self.link.d / self.trainer.num_params
        return 1 / self.topology.servers

    @cached_property
    def by_priority(self) -> bool:
        """Whether a server merges slice by slice while the next forward pass goes on."""
        return (
            self.topology.has_server
            and self.overlap.overlaps_next_forward
            and not self.overlap.pulls
        )

    @property
    def sums_beside(self) -> bool:
        """Whether its workers compute while something of theirs is summed."""
        return sums_beside(self.sync, self.topology, self.overlap)

    @cached_property
    def delayed(self) -> Delayed | None:
        """How it computes while it exchanges, where it does."""
        return self.overlap if isinstance(self.overlap, Delayed) else None

    @cached_property
    def stop_criteria(self) -> StopCriteria:
        return StopCriteria(self.limits, self.plan.until, self.epoch_samples)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.num_workers) if rank not in self.gone)

    @property
    def resets(self) -> bool:
        """Whether momentum starts from zero here, instead of being handed over by the
        stage before.
        """
        return self.index > 0 and self.plan.handover.get("momentum") == "reset"

    def carry_over_codec_state(self, ends: CodecState, samples: int) -> CodecState:
        """What the codec keeps at a rank that enters this stage once so many samples are
        applied.
        """
        keeps = Keeps(self.plan.handover.get("residual") != "drop", not self.resets)
        return self.link.carry_over(
            ends, keeps, self.sync.exchange != "difference", self.trainer.rate(samples)
        )

    def restore_codec_state(self, ends: CodecState, samples: int) -> CodecState:
        """The same of what it kept in this stage, from a checkpoint: nothing of it is dropped."""
        return self.link.carry_over(
            ends, Keeps(True, True), self.sync.exchange != "difference", self.trainer.rate(samples)
        )

    @property
    def resets_outer(self) -> bool:
        """... and the outer optimizer's, which no other one could take over."""
        return self.resets or self.new_outer

    @cached_property
    def quorum(self) -> int:
        """How many workers' work makes a merge."""
        return self.sync.quorum(self.num_workers)

    def quorum_of(self, present: int) -> int:
        """The same of those who are there now: a round waits for no more of them."""
        return min(self.quorum, present) if self.sync.in_rounds else self.quorum

    @cached_property
    def round_steps(self) -> tuple[int, ...]:
        """Steps of each worker between two merges, where H does not change."""
        return tuple(
            1 if self.sync.exchange == "gradient" else w.local_steps for w in self.plan.workers
        )

    @cached_property
    def round_samples(self) -> tuple[int, ...]:
        """... and the samples in them."""
        return tuple(steps * self.samples_of(rank) for rank, steps in enumerate(self.round_steps))

    @cached_property
    def round_totals(self) -> tuple[int, int]:
        """Steps and samples of all workers together."""
        here = self.workers
        return sum(self.round_steps[rank] for rank in here), sum(
            self.round_samples[rank] for rank in here
        )

    def count_merge(self, progress: Progress, mean_loss: float, staleness: int = 0) -> Progress:
        """The counts with one more merge of everybody's work; where it diverged, with that
        alone.
        """
        progress = progress.copy()
        progress.observe_all(staleness, mean_loss, "the workers' mean loss")
        if not progress.diverged:
            progress.commit_all(self.round_steps, self.round_totals[1])
            progress.merge()
        return progress

    def remaining_rounds(
        self, steps: int, samples: int, ahead: int = 0, gone: Collection[int] = ()
    ) -> tuple[int, int] | None:
        """(a, b): after so many steps and samples and `ahead` rounds, a/b rounds are left to the
        count that ends the run; None where no count does, or where workers do not go round by
        round. Of those who are gone no round has any.
        """
        asked = steps, samples, ahead, tuple(gone)
        last = self._cache.get("rest")  # in a round all workers ask the same
        if last is None or last[0] != asked:
            self._cache["rest"] = last = asked, self._compute_remaining_rounds(*asked)
        return last[1]

    def _compute_remaining_rounds(
        self, steps: int, samples: int, ahead: int, gone: tuple[int, ...]
    ) -> tuple[int, int] | None:
        if not self.sync.in_rounds:
            return None
        (steps_of_all, samples_of_all), n = self.round_totals, len(self.workers) - len(gone)
        for rank in gone:
            steps_of_all -= self.round_steps[rank]
            samples_of_all -= self.round_samples[rank]
        quorum = self.quorum_of(n)
        merged = (steps_of_all * quorum // n, samples_of_all * quorum // n)
        left = self.stop_criteria.remaining_rounds(steps, samples, merged)
        return left and (left[0] - ahead * left[1], left[1])

    def cap_local_steps(self, local_steps: int, rank: int, rest: tuple[int, int] | None) -> int:
        """How many of these steps a worker takes in the next round. Where a round would go past the
        count that ends the run, each takes its part of what is left, rounded up: the count is
        passed by less than a step of each.
        """
        if rest is None:
            return local_steps
        left, whole = rest
        return min(local_steps, max(1, -(-self.round_steps[rank] * left // whole)))

    def truncate_last_round(self, rest: tuple[int, int] | None) -> Stage:
        """The stage as it is in a round of which no more than that is left."""
        if rest is None or rest[0] >= rest[1]:
            return self
        return self.cached(
            lambda whole: whole.with_steps_by_worker(
                lambda rank, planned: whole.cap_local_steps(planned, rank, rest)
            ),
            rest,
        )

    def with_local_steps(self, steps: int) -> Stage:
        """The stage with so many steps of every worker in a round."""
        return self.cached(
            lambda whole: whole.with_steps_by_worker(lambda rank, planned: steps), ("taking", steps)
        )

    def with_steps_by_worker(self, steps: Callable[[int, int], int]) -> Stage:
        """... with so many of each, by its rank and by what was planned."""
        workers = enumerate(self.plan.workers)
        return self.with_assignments(
            tuple(replace(own, local_steps=steps(rank, own.local_steps)) for rank, own in workers)
        )

    def with_batches(self, batches: tuple[int, ...]) -> Stage:
        """... with so large batches of each."""
        workers = zip(self.plan.workers, batches, strict=True)
        made = tuple(replace(own, batch=batch) for own, batch in workers)
        return self if made == self.plan.workers else self.with_assignments(made)

    def restricted_to(self, gone: Collection[int]) -> Stage:
        """The stage without these workers, Σ w_i = 1 over the others."""
        gone = frozenset(gone)
        if gone == self.gone:
            return self
        whole: Stage = self._cache.setdefault("whole", self)
        if gone not in whole._cache:
            made = replace(whole.with_redistributed_shards(gone), gone=gone)
            made._cache["whole"] = whole
            remember(whole._cache, gone, made)
        return whole._cache[gone]

    def with_redistributed_shards(self, gone: Collection[int]) -> Stage:
        """The stage while these workers are away: where it `reshards`, with their data at the
        others.
        """
        if not (self.reshards and gone):
            return self
        key = "handed", frozenset(gone)
        if key not in self._cache:
            shares = [worker.data_share for worker in self.plan.workers]
            part = sum(shares[rank] for rank in gone) / max(1, self.num_workers - len(gone))
            workers = tuple(
                worker if rank in gone else replace(worker, data_share=shares[rank] + part)
                for rank, worker in enumerate(self.plan.workers)
            )
            plan = replace(self.plan, workers=workers)
            made = replace(self, plan=plan, trainer=self.trainer.handed(frozenset(gone)))
            remember(self._cache, key, made)
        return self._cache[key]

    def with_assignments(self, workers: tuple[WorkerPlan, ...]) -> Stage:
        """The stage with its workers doing something else from now on; their shards stay as they
        are.
        """
        if workers is self.plan.workers:
            return self
        last: Stage | None = self._cache.get("doing")
        if last is None or last.plan.workers is not workers:
            self._cache["doing"] = last = replace(self, plan=replace(self.plan, workers=workers))
        return last

    def with_replanned_shards(self, rows: Sequence[Assignment]) -> Stage:
        """The stage as planned during the run, with everybody's shard as planned."""
        workers = assigned(self.plan.workers, rows)
        trainer = self.trainer.reshard([w.data_share for w in workers])
        return replace(self, plan=replace(self.plan, workers=workers), trainer=trainer)

    def worker(self, rank: int) -> WorkerPlan:
        return self.plan.workers[rank]

    @cached_property
    def team_weights(self) -> list[float]:
        """scale · w_i of all workers that take part."""
        return self._normalise_weights([self._sized[rank] for rank in self.workers])

    @cached_property
    def estimator(self) -> str:
        """Which gradient the workers exchange, see `topology.estimate`."""
        if self.trainer.statistics:
            return "statistics"
        return self.sync.estimator or self.codec.estimator

    def samples_of(self, rank: int) -> int:
        """The samples of one gradient: those of a minibatch, or all that the worker has."""
        return (
            self.trainer.shard_size(rank)
            if self.estimator in OF_SHARDS
            else self.worker(rank).batch
        )

    @cached_property
    def _sized(self) -> tuple[WorkerPlan, ...]:
        """The workers with the samples that they compute at once."""
        if self.estimator not in OF_SHARDS:
            return self.plan.workers
        return tuple(
            replace(worker, batch=self.samples_of(rank))
            for rank, worker in enumerate(self.plan.workers)
        )

    def _normalise_weights(self, workers: Sequence[WorkerPlan]) -> list[float]:
        weights = self.aggregate.weigh(workers)
        total = sum(weights) if self.aggregate.normalised else 1.0
        return [self.aggregate.scale * weight / total for weight in weights]

    def weights(self, members: Sequence[int]) -> list[float]:
        """What each member's body is multiplied with: scale · w_i with Σ w_i = 1, over all workers
        or, where the sync mode averages, over the pushes of the merge; a worker may have several of
        them.
        """
        if self.sync.averages:
            return self._normalise_weights([self._sized[member] for member in members])
        return [self.team_weights[member] for member in members]

    def weights_of(self, pushes: Sequence[Push], gone: Collection[int] = ()) -> list[float]:
        """The same by what each push holds, where the sync mode averages: it need not be as
        planned. Else Σ w_i = 1 over the workers that are not gone.
        """
        if not self.sync.averages:
            if not gone:
                return [self.team_weights[push.worker] for push in pushes]
            present = [rank for rank in self.workers if rank not in gone]
            weights = dict(
                zip(
                    present,
                    self._normalise_weights([self._sized[rank] for rank in present]),
                    strict=True,
                )
            )
            return [weights[push.worker] for push in pushes]
        return self._normalise_weights(
            [as_executed(self.plan.workers[push.worker], push) for push in pushes]
        )

    def tag(self, name: str, iteration: int = 0) -> Tag:
        return (name, self.index, iteration)


def sums_beside(sync: Rule, topology: Topology, overlap: Overlap) -> bool:
    """Whether the workers of such a stage compute while something of theirs is summed."""
    return sync.per_layer_group or not (topology.has_server or isinstance(overlap, Serial))


def as_executed(worker: WorkerPlan, push: Push) -> WorkerPlan:
    """A worker as it was in this push, mostly as planned."""
    steps, batch = push.steps, push.samples // push.steps
    as_planned = worker.local_steps == steps and worker.batch == batch
    return worker if as_planned else replace(worker, local_steps=steps, batch=batch)


def remember(once: dict[Any, Any], key: Any, stage: Stage) -> None:
    """Of stages with shards of their own the last few are enough."""
    alike = [other for other in once if type(other) is type(key)] if stage.reshards else []
    for other in alike[:-FEW]:
        del once[other]
    once[key] = stage
