"""Instantiate a plan: construct its options, and bind its stages to workers and trainers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import Cluster, ContentionCosts
from ashl.compression.contract import Codec, Layer, Layout, selected_count, size_of
from ashl.compression.wrappers import wrap_codec
from ashl.config.construct import Plain, construct
from ashl.data.batches import Batches
from ashl.data.dataset import Data
from ashl.data.partition import make_shards
from ashl.data.plain import plain_dataset
from ashl.device import HOST
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.learn.making import load_data
from ashl.learn.trainer import AnyTrainer, SizeOnlyTrainer, Trainer
from ashl.model.plain import plain_model
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.plain import plain_optimizer
from ashl.optimizer.schedule import with_horizon
from ashl.outer.average import Average
from ashl.outer.contract import Outer
from ashl.overlap.contract import Delayed, Overlap
from ashl.overlap.timeline import Bucket, buckets_of_tensors, untimed_timeline
from ashl.plan.alpha_beta import AlphaBeta
from ashl.plan.declared_costs import profile_of_declared_costs
from ashl.plan.plan import Plan, Spec, StagePlan
from ashl.plan.profile import SCHEMA as PROFILE_SCHEMA
from ashl.plan.profile import CodecCost, Profile, WorkerProfile
from ashl.planner.assignment import Planner
from ashl.planner.hidden import Hidden
from ashl.planning.settings import STAGE_GROUPS
from ashl.schedule.choices import with_assignments
from ashl.stage.compression_pipeline import CompressionPipeline
from ashl.stage.contract import Rule, StageConfig, Topology
from ashl.stage.fragment import Fragment
from ashl.task.contract import Task
from ashl.task.plain import plain_task
from ashl.topology.sharded_server import ShardedServer

# group → adapter that makes an option from a class or function of plain torch
PLAIN: dict[str, Plain] = {
    "model": plain_model,
    "dataset": plain_dataset,
    "optimizer": plain_optimizer,
    "task": plain_task,
}

Deal = Callable[[Sequence[float]], list[np.ndarray]]  # data shares → sample numbers by worker


class OptionFactory:
    """Constructs options from specs; equal specs share one option, because options are
    immutable.
    """

    def __init__(self, allow: Sequence[str]) -> None:
        self.allow = allow
        self._made: dict[tuple[str, str], Any] = {}

    def get_option(self, group: str, spec: Mapping[str, Any]) -> Any:
        """Return the option of a spec. Raises: UsageError."""
        key = (group, repr(spec))  # `repr` because 1 == True
        if key not in self._made:
            self._made[key] = construct(spec, group, self.allow, PLAIN.get(group))
        return self._made[key]


@dataclass(frozen=True)
class StageParts:
    """The options of one stage."""

    sync: Rule
    topology: Topology
    aggregate: Weighted
    outer: Outer
    compression: Codec
    overlap: Overlap
    optimizer: Optimizer


@dataclass(frozen=True)
class Parts:
    """All options of a plan, constructed once and passed to every user of the plan."""

    model: Any
    dataset: Any
    task: Task
    cluster: Any
    runtime: Any
    planner: Planner
    stages: tuple[StageParts, ...]


def parts_of(plan: Plan, options: OptionFactory | None = None) -> Parts:
    """Return all options of a plan; `options` may hold some that are constructed already.

    Raises: UsageError.
    """
    options = options or OptionFactory(plan.allow_targets)
    return Parts(
        model=options.get_option("model", plan.model),
        dataset=options.get_option("dataset", plan.dataset),
        task=options.get_option("task", plan.task),
        cluster=options.get_option("cluster", plan.cluster),
        runtime=options.get_option("runtime", plan.runtime),
        planner=options.get_option("planner", plan.planner),
        stages=tuple(stage_parts(stage, options) for stage in plan.stages),
    )


def stage_parts(stage: StagePlan, options: OptionFactory) -> StageParts:
    """Return the options of one stage. Raises: UsageError, naming the stage."""
    specs: dict[str, Spec] = {group: getattr(stage, group) for group in STAGE_GROUPS}
    try:
        return StageParts(
            **{group: options.get_option(group, spec) for group, spec in specs.items()}
        )
    except UsageError as error:
        raise UsageError(f"stage {stage.name}: {error}") from error


@dataclass(frozen=True)
class Job:
    """The objects of a plan in one process."""

    parts: Parts
    data: Data
    learner: Learner
    stages: tuple[StageConfig, ...]

    @property
    def has_server(self) -> bool:
        """Return True if a server holds the model. All stages have the same topology."""
        return self.stages[0].topology.has_server


def declared_profile(cluster: Any, model: str, num_params: int, batch: int) -> Profile | None:
    """Return the profile of a cluster's declared costs; None if a cost is not declared."""
    if not isinstance(cluster, Cluster) or cluster.missing_costs():
        return None
    return profile_of_declared_costs(cluster, model, num_params, batch)


def layout_of(layers: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return a plan's layers in the form that codecs use."""
    return tuple(Layer(*layer) for layer in layers)


def layer_groups(plan: Plan) -> tuple[Bucket, ...]:
    """Return the model's layer groups, of which messages are made.

    They are ready at the measured moments if the plan has these, else at moments estimated from the
    work of their tensors.
    """
    parts = buckets_of_tensors([shape for _, shape in plan.layers], plan.work)
    if not plan.shares:
        return parts
    measured = zip(parts, plan.shares, plan.needed or (0.0,) * len(parts), strict=True)
    return tuple(part._replace(ready=at, needed=needed) for part, at, needed in measured)


def pipelines_of(
    plan: Plan, own: StageParts, device: str = HOST
) -> tuple[CompressionPipeline, ...]:
    """Return the compression pipelines of a stage's messages; empty if no codec works on single
    messages.
    """
    if not own.overlap.compresses or own.compression.traits.lossless:
        return ()
    link = partial(link_of, own.compression, layout_of(plan.layers), device=device)
    return tuple(link(bucket.start, bucket.stop) for bucket in buckets_of(plan, own.overlap))


def buckets_of(plan: Plan, overlap: Overlap) -> list[Bucket]:
    """Return the buckets of the model, as planned."""
    return overlap.plan_buckets(untimed_timeline(layer_groups(plan)))


def outer_of(own: StageParts, trainer: AnyTrainer, layout: Layout) -> Outer:
    """Return the outer optimizer of these layers; a run without values has none."""
    if isinstance(trainer, SizeOnlyTrainer):
        return Average()
    return own.outer.for_layers([(layer.name, layer.shape) for layer in layout])


def fragments_of(plan: Plan, own: StageParts, trainer: AnyTrainer) -> tuple[Fragment, ...]:
    """Return the fragments of the model that are exchanged one by one.

    Fragment k of P has its share of the layer groups (`balanced`), or the shard of server k. A
    fragment of random elements has no layers.
    """
    layout, cuts = layout_of(plan.layers), list[Sequence[tuple[int, int]]]()
    for bucket in buckets_of(plan, own.overlap) if isinstance(own.overlap, Delayed) else []:
        if bucket.share is not None:
            elements = (Layer("elements", (selected_count(bucket.share, plan.num_params),)),)
            outer, runs = outer_of(own, trainer, elements), ((0, plan.num_params),)
            return (Fragment(runs, elements, own.compression, outer),)
        cuts += [bucket.runs] if bucket.runs else []
    if isinstance(own.topology, ShardedServer):
        cuts = [[held] for held in own.topology.bounds([layer.size for layer in layout])]
    found, starts = [], [0, *accumulate(layer.size for layer in layout)]
    for k, runs in enumerate(cuts):
        layers = tuple(
            layer for start, stop in runs for layer in layers_between(layout, start, stop)
        )
        own_outer, first = outer_of(own, trainer, layers), runs[0][0]
        # a number that no other fragment has
        number = starts.index(first) if first in starts else (k + 1) * len(starts)
        found.append(
            Fragment(
                tuple(runs), layers, wrap_codec(own.compression, layers), own_outer, first=number
            )
        )
    return tuple(found)


def layers_between(layout: Layout, start: int, stop: int) -> Iterator[Layer]:
    """Yield the layers in the elements [start, stop); a partial layer has no shape."""
    at = 0
    for layer in layout:
        size = min(at + layer.size, stop) - max(at, start)
        if size > 0:
            yield layer if size == layer.size else Layer(layer.name, (size,))
        at += layer.size


def timed_codecs(
    own: StageParts, layout: Layout, allow: Sequence[str]
) -> tuple[tuple[str, CompressionPipeline], ...]:
    """Return the codecs whose cost is measured: dotted name of the class, and pipeline of the whole
    model.
    """
    options = [
        own.compression,
        *(OptionFactory(allow).get_option("compression", spec) for spec in own.sync.codecs),
    ]
    return tuple(
        (
            f"{type(option).__module__}.{type(option).__name__}",
            CompressionPipeline(wrap_codec(option, layout), size_of(layout)),
        )
        for option in options
        if not option.traits.lossless
    )


def link_of(
    option: Codec, layout: Layout, start: int, stop: int, device: str = HOST
) -> CompressionPipeline:
    """Return the compression pipeline of the tensors in the elements [start, stop)."""
    bounds = [0, *accumulate(layer.size for layer in layout)]
    first = bounds.index(start)
    return CompressionPipeline(
        wrap_codec(option, layout[first : bounds.index(stop)]), stop - start, first, device
    )


def payload_of(option: Codec, layout: Layout) -> Callable[[float | None], float]:
    """Return a function from density to encoded bytes, as a share of the dense bytes."""
    codec, d = wrap_codec(option, layout), size_of(layout)
    return lambda ratio: codec.encoded_nbytes(ratio, d) / (4 * d)


def make_dealer(plan: Plan, parts: Parts, data: Data) -> Deal:
    """Return the function that assigns samples to workers by their data shares.

    It raises UsageError if a worker's samples do not fill a batch; without gradients they need not.
    """
    dataset = parts.dataset
    by_worker = zip(*(stage.workers for stage in plan.stages), strict=True)
    batch = [
        max(worker.batch for worker in stages) if parts.runtime.gradients else 0
        for stages in by_worker
    ]
    return partial(
        make_shards, data, dataset.partition, alpha=dataset.alpha, seed=plan.seed, batch=batch
    )


def with_shards(stage: StagePlan, deal: Deal) -> StagePlan:
    """Return the stage with the data shares of the actual shards.

    With more workers than samples the planned shares remain.
    """
    sizes = [len(shard) for shard in deal([worker.data_share for worker in stage.workers])]
    if not all(sizes):
        return stage
    rows = zip(stage.workers, sizes, strict=True)
    return replace(
        stage, workers=tuple(replace(worker, data_share=size / sum(sizes)) for worker, size in rows)
    )


def bind_stages(
    plan: Plan, parts: Parts, trainers: Sequence[AnyTrainer], deal: Deal
) -> tuple[StageConfig, ...]:
    """Return the stages of a plan, each bound to its workers and trainer."""
    stages = []
    batch = plan.stages[0].workers[0].batch
    known = declared_profile(parts.cluster, plan.choices["model"], plan.num_params, batch)
    layout = layout_of(plan.layers)
    for index, (stage, own, trainer) in enumerate(
        zip(plan.stages, parts.stages, trainers, strict=True)
    ):
        fragments = fragments_of(plan, own, trainer)
        stages.append(
            StageConfig(
                index=index,
                plan=stage,
                topology=own.topology,
                sync=own.sync,
                aggregate=own.aggregate,
                outer=outer_of(own, trainer, layout),
                codec=wrap_codec(own.compression, layout),
                layout=layout,
                overlap=own.overlap,
                fragments=fragments,
                layer_groups=(
                    ()
                    if own.overlap.serial and not own.sync.per_layer_group
                    else layer_groups(plan)
                ),
                pipelines=pipelines_of(plan, own, trainer.device),
                timed_codecs=timed_codecs(own, layout, plan.allow_targets)
                if own.sync.per_layer_group
                else (),
                trainer=trainer,
                limits=plan.limits,
                epoch_samples=trainer.epoch_samples,
                following=index + 1 < len(plan.stages),
                new_outer=index > 0 and stage.outer != plan.stages[index - 1].outer,
                planner=planner_for(own.overlap, parts.planner),
                profile=known,
                compression_stats_every=plan.compression_stats_every,
                seed=plan.seed,
                nodes=parts.cluster.node,
                min_workers=parts.runtime.min_workers,
                reshards=parts.runtime.on_worker_failure == "reshard",
                keeps_batch=parts.runtime.on_worker_failure == "keep_batch",
                joins=parts.cluster.workers_rejoin or parts.runtime.name != "sim",
                elastic=parts.cluster.workers_fail,
                payload_fraction=payload_of(own.compression, layout),
                replan=partial(replan_stages, plan, index + 1, parts, own.compression, deal),
            )
        )
    return tuple(stages)


def replan_stages(
    plan: Plan,
    first: int,
    parts: Parts,
    codec: Codec,
    deal: Deal,
    measured: tuple[WorkerProfile, ...],
    server_step_s: float,
    server_bytes_s: float | None,
    all_reduce: AlphaBeta | None,
    contention: ContentionCosts | None,
    codecs: tuple[CodecCost, ...],
) -> tuple[Profile, list[StagePlan]]:
    """Return the profile of costs that were measured during a run, and the stages from `first`
    planned from it.
    """
    profile = Profile(
        schema=PROFILE_SCHEMA,
        model=plan.choices["model"],
        num_params=plan.num_params,
        dense_bytes=4 * plan.num_params,
        device="cpu",
        source="measured",
        server_step_s=server_step_s,
        server_bytes_s=server_bytes_s,
        ports=True,
        workers=measured,
        group_bytes=untimed_timeline(layer_groups(plan)).nbytes if measured[0].backward_s else (),
        all_reduce=all_reduce,
        contention=contention,
        codecs=codecs,
    )
    payload = payload_of(codec, layout_of(plan.layers))
    stages = []
    for stage, own in zip(plan.stages[first:], parts.stages[first:], strict=True):
        if stage.h_preset is not None:
            stage = with_assignments(
                stage, planner_for(own.overlap, parts.planner), profile, payload
            )
        stages.append(with_shards(stage, deal))
    return profile, stages


def planner_for(overlap: Overlap, planner: Planner) -> Planner:
    """Return the planner for stages with this overlap."""
    return Hidden(planner, planner.replans) if isinstance(overlap, Delayed) else planner


def size_only_trainers(plan: Plan, parts: Parts, epoch_samples: int) -> list[SizeOnlyTrainer]:
    """Return the trainer of each stage without values, for a plan that is only timed."""
    statistics = parts.stages[0].optimizer.statistics(plan.layers)
    sizes = plan.num_params, epoch_samples, plan.num_workers, statistics
    return [
        SizeOnlyTrainer(*sizes, with_horizon(own.optimizer, plan.limits.epochs))
        for own in parts.stages
    ]


def check_writes(learner: Learner, sync: Rule) -> None:
    """Refuse a model whose forward pass writes into parameters where workers do not exchange
    models.

    Raises: UsageError.
    """
    if learner.writes and sync.exchange != "difference":
        raise UsageError(
            f"{type(sync).__name__} exchanges gradients, and the model's forward pass writes into"
            f" {', '.join(learner.writes[:3])} (as max_norm does), which they do not carry; take"
            " sync.exchange=difference, a sync mode that exchanges models, for example"
            " sync=local_sgd, or a model that does not write"
        )


def assemble_job(
    plan: Plan, device: str, parts: Parts | None = None, data: Data | None = None
) -> Job:
    """Return the objects with which a process runs or evaluates a plan.

    Args: `parts` and `data` are options and data that exist already, or None.
    """
    parts = parts or parts_of(plan)
    data = data or load_data(parts.dataset, plan.seed)
    deal = make_dealer(plan, parts, data)
    learner = Learner(
        parts.model,
        data,
        parts.task,
        seed=plan.seed,
        device=device,
        precision=parts.runtime.precision,
        graphs=parts.runtime.graphs == "on" and device != HOST,
        start=plan.start_from,
    )
    if not parts.runtime.gradients:
        size_only = size_only_trainers(plan, parts, len(data.train))
        return Job(parts, data, learner, bind_stages(plan, parts, size_only, deal))
    sizes = [worker.batch for worker in plan.stages[0].workers]
    shuffle = parts.dataset.partition != "interleaved"

    def batches(shares: Sequence[float]) -> list[Batches]:
        return [
            Batches(shard, sizes[i], plan.seed, i, shuffle) for i, shard in enumerate(deal(shares))
        ]

    trainers = []
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        check_writes(learner, own.sync)
        optimizer = with_horizon(own.optimizer, plan.limits.epochs).for_layers(learner.layers)
        shares = [worker.data_share for worker in stage.workers]
        trainers.append(Trainer(learner, optimizer, batches, shares, own.sync.in_rounds))
    return Job(parts, data, learner, bind_stages(plan, parts, trainers, deal))
