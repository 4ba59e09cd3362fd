"""Compile a composed configuration into a checked plan.

`prepare_plan` constructs the options, checks them, lets the schedule make stages, and completes
these with messages, shards and a prediction.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

from ashl.cluster.spec import Cluster, ProfileCluster, note_implied_bandwidth
from ashl.cluster.trace import with_trace_events
from ashl.compression.contract import Codec, Layout, size_of
from ashl.config.construct import report_own_faults
from ashl.config.cores import usable_cores
from ashl.config.override import key_of
from ashl.data.dataset import Data
from ashl.data.rng import Purpose, stream
from ashl.errors import AshlError, UsageError
from ashl.learn.learner import Learner
from ashl.learn.making import load_data
from ashl.learn.weights import start_of
from ashl.optimizer.schedule import with_horizon
from ashl.plan.files import read_plan, read_profile
from ashl.plan.plan import SCHEMA, Plan, Spec, StagePlan
from ashl.plan.profile import Profile
from ashl.planning.capabilities import Choice, check_choice
from ashl.planning.compatibility import (
    check_compression,
    check_costs,
    check_faults,
    check_plan_overrides,
    check_stages,
    check_sync_overrides,
    check_targets,
    check_worker_count,
    count_workers,
    note_dense_pulls,
)
from ashl.planning.device import device_of
from ashl.planning.instantiate import (
    Deal,
    OptionFactory,
    Parts,
    StageParts,
    bind_stages,
    buckets_of,
    declared_profile,
    layout_of,
    link_of,
    make_dealer,
    parts_of,
    payload_of,
    pipelines_of,
    planner_for,
    size_only_trainers,
    with_shards,
)
from ashl.planning.overlap_plan import plan_overlap
from ashl.planning.predict import predict_stage
from ashl.planning.reduction_algorithm import note_reduction_times
from ashl.planning.settings import GROUPS, STAGE_GROUPS, Settings, limits_of, settings_of
from ashl.planning.without_effect import EffectContext, check_effects
from ashl.schedule.choices import Choices
from ashl.stage.contract import extra_ranks
from ashl.task.contract import renaming_note

TAKES_COSTS = (
    "virtual time takes its costs from profile=FILE; of cluster.* only the number of workers has an"
    " effect"
)


class PreparedPlan(NamedTuple):
    """A checked plan, the options that its specs construct, and the loaded data set."""

    plan: Plan
    parts: Parts
    data: Data


def compile_plan(
    config: Mapping[str, Any],
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    profile: Profile | None = None,
    *,
    strict: bool = False,
) -> Plan:
    """Return only the plan of `prepare_plan`."""
    return prepare_plan(config, world_size, overrides, profile, strict=strict).plan


def prepare_plan(
    config: Mapping[str, Any],
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    profile: Profile | None = None,
    *,
    strict: bool = False,
) -> PreparedPlan:
    """Check every choice and every combination, and resolve them into a plan.

    Args: `world_size` is the number of processes of this process's job, or None. `overrides` are
    the settings that the user typed; with `strict`, a typed value without an effect is refused.
    `profile` is a profile that was just measured.
    The order of precedence is plan=FILE, `profile`, profile=FILE, cluster.*.
    Raises: UsageError and DataMissingError. A plan that is returned has passed all checks.
    """
    settings = settings_of(config)
    with report_own_faults(settings.allow_targets):
        config = {**config, "cluster": with_trace_events(config["cluster"])}
        return _prepare_plan(config, settings, world_size, overrides, profile, strict)


def _prepare_plan(
    config: Mapping[str, Any],
    settings: Settings,
    world_size: int | None,
    overrides: Sequence[str],
    profile: Profile | None,
    strict: bool,
) -> PreparedPlan:
    options = OptionFactory(settings.allow_targets)
    typed = config
    parts = {group: options.get_option(group, config[group]) for group in GROUPS}
    cluster = draw_compute_factors(config["cluster"], settings.seed)
    parts["cluster"] = options.get_option("cluster", cluster)
    known = profile or (read_profile(settings.profile) if settings.profile else None)
    if (replaced := choose_virtual_cluster(parts, known, codec_class(config))) is not None:
        config, cluster = {**config, "cluster": replaced}, replaced
        parts["cluster"] = options.get_option("cluster", replaced)
    if parts["schedule"].names_sync:
        check_sync_overrides(config["choices"]["schedule"], overrides)
        parts["sync"] = None
    choice = run_choice(parts, config["choices"])
    check_choice(choice)
    check_costs(parts)
    num_workers = count_workers(parts, world_size)
    check_worker_count(parts["sync"], parts["topology"], num_workers, settings.seed)
    data = load_data(parts["dataset"], settings.seed)
    limits = limits_of(settings, parts["dataset"])
    with_horizon(parts["optimizer"], limits.epochs)  # raises if the horizon is not known
    check_targets(limits, parts["runtime"].gradients, parts["task"], config["choices"]["task"])
    device_of(parts["runtime"])
    learner = make_learner(parts, data, settings)
    num_params, layout = learner.num_params, layout_of(learner.layers)
    check_choice(replace(choice, num_workers=num_workers, layout=layout))
    found = check_compression(parts, config["choices"], layout, num_workers)
    batch = parts["dataset"].batch_size
    if known is not None:
        known.check(num_workers, config["choices"]["model"], num_params, batch)
    stages = parts["schedule"].stages(schedule_choices(config, parts, num_workers, layout, known))
    num_ranks = num_workers + extra_ranks(parts["topology"], parts["sync"], parts["cluster"].node)
    specs: dict[str, Any] = {
        g: dict(config[g]) for g in ("model", "dataset", "task", "runtime", "planner")
    }
    plan = Plan(
        schema=SCHEMA,
        name=settings.name or make_run_name(config["choices"], parts),
        seed=settings.seed,
        num_workers=num_workers,
        num_ranks=num_ranks,
        num_params=num_params,
        sample_shape=data.sample_shape,
        num_classes=data.num_classes,
        layers=learner.layers,
        choices={
            g: option for g, option in config["choices"].items() if parts.get(g, option) is not None
        },
        cluster=cluster,
        **specs,
        limits=limits,
        stages=tuple(stages),
        notes=(
            *data.notes,
            *renaming_note(parts["task"].metric),
            *found,
            *note_implied_bandwidth(parts["cluster"], 4 * num_params),
            *note_profile(known, parts["compression"], replaced, config["choices"]),
            *note_whole_steps(parts["sync"], num_workers, config["choices"]),
            *note_shared_cores(parts["cluster"], parts["runtime"], num_ranks),
        ),
        start_from=learner.start,
        compression_stats_every=settings.run.compression_stats_every,
        allow_targets=settings.allow_targets,
    )
    if settings.plan is not None:
        plan = take_stages_of_plan_file(settings.plan, plan, config, overrides)
    resolved = resolve_plan(plan, options, settings.plan)
    check_faults(resolved, plan.stages)
    cost_cluster = choose_prediction_cluster(
        parts["cluster"], known, replaced, codec_class(config), options
    )
    plan = plan_overlap(plan, resolved, learner, known, cost_cluster)
    resolved = parts_of(plan, options)
    plan = replace(
        plan,
        stages=tuple(
            with_message_bytes(plan, *of) for of in zip(plan.stages, resolved.stages, strict=True)
        ),
    )
    deal = make_dealer(plan, resolved, data)
    plan = replace(plan, stages=tuple(with_shards(stage, deal) for stage in plan.stages))
    plan = add_prediction(plan, resolved, cost_cluster, deal, len(data.train), batch)
    plan = replace(plan, notes=plan.notes + note_dense_pulls(plan, resolved))
    if strict:
        given = EffectContext(typed, plan, resolved, parts["schedule"], replaced is not None, data)
        check_effects(given, overrides)
    return PreparedPlan(plan, resolved, data)


def run_choice(parts: Mapping[str, Any], names: Mapping[str, str]) -> Choice:
    """Return the options of a run with one stage, as `check_choice` judges them, before its workers
    and its model are known.
    """
    groups = (*STAGE_GROUPS, "model", "task", "cluster")
    return Choice(
        **{group: parts[group] for group in groups},
        planner=None,
        gradients=parts["runtime"].gradients,
        num_workers=None,
        layout=None,
        names={"sync": "", **names},
        scheduled=parts["sync"] is None,
    )


def make_learner(parts: Mapping[str, Any], data: Data, settings: Settings) -> Learner:
    """Return the learner of the plan.

    Raises: UsageError if the model does not fit the data or the initial weights.
    """
    start = start_of(settings.run.start_from)
    learner = Learner(parts["model"], data, parts["task"], seed=settings.seed, start=start)
    if start is not None:
        learner.init()
    return learner


def resolve_plan(plan: Plan, options: OptionFactory, path: str | None) -> Parts:
    """Return the options of a plan whose stages can follow one another.

    Raises: UsageError, naming the plan file `path` if there is one.
    """
    try:
        resolved = parts_of(plan, options)
        check_stages(resolved, plan)
        extra = max(
            extra_ranks(own.topology, own.sync, resolved.cluster.node) for own in resolved.stages
        )
        if plan.num_ranks != (ranks := plan.num_workers + extra):
            raise UsageError(
                f"num_ranks is {plan.num_ranks}, and its workers and servers are {ranks}"
            )
    except UsageError as error:
        if path is None:
            raise
        raise UsageError(f"plan={path} is no usable plan: {error}") from error
    return resolved


def draw_compute_factors(cluster: Mapping[str, Any], seed: int) -> Spec:
    """Return the cluster's spec with the events of its trace and with random compute factors.

    The factors of the first workers do not depend on the number of workers.
    """
    cluster = with_trace_events(cluster)
    if not (spread := cluster.get("compute_spread")):
        return cluster
    normal = stream(seed, Purpose.SPEED).standard_normal(len(cluster["compute"])).tolist()
    compute = [
        factor * math.exp(spread * z) for factor, z in zip(cluster["compute"], normal, strict=True)
    ]
    return {**cluster, "compute": compute, "compute_spread": 0.0}


def with_message_bytes(plan: Plan, stage: StagePlan, own: StageParts) -> StagePlan:
    """Return the stage with the bytes of each worker's update, summed over its messages."""
    whole = link_of(own.compression, layout_of(plan.layers), 0, plan.num_params)
    links = pipelines_of(plan, own)
    densities = [bucket.ratio for bucket in buckets_of(plan, own.overlap)] if links else []
    links = links or (whole,) * (1 + own.sync.momentum_travels)

    @cache
    def nbytes(ratio: float) -> int:
        shares = [density or ratio for density in densities] or [ratio] * len(links)
        return sum(
            link.codec.encoded_nbytes(share, link.d)
            for link, share in zip(links, shares, strict=True)
        )

    workers = (
        replace(worker, message_bytes=nbytes(worker.compression_ratio)) for worker in stage.workers
    )
    return replace(stage, workers=tuple(workers))


def schedule_choices(
    config: Mapping[str, Any],
    parts: dict[str, Any],
    num_workers: int,
    layout: Layout,
    profile: Profile | None,
) -> Choices:
    """Return the input from which a schedule makes stages."""
    batch, num_params = parts["dataset"].batch_size, size_of(layout)
    return Choices(
        names=config["choices"],
        specs={group: dict(config[group]) for group in STAGE_GROUPS},
        local_steps=parts["sync"].local_steps if parts["sync"] is not None else 1,
        batch=batch,
        num_workers=num_workers,
        planner=planner_for(parts["overlap"], parts["planner"]),
        profile=profile
        or declared_profile(parts["cluster"], config["choices"]["model"], num_params, batch),
        payload=payload_of(parts["compression"], layout),
        ratio=parts["compression"].ratio,
        profiled=profile is not None,
    )


def make_run_name(choices: Mapping[str, str], parts: dict[str, Any]) -> str:
    """Return a short name of the chosen options."""
    what = "sync" if parts["sync"] is not None else "schedule"
    return "-".join(choices[group] for group in (what, "model", "dataset"))


def add_prediction(
    plan: Plan,
    parts: Parts,
    cluster: Any,
    deal: Deal,
    epoch_samples: int,
    batch: int,
) -> Plan:
    """Return the plan with the prediction of each stage, if the cluster or the profile declares all
    costs.

    Raises: UsageError if the topology does not support the algorithm of all-reduces.
    """
    plan = replace(plan, notes=plan.notes + note_reduction_times(plan, parts, cluster))
    if not isinstance(cluster, Cluster) or cluster.missing_costs():
        return plan
    trainers = size_only_trainers(plan, parts, epoch_samples)
    stages = bind_stages(plan, parts, trainers, deal)
    with report_own_faults(plan.allow_targets, AshlError):  # the run fails before it has begun
        plan = replace(plan, stages=tuple(predict_stage(stage, cluster, batch) for stage in stages))
    return replace(plan, predicted_s=predict_duration_s(plan, epoch_samples))


def predict_duration_s(plan: Plan, epoch_samples: int) -> float | None:
    """Return the predicted seconds of the run by its limits.

    The moments of stage boundaries are not known in advance. So the prediction assumes the pace of
    the slowest stage for the whole run.
    """
    # a rate of 0 is too low to predict
    rates = [s.predicted_steps_per_s for s in plan.stages if s.predicted_steps_per_s]
    steps = plan.num_steps(epoch_samples)
    bounds = [plan.limits.seconds, None if steps is None or not rates else steps / min(rates)]
    return min((bound for bound in bounds if bound is not None), default=None)


def choose_virtual_cluster(
    parts: Mapping[str, Any], known: Profile | None, codec: str
) -> Spec | None:
    """Return the spec of the profile's cluster if it replaces the chosen cluster in virtual time,
    else None.

    Raises: UsageError if the chosen cluster needs a profile, or has events that a profile cannot
    represent.
    """
    cluster, virtual = parts["cluster"], parts["runtime"].name == "sim"
    if isinstance(cluster, ProfileCluster):
        if not virtual:
            raise UsageError(
                "cluster=profile: a measured cluster exists in virtual time only; take runtime=sim,"
                " or cluster=real to run on the job's processes"
            )
        if known is None:
            raise UsageError("cluster=profile: needs a profile; add profile=FILE")
    if not virtual or known is None:
        return None
    if cluster.num_workers not in (None, known.num_workers):
        raise UsageError(known.explain_worker_count(cluster.num_workers))
    if isinstance(cluster, Cluster):
        if declares_profile(cluster, known):
            return None
        if cluster.events:
            raise UsageError(
                "cluster.events: change the declared costs of a cluster, and profile=FILE replaces"
                " them; remove one of them"
            )
    if not isinstance(cluster, Cluster) or cluster.churn is None:
        return known.cluster(codec)
    return known.cluster(codec) | {
        "churn": asdict(cluster.churn),
        "failure_detection_s": cluster.failure_detection_s,
    }


def choose_prediction_cluster(
    cluster: Any, known: Profile | None, replaced: Spec | None, codec: str, options: OptionFactory
) -> Any:
    """Return the cluster whose costs predict the run: that of the profile, if the run's cluster
    declares none.
    """
    if known is None or replaced is not None or isinstance(cluster, Cluster):
        return cluster
    return options.get_option("cluster", known.cluster(codec))


def declares_profile(cluster: Cluster, known: Profile) -> bool:
    """Return True if the profile has the costs that this cluster declares."""
    own = declared_profile(cluster, known.model, known.num_params, known.workers[0].batch)
    return (
        own is not None
        and replace(own, device=known.device, source=known.source) == known.without_parts()
    )


def codec_class(config: Mapping[str, Any]) -> str:
    """Return the dotted name of the codec's class, which identifies its costs in a profile."""
    return config["compression"]["_target_"]


def note_profile(
    known: Profile | None, codec: Codec, replaced: Spec | None, choices: Mapping[str, str]
) -> list[str]:
    """Return notes on the use of a profile and on costs that it has not timed."""
    notes = [TAKES_COSTS] if replaced and choices["cluster"] != "profile" else []
    own = f"{type(codec).__module__}.{type(codec).__name__}"
    if (
        known is not None
        and known.codecs
        and not codec.traits.lossless
        and known.codec(own) is None
    ):
        notes.append(
            f"the profile has not timed {choices['compression']}: the encoding time of its own"
            " codec is used"
        )
    return notes


def note_whole_steps(sync: Any, num_workers: int, choices: Mapping[str, str]) -> list[str]:
    """Return a note on a sync mode whose round moves the model n times as far as a round of BSP."""
    if sync is None or not sync.whole_steps or num_workers == 1:
        return []
    return [
        f"sync={choices['sync']} takes {num_workers} whole steps in a round, and BSP and ASP take"
        f" one at aggregate.scale=1; optimizer.lr may need to be {num_workers} times smaller"
    ]


def note_shared_cores(cluster: Any, runtime: Any, num_ranks: int) -> list[str]:
    """Return a note on unpaced ranks that share the cores of this host, unlike nodes of a
    cluster.
    """
    here = num_ranks if runtime.name == "local" else int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    cores = usable_cores()
    if cluster.paced or runtime.name == "sim" or here <= cores:
        return []
    elsewhere = "; other hosts are not checked" if here < num_ranks else ""
    return [
        f"{here} ranks share {cores} core{'s' * (cores > 1)} of this host: times measured here are"
        f" not those of a cluster, where each rank has a core{elsewhere}"
    ]


def take_stages_of_plan_file(
    path: str, own: Plan, config: Mapping[str, Any], overrides: Sequence[str]
) -> Plan:
    """Return this run's plan with the stages of a plan file.

    A typed seed replaces the file's, because stages do not depend on the seed.
    Raises: UsageError if the file is for another run.
    """
    plan = read_plan(path)
    clashes = (
        ("workers", plan.num_workers, own.num_workers),
        ("model", plan.choices.get("model", own.choices["model"]), own.choices["model"]),
        ("parameters", plan.num_params, own.num_params),
        ("batch", plan.dataset.get("batch_size"), own.dataset["batch_size"]),
    )
    for what, theirs, ours in clashes:
        if theirs != ours:
            raise UsageError(
                f"plan={path} is for another run: {what} {theirs} there, {ours} here; give this run"
                " the same, or make a new plan"
            )
    check_plan_overrides(path, plan, config, overrides)
    seed = own.seed if any(key_of(override) == "seed" for override in overrides) else plan.seed
    return replace(
        own,
        name=config["name"] or plan.name,
        choices=own.choices
        | {group: option for group, option in plan.choices.items() if group in STAGE_GROUPS},
        stages=plan.stages,
        planner=plan.planner,
        seed=seed,
        num_ranks=plan.num_ranks,
        cluster=draw_compute_factors(config["cluster"], seed),
    )
