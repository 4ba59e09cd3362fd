"""From a composed configuration to a checked plan, and from a plan's specs to objects. Refusals are in words."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ashl.cluster.spec import Cluster, RealCluster
from ashl.data.batches import Batches
from ashl.data.dataset import Data
from ashl.data.partition import shards
from ashl.errors import UsageError
from ashl.learner import Learner
from ashl.optimizer.schedule import with_horizon
from ashl.option import Count, Natural, NonNegative, Positive, option
from ashl.plan.plan import SCHEMA, Limits, Plan
from ashl.predict import predict
from ashl.stage import Stage
from ashl.trainer import HollowTrainer, Trainer

STAGE_GROUPS = ("sync", "topology", "aggregate", "compression", "optimizer")
GROUPS = ("model", "dataset", "cluster", "schedule", "runtime", *STAGE_GROUPS)


@option
class Stop:
    """When a run ends; the first that is reached."""

    epochs: Positive | None
    steps: Count | None
    seconds: Positive | None
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None
    target_loss: NonNegative | None
    target_hold: Count


@option
class Evaluation:
    """When a snapshot is evaluated; both null = once per epoch of the training set."""

    every_s: Positive | None
    every_commits: Count | None


@option
class Run:
    dir: str | None


@option
class Settings:
    """The values that belong to no group."""

    seed: Natural
    name: str | None
    allow_targets: tuple[str, ...]
    run: Run
    stop: Stop
    eval: Evaluation


@dataclass(frozen=True)
class Job:
    """A plan's objects, in one process."""

    data: Data
    learner: Learner
    stages: tuple[Stage, ...]


def construct(spec: Mapping[str, Any], where: str, allow: Sequence[str] = ()) -> Any:
    """The object that `_target_` names, made of the spec's other keys.

    Only classes may be named, in the module that defines them, inside `ashl` or a package in `allow`, so that a
    configuration cannot run arbitrary code. Raises UsageError.
    """
    target = spec.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise UsageError(f"{where} has no `_target_`; take one of the options that `ashl list {where}` shows")
    module_name, _, class_name = target.rpartition(".")
    if module_name.split(".")[0] not in ("ashl", *allow):
        package = module_name.split(".")[0]
        raise UsageError(f"{where} names {target!r}, outside of ashl; allow it with allow_targets=[{package}]")
    try:
        cls = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UsageError(f"{where} names {target!r}, which cannot be imported: {error}") from error
    if not isinstance(cls, type) or cls.__module__ != module_name:
        raise UsageError(f"{where} names {target!r}, which is not a class defined in {module_name}")
    try:
        return cls(**{key: value for key, value in spec.items() if key != "_target_"})
    except ValidationError as error:
        raise UsageError(explain(error, where, cls)) from error


def explain(error: ValidationError, where: str, cls: type) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-"))]
    key = ".".join([*([where] if where else []), *path])
    known = list(getattr(cls, "__dataclass_fields__", {}))
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"{key} is not a key; " + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}")
    if first["type"] in ("missing_argument", "missing_keyword_only_argument", "missing"):
        return f"{key} is missing; give it a value"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key}={first['input']} is not possible: {message.removeprefix('input ')}"


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The checked values outside of the groups. Raises UsageError, also on keys that nothing reads."""
    parts: dict[str, Any] = {}
    extra = set(config) - set(GROUPS) - set(Settings.__dataclass_fields__) - {"tracking"}  # type: ignore[attr-defined]
    if extra:
        raise UsageError(f"nothing reads {sorted(extra)[0]!r}; `ashl train --cfg` shows all keys")
    for key, cls in (("run", Run), ("stop", Stop), ("eval", Evaluation)):
        parts[key] = construct({"_target_": f"ashl.build.{cls.__name__}", **config[key]}, key)
    try:
        return Settings(**parts, **{key: config[key] for key in ("seed", "name", "allow_targets")})
    except ValidationError as error:
        raise UsageError(explain(error, "", Settings)) from error


def make_plan(config: Mapping[str, Any], world_size: int | None = None) -> Plan:
    """Check every choice and every combination, and resolve them into a plan.

    `world_size` is the number of processes of the job that this one is part of, where there is one. Raises UsageError
    and DataMissingError; afterwards nothing is left to refuse.
    """
    settings = settings_of(config)
    parts = {group: construct(config[group], group, settings.allow_targets) for group in GROUPS}
    cluster, runtime, dataset = parts["cluster"], parts["runtime"], parts["dataset"]
    check_combination(parts)
    num_workers = count_workers(cluster, runtime, parts["topology"], world_size)
    parts["sync"].quorum(num_workers)
    data = dataset.load()
    limits = limits_of(settings, dataset)
    with_horizon(parts["optimizer"], limits.epochs)  # refused here where it cannot be known
    if not runtime.gradients and (limits.target_accuracy is not None or limits.target_loss is not None):
        raise UsageError("runtime.gradients=false learns nothing, so a target cannot be reached; drop stop.target_…")
    specs = {group: dict(config[group]) for group in STAGE_GROUPS}
    stages = parts["schedule"].stages(specs, parts["sync"].local_steps, dataset.batch_size, num_workers)
    learner = Learner(parts["model"], data, seed=settings.seed, device="cpu")
    name = settings.name or "-".join(config[g]["_target_"].rsplit(".", 2)[-2] for g in ("sync", "model", "dataset"))
    plan = Plan(
        schema=SCHEMA,
        name=name,
        seed=settings.seed,
        num_workers=num_workers,
        num_ranks=num_workers + parts["topology"].has_server,
        num_params=learner.num_params,
        model=dict(config["model"]),
        dataset=dict(config["dataset"]),
        cluster=dict(config["cluster"]),
        runtime=dict(config["runtime"]),
        limits=limits,
        stages=tuple(stages),
        allow_targets=settings.allow_targets,
    )
    for stage in stages:  # a batch larger than a shard is refused here, before any worker starts
        batches = [w.batch for w in stage.workers]
        shares = [w.data_share for w in stage.workers]
        shards(data, dataset.partition, num_workers, shares, dataset.alpha, settings.seed, batches)
    if isinstance(cluster, Cluster) and not cluster.missing():
        timing = rules(plan, HollowTrainer(plan.num_params), epoch_samples=1)
        plan = replace(plan, stages=tuple(predict(stage, cluster, dataset.batch_size) for stage in timing))
    return plan


def check_combination(parts: dict[str, Any]) -> None:
    """Refuse what makes no sense, saying why and what to take instead."""
    sync, topology, runtime, cluster = (parts[key] for key in ("sync", "topology", "runtime", "cluster"))
    topology_name = type(topology).__module__.rsplit(".", 1)[-1]
    sync_name = type(sync).__module__.rsplit(".", 1)[-1]
    if topology_name not in sync.topologies:
        why = {
            "all_reduce": "a sum over all workers cannot start before the last one has come, so nobody can be ahead",
        }.get(topology_name, f"{sync_name} has no rule for it")
        raise UsageError(
            f"sync={sync_name} makes no sense with topology={topology_name}: {why}; take "
            f"topology={' or '.join(sync.topologies)}, or sync=bsp or sync=local_sgd"
        )
    if runtime.name == "sim":
        if isinstance(cluster, RealCluster):
            raise UsageError(
                "cluster=real is what is there, and virtual time needs declared costs; take another cluster, or "
                "runtime=local"
            )
        if missing := cluster.missing():
            raise UsageError(
                f"runtime=sim needs cluster.{missing[0]}, which is not declared (a missing cost is never zero); give "
                "it a value, or measure with runtime=local"
            )
    elif runtime.backend == "nccl":
        raise UsageError(
            "runtime.backend=nccl is not built yet; take runtime.backend=gloo, which carries the vectors of CUDA "
            "workers through the host's memory"
        )


def count_workers(cluster: Any, runtime: Any, topology: Any, world_size: int | None) -> int:
    """How many workers there are. Raises UsageError where the job's size says otherwise."""
    given, extra = cluster.num_workers, int(topology.has_server)
    if runtime.name != "torchrun":
        if given is None:
            raise UsageError("cluster=real needs the number of processes: give cluster.num_workers=2, say")
        return given
    if world_size is None:
        raise UsageError("runtime=torchrun needs a job to join: start it as `torchrun … -m ashl.cli train …`")
    if given is None and world_size - extra >= 1:
        return world_size - extra
    if given is None or given + extra != world_size:
        raise UsageError(
            f"the job has {world_size} processes, but {given or 1} workers{' and a server' if extra else ''} need "
            f"{(given or 1) + extra}; change --nproc-per-node or the cluster"
        )
    return given


def limits_of(settings: Settings, dataset: Any) -> Limits:
    """The stop rule. Without a limit, and also where only a target is given, the data set's own epochs hold."""
    stop = settings.stop
    unbounded = stop.epochs is None and stop.steps is None and stop.seconds is None
    return Limits(
        epochs=dataset.epochs if unbounded else stop.epochs,
        steps=stop.steps,
        seconds=stop.seconds,
        target_accuracy=stop.target_accuracy,
        target_loss=stop.target_loss,
        target_hold=stop.target_hold,
        eval_every_s=settings.eval.every_s,
        eval_every_commits=settings.eval.every_commits,
    )


def rules(plan: Plan, trainer: Any, epoch_samples: int) -> tuple[Stage, ...]:
    """Each stage's rules, bound to its workers."""
    stages = []
    for index, stage in enumerate(plan.stages):
        parts = {
            group: construct(getattr(stage, group), group, plan.allow_targets)
            for group in ("topology", "sync", "aggregate", "compression")
        }
        stages.append(
            Stage(
                index=index,
                plan=stage,
                topology=parts["topology"],
                sync=parts["sync"],
                aggregate=parts["aggregate"],
                codec=parts["compression"],
                trainer=trainer,
                limits=plan.limits,
                epoch_samples=epoch_samples,
            )
        )
    return tuple(stages)


def assemble(plan: Plan, device: str) -> Job:
    """Everything that a process needs to run or to evaluate a plan."""
    dataset = construct(plan.dataset, "dataset", plan.allow_targets)
    data = dataset.load()
    learner = Learner(construct(plan.model, "model", plan.allow_targets), data, seed=plan.seed, device=device)
    runtime = construct(plan.runtime, "runtime", plan.allow_targets)
    if not runtime.gradients:
        return Job(data, learner, rules(plan, HollowTrainer(plan.num_params), len(data.train)))
    first = plan.stages[0]
    batches, shares = [w.batch for w in first.workers], [w.data_share for w in first.workers]
    parts = shards(data, dataset.partition, plan.num_workers, shares, dataset.alpha, plan.seed, batches)
    shuffle = dataset.partition != "interleaved"
    streams = [Batches(part, batches[i], plan.seed, i, shuffle) for i, part in enumerate(parts)]
    optimizer = with_horizon(construct(first.optimizer, "optimizer", plan.allow_targets), plan.limits.epochs)
    trainer = Trainer(learner, optimizer, streams, len(data.train))
    return Job(data, learner, rules(plan, trainer, len(data.train)))
