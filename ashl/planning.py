"""From a composed configuration to a checked plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ashl.build import declared_profile, payload_of, rules
from ashl.checks import check_combination, check_stages, check_targets, count_workers, refuse_sync
from ashl.cluster.spec import Cluster
from ashl.construct import construct
from ashl.data.dataset import Data
from ashl.data.partition import shards
from ashl.errors import UsageError
from ashl.learner import Learner
from ashl.optimizer.schedule import with_horizon
from ashl.plan.given import read_plan, read_profile
from ashl.plan.plan import SCHEMA, Plan
from ashl.plan.profile import Profile
from ashl.predict import predict
from ashl.runtime.device import device_of
from ashl.schedule.choices import Choices
from ashl.settings import GROUPS, STAGE_GROUPS, Settings, limits_of, settings_of
from ashl.trainer import HollowTrainer


def make_plan(
    config: Mapping[str, Any],
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    profile: Profile | None = None,
) -> Plan:
    """Check every choice and every combination, and resolve them into a plan.

    `world_size` is the number of processes of the job that this one is part of, where there is one; `overrides` is what
    the user wrote; `profile` what was just measured. Precedence: plan=FILE, what was measured, profile=FILE, cluster.*.
    Raises UsageError and DataMissingError; afterwards nothing is left to refuse.
    """
    settings = settings_of(config)
    parts = {group: construct(config[group], group, settings.allow_targets) for group in GROUPS}
    if parts["schedule"].names_sync:
        refuse_sync(config, overrides)
        parts["sync"] = None
    check_combination(parts)
    num_workers = count_workers(parts["cluster"], parts["runtime"], parts["topology"], world_size)
    if parts["sync"] is not None:
        parts["sync"].quorum(num_workers)
    data = parts["dataset"].load()
    limits = limits_of(settings, parts["dataset"])
    with_horizon(parts["optimizer"], limits.epochs)  # refused here where it cannot be known
    check_targets(limits, parts["runtime"].gradients, data.loss)
    device_of(parts["runtime"])
    num_params = Learner(parts["model"], data, seed=settings.seed).num_params
    batch = parts["dataset"].batch_size
    given = given_profile(profile, settings, config, num_workers, num_params, batch)
    stages = parts["schedule"].stages(choices_of(config, parts, num_workers, num_params, given))
    check_stages(stages, parts["topology"], parts["runtime"].gradients, settings.allow_targets)
    plan = Plan(
        schema=SCHEMA,
        name=settings.name or name_of(config, parts),
        seed=settings.seed,
        num_workers=num_workers,
        num_ranks=num_workers + parts["topology"].has_server,
        num_params=num_params,
        model=dict(config["model"]),
        dataset=dict(config["dataset"]),
        cluster=dict(config["cluster"]),
        runtime=dict(config["runtime"]),
        planner=dict(config["planner"]),
        limits=limits,
        stages=tuple(stages),
        allow_targets=settings.allow_targets,
    )
    if settings.plan is not None:
        plan = given_plan(settings.plan, plan)
    if parts["runtime"].gradients:
        check_shards(plan, parts["dataset"], data)
    return predicted(plan, parts["cluster"], len(data.train), batch)


def choices_of(
    config: Mapping[str, Any], parts: dict[str, Any], num_workers: int, num_params: int, given: Profile | None
) -> Choices:
    """What the schedule is given to make stages of."""
    batch = parts["dataset"].batch_size
    return Choices(
        specs={group: dict(config[group]) for group in STAGE_GROUPS},
        local_steps=parts["sync"].local_steps if parts["sync"] is not None else 1,
        batch=batch,
        num_workers=num_workers,
        planner=parts["planner"],
        profile=given or declared_profile(parts["cluster"], config["model"], num_params, batch),
        payload=payload_of(parts["compression"], num_params),
        ratio=getattr(parts["compression"], "ratio", None),
        given=given is not None,
    )


def name_of(config: Mapping[str, Any], parts: dict[str, Any]) -> str:
    """What was chosen, in short."""
    what = "sync" if parts["sync"] is not None else "schedule"
    return "-".join(config[group]["_target_"].rsplit(".", 2)[-2] for group in (what, "model", "dataset"))


def check_shards(plan: Plan, dataset: Any, data: Data) -> None:
    """A batch larger than its shard is refused here, before any worker starts."""
    for stage in plan.stages:
        batches, shares = [w.batch for w in stage.workers], [w.data_share for w in stage.workers]
        shards(data, dataset.partition, plan.num_workers, shares, dataset.alpha, plan.seed, batches)


def predicted(plan: Plan, cluster: Any, epoch_samples: int, batch: int) -> Plan:
    """The plan with what each stage should reach, where the cluster declares its costs."""
    if not isinstance(cluster, Cluster) or cluster.missing():
        return plan
    hollow = HollowTrainer(plan.num_params, epoch_samples)
    stages = rules(plan, [hollow] * len(plan.stages))
    return replace(plan, stages=tuple(predict(stage, cluster, batch) for stage in stages))


def given_profile(
    measured: Profile | None,
    settings: Settings,
    config: Mapping[str, Any],
    num_workers: int,
    num_params: int,
    batch: int,
) -> Profile | None:
    """The profile that was just measured, or that the user gave. Raises UsageError where it is of something else."""
    profile = measured or (read_profile(settings.profile) if settings.profile else None)
    if profile is not None:
        profile.check(num_workers, config["model"]["_target_"].rsplit(".", 1)[-1], num_params, batch)
    return profile


def given_plan(path: str, own: Plan) -> Plan:
    """The stages of a plan that the user gave, run where and for as long as this configuration says."""
    plan = read_plan(path)
    clashes = (
        ("workers", plan.num_workers, own.num_workers),
        ("model", plan.model["_target_"], own.model["_target_"]),
        ("parameters", plan.num_params, own.num_params),
    )
    for what, theirs, ours in clashes:
        if theirs != ours:
            raise UsageError(
                f"plan={path} is for another run: {what} {theirs} there, {ours} here; give this run the same, or plan "
                "anew"
            )
    return replace(own, stages=plan.stages, planner=plan.planner, seed=plan.seed, num_ranks=plan.num_ranks)
