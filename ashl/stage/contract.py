"""The configuration of a stage, and the contracts of sync modes and topologies.

`Rule` and `Topology` are the bases of the options `sync` and `topology`. `StageConfig` binds the
chosen options of one stage. It never changes: the workers that take part are `Members`, and their
work in a round is `Assignments` (`ashl.stage.members`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, NamedTuple

from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import ContentionCosts
from ashl.compression.contract import Codec, Estimator, Keeps, Layout
from ashl.learn.trainer import AnyTrainer
from ashl.option import Contract, Count, Duration
from ashl.outer.contract import Outer
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.none import Serial
from ashl.overlap.timeline import Bucket, untimed_timeline
from ashl.plan.alpha_beta import LARGE, AlphaBeta
from ashl.plan.plan import Limits, StagePlan, WorkerPlan
from ashl.plan.profile import CodecCost, Profile, WorkerProfile
from ashl.planner.assignment import Planner
from ashl.runtime.effects import Epoch, Tag
from ashl.runtime.rank_context import RankContext
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from ashl.stage.fragment import Fragment
from ashl.stage.progress import Progress, StopCriteria

# the coroutine of one rank through one stage; returns its final signal
Loop = Callable[[RankContext, "StageConfig", Any], Coroutine[Any, Any, int]]
Ranks = tuple[int, ...]  # sorted ranks

# capabilities of a topology
Supported = Literal[
    "codec", "weights", "pulls", "statistics", "overlap", "delay", "outer", "fault_tolerant"
]
CODEC: Final = "codec"  # compressed pushes
WEIGHTS: Final = "weights"  # weights of workers
PULLS: Final = "pulls"  # compressed pulls
STATISTICS: Final = "statistics"  # models fitted by statistics instead of gradients
OVERLAP: Final = "overlap"  # gradients that travel in parts
DELAY: Final = "delay"  # work that travels while the next is computed
OUTER: Final = "outer"  # merged updates, on which an outer optimizer may step
FAULT_TOLERANT: Final = "fault_tolerant"  # failing and rejoining workers


class Rule(Contract, group="sync", strict=True):
    """The base of sync modes, as the loops of all topologies ask it. A field of an option may
    replace any of these class variables.
    """

    # content of a push, see `topology.local_work`
    exchange: ClassVar[Literal["gradient", "difference", "accumulated"]] = "difference"
    # True: weights are renormalised over the pushes of a merge; False: over all workers
    averages: ClassVar[bool] = False
    # H, steps between two exchanges; "plan" = as planned, by worker
    local_steps: ClassVar[Count | Literal["plan"]] = 1
    # True: each of a round's n merges steps as far as one merge of BSP
    whole_steps: ClassVar[bool] = False
    # True: synchronous rounds; the last one may be truncated
    in_rounds: ClassVar[bool] = False
    # seconds of the first local work, if time counts instead of H
    interval_s: ClassVar[Duration] = 0.0
    # estimator of the gradient, see `topology.local_work`; None = the codec decides
    estimator: ClassVar[Estimator | None] = None
    # True: batches change, so that weights have to follow the samples
    resizes: ClassVar[bool] = False
    coordinated: ClassVar[bool] = False  # True: a coordinator runs as rank n
    # True: every message holds the optimizer's momentum, too
    momentum_travels: ClassVar[bool] = False
    # specs of further codecs whose encoding a profile times
    codecs: ClassVar[tuple[dict[str, Any], ...]] = ()
    # True: it continues with the moments that Adam has computed in the stage before
    after_adam: ClassVar[bool] = False
    # True: it measures costs by layer group, of large messages and of all-reduces
    per_layer_group: ClassVar[bool] = False
    # capabilities that it uses; None = all of the topology
    supports: ClassVar[frozenset[Supported] | None] = None

    @property
    def needs(self) -> dict[str, str]:
        needs = {"loop": ""}
        if self.resizes:
            needs["sample_weights"] = ""
        if self.momentum_travels:
            needs["momentum"] = ""
        return needs

    def quorum(self, num_workers: int) -> int:
        """Return the number of workers whose pushes make a merge. Raises UsageError if there are
        fewer workers.
        """
        return num_workers

    def step(self, stage: StageConfig, state: Any, update: Any, lr: float) -> tuple[Any, Any, Any]:
        """Return (moments, outer moments, model) after a merge with this sum of updates.

        It is one outer step, or one step of the optimizer if gradients are merged. Moments are None
        if each worker keeps its own. `state` is not changed.
        """
        if self.exchange == "difference":
            return None, *stage.outer.step(state.outer_state, state.params, update, lr)
        exact, place = stage.pipeline.traits.lossless, f"at merge {state.progress.version}"
        moments, params = stage.trainer.apply(state.params, state.moments, update, lr, exact, place)
        return moments, state.outer_state, params

    def sums_whole(self, stage: StageConfig, progress: Progress) -> bool:
        """Return True if the next all-reduce sums updates without the codec."""
        return False

    def loop(self, stage: StageConfig, rank: int) -> Loop | None:
        """Return the sync mode's own loop of this rank, or None to use the topology's."""
        return None


class Topology(Contract, group="topology"):
    """The base of topologies: the mechanism of an exchange, with the loop of each role."""

    # types of sync modes that its loops accept
    policy_type: ClassVar[type[Rule] | tuple[type[Rule], ...]]
    # capabilities beside plain updates; an option that needs another one is not supported
    supports: ClassVar[frozenset[Supported]]
    has_server: ClassVar[bool] = False  # True: rank n is a server that holds the model
    coordinated: ClassVar[bool] = False  # True: a coordinator runs as rank n
    # True: every worker has its own model, and their mean is evaluated
    replicas: ClassVar[bool] = False
    pull_ratio: ClassVar[float | None] = None  # density of pulls
    servers: ClassVar[int] = 1  # number of servers that hold the model together
    # all-reduce algorithm, if one is set, see `ashl.cluster.all_reduce_rounds`
    algorithm: ClassVar[str | None] = None

    @property
    def needs(self) -> dict[str, str]:
        needs = {"shrinking_codec": ""} if self.replicas else {}
        if self.pull_ratio is not None:
            needs |= dict.fromkeys((PULLS, "plain_messages", "pull_codec"), "pull_ratio")
        return needs

    def check(self, sync: Rule, num_workers: int, seed: int) -> None:
        """Raise UsageError if it does not work with so many workers or with this sync mode."""

    def extra_ranks(self, nodes: tuple[int, ...] | None) -> int:
        """Return the number of servers and coordinators beside the workers. `nodes` has the node of
        each worker, if known.
        """
        return int(self.has_server or self.coordinated)

    def server_of(self, stage: StageConfig, rank: int) -> int:
        """Return the server with which this worker exchanges messages."""
        return stage.server

    def links(self, stage: StageConfig, rank: int) -> tuple[int, ...]:
        """Return the ranks with which this rank exchanges messages."""
        raise NotImplementedError

    def links_among(self, stage: StageConfig, rank: int, members: Ranks) -> tuple[int, ...]:
        """Return the ranks with which this rank exchanges messages if only these workers take
        part.
        """
        peers = self.links(stage, rank)
        return tuple(peer for peer in peers if peer in members or peer >= stage.num_workers)

    def groups(self, stage: StageConfig) -> Sequence[Ranks]:
        """Return the groups that are known before the run, for which processes make process
        groups.
        """
        return (stage.workers,) if stage.sync.per_layer_group and stage.num_workers > 1 else ()

    def begin(self, stage: StageConfig, rank: int) -> Any:
        """Return a rank's state before the first stage, with the same initial model on all
        ranks.
        """
        raise NotImplementedError

    @property
    def has_fixed_size(self) -> bool:
        """Return True if it does not exist for every number of workers."""
        return False

    # True: a failure or a rejoin begins a new epoch, see `reform`. False: the loops are notified
    regroups: ClassVar[bool] = False

    async def reform(
        self,
        ctx: RankContext,
        stages: Sequence[StageConfig],
        saved: tuple[int, Any] | None,
        epoch: Epoch,
    ) -> tuple[int, Any]:
        """Bring the members of a new epoch together, before their loops begin again.

        Args: saved: (stage, state) of this rank's last safe point; None for a joining worker.
        Returns: (stage, state) to continue with; a stage beyond the last one if the run is over.
        """
        raise NotImplementedError

    async def join(self, ctx: RankContext, stages: Sequence[StageConfig]) -> tuple[int, Any] | None:
        """Return (stage, state) of a worker that joins while others run, or None if the run is
        over. Topologies that admit workers without a pause define it.
        """
        raise NotImplementedError

    def role(self, stage: StageConfig, rank: int) -> Loop:
        """Return the loop of this rank."""
        raise NotImplementedError


def extra_ranks(topology: Topology, sync: Rule | None, nodes: tuple[int, ...] | None) -> int:
    """Return the number of ranks beside the workers, from rank n on.

    It is 1 with a parameter server or a coordinator (`ashl.topology.coordinator`), more with a tree
    of servers, and 0 otherwise.
    """
    return topology.extra_ranks(nodes) or int(sync is not None and sync.coordinated)


class Segment(NamedTuple):
    """A part of the gradient that backward emits at once: a bucket, or the slices of one."""

    start: int
    stop: int
    ready: float
    needed: float
    buckets: range  # numbers of its buckets


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
# control signal of every reply: continue, next stage, stop the run; LAST = push the remaining work,
# then stop; PAUSE = save a checkpoint, then continue
GO, NEXT, STOP, LAST, PAUSE = range(5)
FAILURE_MESSAGE_BYTES = 2**20  # bytes of a message with counts for a member that is behind
OF_SHARDS = ("full", "statistics")  # estimators that use all samples of a worker


@dataclass(frozen=True)
class StageConfig:
    """The rules of one stage bound together."""

    index: int
    plan: StagePlan
    topology: Any  # a `Topology`
    sync: Any  # a `Rule` of the topology's `policy_type`
    aggregate: Weighted
    outer: Outer
    codec: Codec  # codec of pushes with its wrappers, see `compression.wrappers.compose`
    trainer: AnyTrainer
    limits: Limits
    epoch_samples: int

    following: bool = False  # True if another stage follows
    new_outer: bool = False  # True if the stage before had another outer optimizer
    planner: Planner | None = None
    profile: Profile | None = None  # declared capabilities of the workers
    layout: Layout = ()  # layers of the model
    overlap: Overlap = SERIAL
    layer_groups: tuple[Bucket, ...] = ()  # layer groups of the model, if messages are made of them
    fragments: tuple[Fragment, ...] = ()  # fragments of the model, if each is exchanged separately
    size: int | None = None  # number of exchanged elements, if they are those of a fragment
    # pipeline of each message, if the codec encodes messages separately
    pipelines: tuple[CompressionPipeline, ...] = ()
    # codecs to time: class name, and pipeline of the whole model
    timed_codecs: tuple[tuple[str, CompressionPipeline], ...] = ()
    # rounds between two measurements of compression errors; None = never
    compression_stats_every: int | None = None
    seed: int = 0  # seed of graphs, matchings and partners, which all ranks draw identically
    nodes: tuple[int, ...] | None = None  # node of each worker, if the cluster declares it
    min_workers: int = 1  # the run ends with fewer workers than this
    reshards: bool = False  # True: survivors use the data of failed workers
    keeps_batch: bool = False  # True: survivors' batches add up to those of all workers
    joins: bool = False  # True: workers may join during the run
    elastic: bool = False  # True: the run tolerates failures of workers
    # bytes on the wire / dense bytes, by compression ratio
    payload_fraction: Callable[[float | None], float] = field(default=lambda ratio: 1.0)
    # Plans the remaining stages. Arguments: the measured profile of each worker, the server's
    # seconds per step and bytes per second, all-reduce costs, contention, codec costs.
    replan: Replan | None = None

    @cached_property
    def num_workers(self) -> int:
        return len(self.plan.workers)

    @cached_property
    def pipeline(self) -> CompressionPipeline:
        """Return the compression pipeline of pushes and pulls."""
        size = self.size or (1 + self.sync.momentum_travels) * self.trainer.num_params
        return CompressionPipeline(self.codec, size, device=self.trainer.device)

    @cached_property
    def fragment_stages(self) -> tuple[StageConfig, ...]:
        """Return the configuration of the exchange of each fragment."""
        return tuple(
            replace(
                self,
                fragments=(),
                size=own.size,
                layout=own.layout,
                codec=own.codec,
                outer=own.outer,
            )
            for own in self.fragments
        )

    @property
    def max_message_bytes(self) -> int:
        """Return an upper bound on the bytes of a message."""
        return max(
            self.pipeline.max_message_bytes,
            LARGE[-1] if self.sync.per_layer_group else 0,
            FAILURE_MESSAGE_BYTES if self.elastic else 0,
        )

    @property
    def server(self) -> int:
        return self.num_workers

    @cached_property
    def lead_rank(self) -> int:
        """Return the rank that counts progress until a failure, decides when the run ends, and
        emits snapshots.
        """
        return self.lead_of(self.workers)

    def lead_of(self, members: Sequence[int]) -> int:
        """Return the lead rank of these members: the server or coordinator, else the first one."""
        return self.server if extra_ranks(self.topology, self.sync, self.nodes) else members[0]

    @property
    def replicas(self) -> bool:
        """Return True if every worker has its own model, and their mean is evaluated."""
        return self.topology.replicas

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of a gradient that is sent in parts, as `overlap` plans them.

        Return none if one bucket holds the whole gradient, unless a server, a codec per bucket or
        the next forward pass needs it.
        """
        if self.overlap.serial or not self.layer_groups:
            return ()
        found = tuple(self.overlap.plan_buckets(untimed_timeline(self.layer_groups)))
        needed = self.pipelines or self.topology.has_server or found[0].needed < 1
        return found if len(found) > 1 or needed else ()

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the parts of a gradient that backward emits, in that order, with their buckets."""
        found = list[Segment]()
        for k, bucket in enumerate(self.buckets):
            own = Segment(bucket.start, bucket.stop, bucket.ready, bucket.needed, range(k, k + 1))
            # slices of a layer group are in ascending order, layer groups in descending order
            if found and bucket.start == found[-1].stop:
                last = found.pop()
                own = last._replace(stop=bucket.stop, buckets=range(last.buckets.start, k + 1))
            found.append(own)
        return tuple(found)

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """Return the elements [start, stop) of each segment."""
        return [(segment.start, segment.stop) for segment in self.segments]

    @cached_property
    def ready_segments(self) -> tuple[tuple[float, Tag], ...]:
        """Return when each segment is ready, as parts of a computation: share of the step,
        and tag.
        """
        return tuple(
            (segment.ready, self.tag("part", k)) for k, segment in enumerate(self.segments)
        )

    @cached_property
    def needed_segments(self) -> tuple[tuple[float, Tag], ...]:
        """Return when forward needs each segment of the model, as needs of a computation, in the
        order of the forward pass.
        """
        return tuple(
            (segment.needed, self.tag("group", k))
            for k, segment in reversed([*enumerate(self.segments)])
        )

    @cached_property
    def overlaps_next_forward(self) -> bool:
        """Return True if buckets of the model arrive during the next forward pass."""
        return bool(self.buckets) and self.buckets[0].needed < 1

    @cached_property
    def merges_buckets(self) -> bool:
        """Return True if a server merges each bucket by itself."""
        return self.topology.has_server and bool(self.buckets) and self.buckets[0].merged_alone

    @cached_property
    def push_share(self) -> float:
        """Return the work of merging one shard or one part at a server, as a share of a
        whole push.
        """
        if self.overlap.fragments:
            return self.pipeline.d / self.trainer.num_params
        return 1 / self.topology.servers

    @property
    def computes_during_collectives(self) -> bool:
        """Return True if its workers compute while a collective of theirs is in flight."""
        return computes_during_collectives(self.sync, self.topology, self.overlap)

    @cached_property
    def delayed_overlap(self) -> Delayed | None:
        """Return the delayed overlap, or None with another one."""
        return self.overlap if isinstance(self.overlap, Delayed) else None

    @cached_property
    def stop_criteria(self) -> StopCriteria:
        return StopCriteria(self.limits, self.plan.until, self.epoch_samples)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Return the ranks of all workers, failed ones included."""
        return tuple(range(self.num_workers))

    @property
    def resets_momentum(self) -> bool:
        """Return True if momentum starts from zero instead of being transferred from the stage
        before.
        """
        return self.index > 0 and self.plan.handover.get("momentum") == "reset"

    def carry_over_codec_state(self, codec_state: CodecState, samples: int) -> CodecState:
        """Return the codec state of a rank that enters this stage after `samples` applied
        samples.
        """
        keeps = Keeps(self.plan.handover.get("residual") != "drop", not self.resets_momentum)
        return self.pipeline.carry_over(
            codec_state, keeps, self.sync.exchange != "difference", self.trainer.rate(samples)
        )

    @property
    def resets_outer_momentum(self) -> bool:
        """Return True if the outer optimizer's momentum starts from zero, too; another outer
        optimizer could not use it.
        """
        return self.resets_momentum or self.new_outer

    @cached_property
    def quorum(self) -> int:
        """Return the number of workers whose pushes make a merge."""
        return self.sync.quorum(self.num_workers)

    def quorum_of(self, present: int) -> int:
        """Return the quorum with `present` workers; a synchronous round waits for no more than
        these.
        """
        return min(self.quorum, present) if self.sync.in_rounds else self.quorum

    def worker(self, rank: int) -> WorkerPlan:
        return self.plan.workers[rank]

    @cached_property
    def estimator(self) -> str:
        """Return the estimator of the gradient that workers exchange, see `topology.local_work`."""
        if self.trainer.statistics:
            return "statistics"
        return self.sync.estimator or self.codec.estimator

    def samples_of(self, rank: int) -> int:
        """Return the samples of one gradient: a minibatch, or all samples of the worker."""
        return (
            self.trainer.shard_size(rank)
            if self.estimator in OF_SHARDS
            else self.worker(rank).batch
        )

    def tag(self, name: str, iteration: int = 0) -> Tag:
        return (name, self.index, iteration)


def computes_during_collectives(sync: Rule, topology: Topology, overlap: Overlap) -> bool:
    """Return True if the workers of such a stage compute while a collective is in flight."""
    return sync.per_layer_group or not (topology.has_server or isinstance(overlap, Serial))
