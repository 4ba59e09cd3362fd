"""From a plan's specs to the objects that a process runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ashl.cluster.spec import Cluster
from ashl.compression.around.wrapped import wrapped
from ashl.compression.contract import Codec, Layer, Layout, size_of
from ashl.config.construct import construct
from ashl.data.batches import Batches
from ashl.data.dataset import Data
from ashl.data.partition import shards
from ashl.learn.learner import Learner
from ashl.learn.trainer import SizeOnlyTrainer, Trainer
from ashl.optimizer.schedule import with_horizon
from ashl.outer.average import Average
from ashl.plan.plan import Plan, StagePlan
from ashl.plan.profile import SCHEMA as PROFILE_SCHEMA
from ashl.plan.profile import Profile, WorkerProfile, declared
from ashl.schedule.choices import with_assignments
from ashl.stage.stage import Stage


@dataclass(frozen=True)
class Job:
    """A plan's objects, in one process."""

    data: Data
    learner: Learner
    stages: tuple[Stage, ...]


def declared_profile(cluster: Any, model: str, num_params: int, batch: int) -> Profile | None:
    """What the configuration declares of the workers; None where it has to be measured."""
    if not isinstance(cluster, Cluster) or cluster.missing():
        return None
    return declared(cluster, model, num_params, batch)


def layout_of(layers: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
    """A plan's layers, as codecs know them."""
    return tuple(Layer(*layer) for layer in layers)


def payload_of(option: Codec, layout: Layout) -> Callable[[float | None], float]:
    """Bytes on the wire at a ratio, as a share of the dense vector's."""
    codec, d = wrapped(option, layout), size_of(layout)
    return lambda ratio: codec.payload(ratio, d) / (4 * d)


def rules(plan: Plan, trainers: Sequence[Any]) -> tuple[Stage, ...]:
    """Each stage's rules, bound to its workers."""
    stages = []
    planner = construct(plan.planner, "planner", plan.allow_targets)
    cluster = construct(plan.cluster, "cluster", plan.allow_targets)
    known = declared_profile(cluster, plan.choices["model"], plan.num_params, plan.stages[0].workers[0].batch)
    layout = layout_of(plan.layers)
    for index, (stage, trainer) in enumerate(zip(plan.stages, trainers, strict=True)):
        parts = {
            group: construct(getattr(stage, group), group, plan.allow_targets)
            for group in ("topology", "sync", "aggregate", "outer", "compression")
        }
        stages.append(
            Stage(
                index=index,
                plan=stage,
                topology=parts["topology"],
                sync=parts["sync"],
                aggregate=parts["aggregate"],
                outer=Average() if isinstance(trainer, SizeOnlyTrainer) else parts["outer"],  # sizes have no moments
                codec=wrapped(parts["compression"], layout),
                layout=layout,
                trainer=trainer,
                limits=plan.limits,
                epoch_samples=trainer.epoch_samples,
                following=index + 1 < len(plan.stages),
                new_outer=index > 0 and stage.outer != plan.stages[index - 1].outer,
                planner=planner,
                profile=known,
                health_every=plan.health_every,
                health_layers=plan.health_layers,
                health_mean=plan.health_mean,
                seed=plan.seed,
                nodes=cluster.node,
                payload=payload_of(parts["compression"], layout),
                replan=partial(replanned, plan, index + 1, planner, parts["compression"]),
            )
        )
    return tuple(stages)


def replanned(
    plan: Plan, first: int, planner: Any, codec: Codec, measured: tuple[WorkerProfile, ...]
) -> tuple[Profile, list[StagePlan]]:
    """The profile of what was measured during a run, and the stages from `first` on planned from it."""
    profile = Profile(
        schema=PROFILE_SCHEMA,
        model=plan.choices["model"],
        num_params=plan.num_params,
        dense_bytes=4 * plan.num_params,
        device="cpu",
        source="measured",
        workers=measured,
    )
    payload = payload_of(codec, layout_of(plan.layers))
    stages = plan.stages[first:]
    return profile, [s if s.h_preset is None else with_assignments(s, planner, profile, payload) for s in stages]


def size_only_trainer(plan: Plan, epoch_samples: int) -> SizeOnlyTrainer:
    """For a plan that is only timed."""
    optimizer = construct(plan.stages[0].optimizer, "optimizer", plan.allow_targets)
    statistics = optimizer.statistics(plan.layers)
    return SizeOnlyTrainer(plan.num_params, epoch_samples, plan.num_workers, statistics)


def assemble(plan: Plan, device: str, data: Data | None = None) -> Job:
    """Everything that a process needs to run or to evaluate a plan; `data` where it is loaded already."""
    dataset = construct(plan.dataset, "dataset", plan.allow_targets)
    data = data or dataset.load()
    learner = Learner(construct(plan.model, "model", plan.allow_targets), data, seed=plan.seed, device=device)
    runtime = construct(plan.runtime, "runtime", plan.allow_targets)
    if not runtime.gradients:
        size_only = size_only_trainer(plan, len(data.train))
        return Job(data, learner, rules(plan, [size_only] * len(plan.stages)))
    sizes = [worker.batch for worker in plan.stages[0].workers]

    def deal(shares: Sequence[float]) -> list[Batches]:
        parts = shards(data, dataset.partition, plan.num_workers, shares, dataset.alpha, plan.seed, sizes)
        shuffle = dataset.partition != "interleaved"
        return [Batches(part, sizes[i], plan.seed, i, shuffle) for i, part in enumerate(parts)]

    trainers = []
    for stage in plan.stages:
        optimizer = with_horizon(construct(stage.optimizer, "optimizer", plan.allow_targets), plan.limits.epochs)
        trainers.append(Trainer(learner, optimizer, deal, [worker.data_share for worker in stage.workers]))
    return Job(data, learner, rules(plan, trainers))
