"""Refuse typed values that have no effect, and name the setting that would make them effective.

A single run refuses such a value; a sweep leaves it out of its settings. Each row of `CONDITIONS`
lists keys and the condition under which they have an effect, judged by the checked plan and its
options. The rows of keys that depend on the value of another key are made from `NEEDED`.

A value has an effect if it may change anything that is recorded. Values that equal the default, and
values that a preset sets, are not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ashl.cluster.spec import Cluster
from ashl.compression.cast import Cast
from ashl.compression.fetch_sgd import FetchSGD
from ashl.compression.natural import NaturalCompression
from ashl.compression.one_bit import OneBit
from ashl.compression.power_sgd import PowerSGD
from ashl.compression.sign import Sign
from ashl.config.catalog import CONF, catalog, defaults, load_yaml, values
from ashl.config.flat import setting_text
from ashl.config.override import key_of
from ashl.data.dataset import Data
from ashl.device import HOST
from ashl.errors import NoEffectError
from ashl.overlap.contract import Delayed
from ashl.plan.plan import TARGETS, Plan
from ashl.planning.capabilities import capabilities_of
from ashl.planning.device import device_of
from ashl.planning.instantiate import Parts, StageParts
from ashl.stage.contract import WEIGHTS
from ashl.sync.profiling import Profiling
from ashl.sync.ripples_first_come import RipplesFirstCome
from ashl.sync.ripples_random import RipplesRandom
from ashl.topology.halos import Halos
from ashl.topology.partial_all_reduce import PartialAllReduce

LISTED = ("cluster.compute", "cluster.link", "cluster.node")  # may set the number of workers
INTRA_NODE = ("cluster.intra_node_bandwidth_mbit_s", "cluster.intra_node_latency_s")
LINKS = (
    "cluster.bandwidth_mbit_s",
    "cluster.latency_s",
    "cluster.server_bandwidth_mbit_s",
    *INTRA_NODE,
)
COSTS = (
    "cluster.compute_spread",
    "cluster.link",
    "cluster.step_s",
    "cluster.exchange_s",
    "cluster.compress_s",
    "cluster.server_step_s",
    "cluster.jitter",
    "cluster.compute",
    "cluster.node",
    *LINKS,
)
# Keys that change the learned model, and neither time nor bytes. Single keys of aggregate,
# compression, overlap, schedule and sync that change the model alone are not listed.
LEARNED = (
    "task.",
    "optimizer.",
    "outer",
    "run.save_weights",
    "run.start_from",
    "runtime.precision",
)
LEARNS = "runtime.gradients=true (nothing is learned otherwise)"
WRAPPED = (  # keys of the wrappers of a codec
    "compression.error_feedback",
    "compression.feedback_gain",
    "compression.feedback_decay",
    "compression.momentum",
    "compression.masking",
    "compression.clip_norm",
    "compression.warmup_epochs",
    "compression.critical_ratio",
)
DENSE = (Cast, NaturalCompression, OneBit, PowerSGD, Sign)  # codecs that send every element
# The settings that a key needs to have an effect. A number stands for any value except null, false
# and 0.
NEEDED = {
    "compression.bucket": "compression.quantizer=qsgd or ternary",
    "compression.entropy": "compression.quantizer=qsgd or ternary",
    "compression.feedback_decay": "compression.error_feedback=true, compression.momentum=null",
    "compression.feedback_gain": "compression.error_feedback=true, compression.momentum=null",
    "compression.levels": "compression.quantizer=qsgd",
    "compression.norm": "compression.quantizer=qsgd or ternary",
    "compression.num_levels": "compression.levels=lloyd",
    "eval.every_commits": "eval.every_s=null",
    "optimizer.horizon_epochs": "optimizer.schedule=cosine or linear or step",
    "overlap.max_ratio": "overlap.ratio=adaptive",
    "sync.barrier": "sync.delay=2",
    "sync.delay": "sync.barrier=1",
    "sync.max_lead": "sync.backups=1",
    "topology.degree": "topology.graph=random_regular",
}
FAILURES = "worker failures, for example 'cluster.churn={mtbf_s:100,mttr_s:10}'"
INTRA_NODE_EXCHANGE = (
    "workers of one node that exchange with each other, for example topology=all_reduce"
)


class EffectContext(NamedTuple):
    """The checked plan, its options and the configuration: the input of a condition."""

    config: Mapping[str, Any]
    plan: Plan
    parts: Parts
    schedule: Any
    profiled: bool  # True if a profile's costs replace those of the cluster
    data: Data

    @property
    def stages(self) -> tuple[StageParts, ...]:
        return self.parts.stages

    @property
    def cluster(self) -> Any:
        return self.parts.cluster

    @property
    def lossy(self) -> bool:
        return any(not own.compression.traits.lossless for own in self.stages)

    def any_stage(self, group: str, holds: Callable[[Any], bool]) -> bool:
        """Return True if `holds` is true of the group's option in any stage."""
        return any(holds(getattr(own, group)) for own in self.stages)


class Condition(NamedTuple):
    """Keys that have an effect only if `is_met` returns True; `needs` has the settings for that.

    A key that ends with a point stands for all keys of its group.
    """

    keys: tuple[str, ...]
    needs: str
    is_met: Callable[[EffectContext], bool]


def is_set(value: Any) -> bool:
    return value is not None and value is not False and value != 0


def has_settings(needs: str, context: EffectContext) -> bool:
    """Return True if the configuration has all settings of a row of `NEEDED`, or lacks their
    keys.
    """
    for setting in needs.split(", "):
        key, _, wanted = setting.partition("=")
        group, _, name = key.partition(".")
        if name not in context.config[group]:
            continue
        value = context.config[group][name]
        if not (is_set(value) if wanted.isdigit() else setting_text(value) in wanted.split(" or ")):
            return False
    return True


def has_server(context: EffectContext) -> bool:
    return context.any_stage("topology", lambda topology: topology.has_server)


def exchanges_inside_nodes(context: EffectContext) -> bool:
    """Return True if workers of one node exchange with each other."""
    nodes = context.cluster.node or ()
    direct = context.any_stage(
        "topology", lambda topology: not topology.has_server or isinstance(topology, Halos)
    )
    return direct and len(set(nodes)) < len(nodes)


def nodes_matter(context: EffectContext) -> bool:
    """Return True if the placement of workers on nodes changes times or groups."""

    def uses_nodes(own: StageParts) -> bool:
        groups = groups_by_node(own) and getattr(own.topology, "workers_per_node", None) is None
        return groups or isinstance(own.topology, Halos) or own.topology.algorithm is not None

    return not has_declared_exchange(context) or any(map(uses_nodes, context.stages))


def groups_by_node(own: StageParts) -> bool:
    """Return True if workers form groups by node."""
    by_group = isinstance(own.topology, PartialAllReduce)
    return by_group and not isinstance(own.sync, RipplesFirstCome | RipplesRandom)


def has_declared_exchange(context: EffectContext) -> bool:
    return context.cluster.exchange_s is not None


def is_stale(context: EffectContext) -> bool:
    """Return True if a push may be computed on an older model than the one it is merged into."""
    return any(not own.sync.in_rounds or isinstance(own.overlap, Delayed) for own in context.stages)


def plans_local_steps(context: EffectContext) -> bool:
    return any(stage.h_preset is not None for stage in context.plan.stages)


def work_differs(context: EffectContext) -> bool:
    """Return True if in some stage the workers have different numbers of local steps."""
    return plans_local_steps(context) or any(
        len({worker.local_steps for worker in stage.workers}) > 1 for stage in context.plan.stages
    )


def weighs_pushes(context: EffectContext) -> bool:
    """Return True if some stage merges pushes with weights."""
    return any(WEIGHTS in capabilities_of(own.topology, own.sync) for own in context.stages)


def has_end(context: EffectContext) -> bool:
    """Return True if epochs, steps or seconds end the run."""
    stop = context.config["stop"]
    return any(stop[key] is not None for key in ("epochs", "steps", "seconds"))


def preset_ratios(context: EffectContext) -> Sequence[float | None]:
    """Return the schedule's preset density of each stage; empty if there are none."""
    return (
        (getattr(context.schedule, "r_preset", None) or ()) if context.schedule.names_sync else ()
    )


CONDITIONS = (
    *(Condition((key,), needs, partial(has_settings, needs)) for key, needs in NEEDED.items()),
    Condition(
        COSTS,
        "profile=null (the costs of profile=FILE replace it)",
        lambda context: not context.profiled,
    ),
    Condition(
        LINKS,
        "cluster.exchange_s=null (a declared exchange_s replaces the links)",
        lambda context: not has_declared_exchange(context),
    ),
    Condition(
        ("cluster.server_bandwidth_mbit_s", "cluster.server_step_s"),
        "a topology with a server, for example topology=parameter_server",
        has_server,
    ),
    Condition(
        INTRA_NODE[:1],
        INTRA_NODE_EXCHANGE,
        lambda context: (
            exchanges_inside_nodes(context) or default_value(INTRA_NODE[0], context) is None
        ),
    ),
    Condition(INTRA_NODE[1:], INTRA_NODE_EXCHANGE, exchanges_inside_nodes),
    Condition(
        ("cluster.node",),
        "cluster.exchange_s=null, or groups by node, for example topology=partial_all_reduce"
        " sync=ripples_smart",
        nodes_matter,
    ),
    Condition(
        ("cluster.compress_s",),
        "a compression, for example compression=topk",
        lambda context: context.lossy or context.any_stage("sync", lambda sync: bool(sync.codecs)),
    ),
    Condition(
        ("cluster.failure_detection_s",),
        FAILURES,
        lambda context: context.cluster.workers_fail,
    ),
    Condition(
        ("runtime.min_workers", "runtime.on_worker_failure"),
        FAILURES,
        lambda context: context.parts.runtime.name != "sim" or context.cluster.workers_fail,
    ),
    Condition(
        ("runtime.share_gpu",),
        "a GPU, for example runtime.device=cuda",
        lambda context: device_of(context.parts.runtime) != HOST,
    ),
    Condition(
        ("runtime.reduction",),
        "an all-reduce, for example topology=all_reduce",
        lambda context: context.any_stage("topology", lambda topology: not topology.has_server),
    ),
    Condition(
        ("dataset.partition",),
        "a planned H, for example sync.local_steps=plan schedule.h_preset=[8] (shards are equal"
        " otherwise)",
        lambda context: (
            context.config["dataset"].get("partition") != "iid"
            or plans_local_steps(context)
            or context.parts.runtime.on_worker_failure == "reshard"
        ),
    ),
    Condition(
        LEARNED,
        LEARNS,
        lambda context: context.parts.runtime.gradients,
    ),
    Condition(
        ("dataset.epochs",),
        "a run without another limit: stop.epochs=null stop.steps=null stop.seconds=null",
        lambda context: not has_end(context),
    ),
    Condition(
        ("stop.target_consecutive_evals",),
        "a target, for example stop.target_accuracy=0.95",
        lambda context: any(context.config["stop"][name] is not None for name in TARGETS),
    ),
    Condition(
        ("run.compression_stats_every", "topology.pull_ratio"),
        "a compression, for example compression=topk",
        lambda context: context.lossy,
    ),
    Condition(
        ("tracking.experiment",),
        "tracking=mlflow",
        lambda context: context.config["tracking"].get("sink") in ("mlflow", "wandb"),
    ),
    Condition(
        WRAPPED,
        "a topology that merges updates, for example topology=parameter_server",
        lambda context: context.any_stage("topology", lambda topology: not topology.replicas),
    ),
    Condition(
        ("compression.momentum",),
        "compression.masking=false (this compression sends every element, and masking clears the"
        " momentum of sent elements)",
        lambda context: context.any_stage(
            "compression",
            lambda codec: (
                not isinstance(codec, DENSE) or codec.momentum is None or not codec.masking
            ),
        ),
    ),
    Condition(
        ("compression.masking",),
        "momentum in the compression, for example compression.momentum=0.9",
        lambda context: context.any_stage(
            "compression",
            lambda codec: (
                is_set(codec.momentum) or (isinstance(codec, FetchSGD) and is_set(codec.decay))
            ),
        ),
    ),
    Condition(
        ("compression.ratio",),
        "schedule.r_preset=[null,null] (the preset densities of the stages replace it)",
        lambda context: not preset_ratios(context) or None in preset_ratios(context),
    ),
    Condition(
        ("compression.conv_bin",),
        "a model with convolutions, for example model=cnn",
        lambda context: any(len(shape) > 2 for _, shape in context.plan.layers),
    ),
    Condition(
        ("schedule.r_preset",),
        "a compression with a ratio, for example compression=topk",
        lambda context: context.any_stage("compression", lambda codec: codec.ratio is not None),
    ),
    Condition(
        ("schedule.momentum",),
        "an optimizer with momentum, for example optimizer.momentum=0.9",
        lambda context: context.any_stage("optimizer", lambda optimizer: bool(optimizer.init(1))),
    ),
    Condition(
        ("schedule.profile_steps",),
        "a profiling stage: profile=null and, with schedule=ashl_next, no declared costs",
        lambda context: (
            getattr(context.schedule, "profile_steps", 0) == 0
            or context.any_stage("sync", lambda sync: isinstance(sync, Profiling))
        ),
    ),
    Condition(
        ("schedule.pull_ratio",),
        "topology.pull_ratio=null and a compression, for example compression=topk",
        lambda context: context.lossy and context.config["topology"].get("pull_ratio") is None,
    ),
    Condition(
        ("schedule.decay_factor", "schedule.loss_switch"),
        "schedule.decay_stages=2 or more",
        lambda context: getattr(context.schedule, "decay_stages", 2) > 1,
    ),
    Condition(
        ("schedule",),
        "plan=null (a given plan sets the stages)",
        lambda context: context.config["plan"] is None,
    ),
    Condition(
        ("planner",),
        "a planned H, for example schedule=ashl, or sync.local_steps=plan schedule.h_preset=[8]",
        plans_local_steps,
    ),
    Condition(("schedule.h_preset",), "sync.local_steps=plan", plans_local_steps),
    Condition(
        ("aggregate.staleness_discount",),
        "pushes that may be stale, for example with sync=asp",
        is_stale,
    ),
    Condition(
        ("aggregate.max_staleness",),
        "pushes that may be stale by more than one merge, for example with sync=asp",
        lambda context: context.any_stage("sync", lambda sync: not sync.in_rounds),
    ),
    Condition(
        ("aggregate.weights",),
        "pushes that are merged with weights, for example with sync=bsp or sync=asp",
        weighs_pushes,
    ),
    Condition(
        ("aggregate.momentum",),
        "different numbers of local steps, for example sync.local_steps=plan schedule.h_preset=[8]",
        work_differs,
    ),
    Condition(
        ("topology.workers_per_node",),
        "groups by node, for example with sync=ripples_smart or sync=ripples_static",
        lambda context: any(map(groups_by_node, context.stages)),
    ),
    Condition(
        ("overlap.local_weight",),
        "a sync mode that exchanges models, for example sync=local_sgd",
        lambda context: context.any_stage("sync", lambda sync: sync.exchange == "difference"),
    ),
)


def check_effects(context: EffectContext, overrides: Sequence[str]) -> None:
    """Refuse the first typed value that changes nothing.

    Raises: NoEffectError, a UsageError with the key.
    """
    for override in overrides:
        key = key_of(override)
        if (needs := find_unmet_need(key, context)) and not is_default(key, context):
            raise NoEffectError(
                f"{override}: no effect here, it needs {needs}; otherwise remove it", key
            )


def find_unmet_need(key: str, context: EffectContext) -> str:
    """Return what a key needs to have an effect and does not have; "" if it has an effect."""
    for condition in CONDITIONS:
        if (
            is_about(condition, key)
            and applies(condition, context)
            and not condition.is_met(context)
        ):
            return condition.needs
    return ""


def is_about(condition: Condition, key: str) -> bool:
    """Return True if a condition is about a key.

    A condition on a whole group is about the group's option and all its keys.
    """
    group, point, _ = key.partition(".")
    return not {key, group, group + point}.isdisjoint(condition.keys)


def applies(condition: Condition, context: EffectContext) -> bool:
    """Return False if a condition is about an emulated cluster and the cluster is not emulated."""
    needs_cluster = any(key.startswith("cluster.") for key in condition.keys)
    return not needs_cluster or isinstance(context.cluster, Cluster)


def is_default(key: str, context: EffectContext) -> bool:
    """Return True if a typed value equals the value in the option's file.

    A list that sets the number of workers always has an effect.
    """
    group, _, name = key.partition(".")
    if not name:
        return context.config["choices"].get(group) == defaults().get(group)
    value = nested_value(context.config[group], name)
    if key in LISTED and isinstance(value, list):
        before = default_value("cluster.compute", context)
        return value == default_value(key, context) or len(value) != len(before or value)
    return value == default_value(key, context)


def default_value(key: str, context: EffectContext) -> Any:
    """Return a key's value in the option's file; None for an option of another package."""
    group, _, name = key.partition(".")
    if group not in catalog():
        return nested_value(load_yaml(CONF / "config.yaml").get(group, {}), name)
    file = catalog()[group].get(context.config["choices"].get(group, ""))
    return nested_value(values(file), name) if file else None


def nested_value(spec: Any, name: str) -> Any:
    """Return the value of a dotted key, or None."""
    for part in name.split("."):
        spec = spec.get(part) if isinstance(spec, Mapping) else None
    return spec
