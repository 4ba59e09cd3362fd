"""Check that the chosen options work together.

Each check takes options that are already constructed and raises UsageError. The message is one
sentence, `key=value: problem; fix`, that names the incompatible options, the reason and an
alternative.

`ashl.planning.compile_plan` calls the checks in this order: single choices (`check_combination`,
`check_compression`), stages (`check_stages`, `check_annealed_values`), faults (`check_faults`), and
several servers (`check_sharded_server`). The predicates
at the end of the module answer the same questions during a run: may the run continue without a
failed worker, may a worker rejoin, may the run resume with another number of workers.

Source: Xu et al., "GRACE", ICDCS 2021, and the papers of the methods name the incompatibilities of
compression.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ashl.aggregate.fednova import FedNova
from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import FAIL, LINK_DOWN, SERVER_FAIL, Cluster, RealCluster
from ashl.compression.contract import (
    Codec,
    Collective,
    Layout,
    Linear,
    Reduces,
    Wrappable,
    size_of,
)
from ashl.compression.count_sketch import CountSketch
from ashl.compression.fetch_sgd import FetchSGD
from ashl.compression.sign import Sign
from ashl.compression.terngrad import TernGrad
from ashl.compression.wrappers import innermost, wrap_codec
from ashl.config.override import key_of
from ashl.errors import NoEffectError, UnusedKeyError, UsageError
from ashl.learn.device import HOST
from ashl.model.mlp import MLP
from ashl.optimizer.adam import Adam
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.sgd import SGD
from ashl.outer.contract import Outer
from ashl.overlap.contract import Delayed
from ashl.plan.plan import AVERAGE, TARGETS, Limits, Plan, Spec, StagePlan, WorkerPlan
from ashl.planner.goodput import Goodput
from ashl.planning.device import device_of, uses_nccl
from ashl.planning.instantiate import Parts, StageParts, layout_of
from ashl.planning.settings import STAGE_GROUPS
from ashl.stage.contract import (
    CAPABILITIES,
    CODEC,
    FAULT_TOLERANT,
    OUTER,
    PULLS,
    STATISTICS,
    WEIGHTS,
    Rule,
    Topology,
    extra_ranks,
)
from ashl.sync.profiling import Profiling
from ashl.sync.zero_one_adam import ZeroOneAdam
from ashl.task.classification import Classification
from ashl.task.contract import ACCURACY, Task
from ashl.task.regression import Regression
from ashl.topology.all_reduce import AllReduce, StepRule
from ashl.topology.gossip import Gossip
from ashl.topology.halos import Halos
from ashl.topology.parameter_server import (
    UPDATES,
    BarrierRule,
    ParameterServer,
    ServerRule,
    Updates,
)
from ashl.topology.partial_all_reduce import PartialAllReduce
from ashl.topology.sharded_server import ShardedServer

TOPOLOGIES = {  # by the name of the option
    "parameter_server": ParameterServer,
    "all_reduce": AllReduce,
    "gossip": Gossip,
    "partial_all_reduce": PartialAllReduce,
}
# topologies that no error message recommends
RELATED_TOPOLOGIES = {"halos": Halos, "sharded_server": ShardedServer}
# a sync mode that the topology supports
INSTEAD = {Gossip: "sync=d_psgd", PartialAllReduce: "sync=ripples_smart"}
# ends of a stage that depend on the loss or the accuracy
NEED_LOSS = {"loss", "evaluated_loss", "accuracy", "rises", "plateau"}
# wire codes of codecs outside this package
OWN_CODES = range(128, 256)
# Training may overshoot with at least this optimizer momentum and a codec that keeps more than this
# share of an update in the residual.
MUCH_MOMENTUM = 0.8
MUCH_RESIDUAL = 0.7
ONE_SERVER = "topology=parameter_server"
# gradient estimators that compute on minibatches, not on the whole shard
MINIBATCH_ESTIMATORS = ("minibatch", "moments")
REJOIN_KINDS = {"rejoin", "churn"}  # faults with workers that join during the run
MEMBERSHIP_KINDS = {FAIL, *REJOIN_KINDS}  # faults that change the set of running workers
TOLERANT_INSTEAD = (
    "take topology=all_reduce or topology=parameter_server with sync=bsp, or restart from"
    " checkpoints with run.checkpoint_s and --resume"
)


def check_sync_overrides(schedule: str, overrides: Sequence[str]) -> None:
    """Refuse `sync=` with a schedule that sets the sync mode of each stage.

    Raises: UnusedKeyError.
    """
    typed = [override for override in overrides if key_of(override).partition(".")[0] == "sync"]
    if typed:
        raise UnusedKeyError(
            f"{typed[0]}: no effect, schedule={schedule} sets the sync mode of each of its stages;"
            " remove it, or take schedule=single",
            key_of(typed[0]),
        )


def check_plan_overrides(
    path: str, plan: Plan, config: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Refuse settings whose value no stage of a plan file has.

    Raises: UsageError.
    """
    for override in overrides:
        group, _, key = key_of(override).partition(".")
        if group == "planner":
            specs: list[Spec] = [plan.planner]
        elif group in STAGE_GROUPS:
            specs = [getattr(stage, group) for stage in plan.stages]
        else:
            continue
        name = key or "_target_"
        if all(spec.get(name) != config[group].get(name) for spec in specs):
            raise UsageError(
                f"{override}: no effect, plan={path} sets the options of each stage; remove it, or"
                " make a new plan without plan="
            )


def check_combination(parts: dict[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse options that are incompatible before the model is built.

    Args: `parts` maps each group to its option; `choices` maps each group to the option's name.
    Raises: UsageError.
    """
    sync, topology, runtime, cluster = (
        parts[key] for key in ("sync", "topology", "runtime", "cluster")
    )
    topology_name, sync_name = choices["topology"], choices.get("sync", "")
    for key, part in (("topology", topology), ("sync", sync)):
        if unknown := sorted(
            (part.supports if part is not None and part.supports is not None else CAPABILITIES)
            - CAPABILITIES
        ):
            raise UsageError(
                f"{key}={choices[key]}: {unknown[0]!r} in `supports` is not a capability; take one"
                f" of: {', '.join(sorted(CAPABILITIES))}"
            )
    if sync is not None and not isinstance(sync, topology.policy_type):
        barrier = isinstance(sync, BarrierRule)
        why = {
            AllReduce: (
                "it decides at a server when to merge pushes"
                if barrier
                else "an all-reduce waits for all workers, so no worker can be ahead"
            ),
            Gossip: "its workers have no shared model to wait for",
        }.get(type(topology), "it has no rule for this topology")
        other = INSTEAD.get(type(topology), "sync=bsp or sync=local_sgd")
        raise UsageError(
            f"sync={sync_name}: not supported with topology={topology_name}, {why}; take"
            f" topology={' or '.join(list_compatible_topologies(sync))}, or {other}"
        )
    if type(parts["optimizer"]).statistics is not Optimizer.statistics:
        check_closed_form_optimizer(parts, choices)
    if sync is not None:
        check_stage_options(sync, parts, choices)
    if runtime.name == "sim":
        if isinstance(cluster, RealCluster):
            raise UsageError(
                "cluster=real: declares no costs, which runtime=sim needs; take another cluster,"
                " add the profile=FILE that was measured on this one, or take runtime=local"
            )
        if missing := cluster.missing():
            raise UsageError(
                f"cluster.{missing[0]}: not declared, and runtime=sim needs it (a missing cost is"
                " not zero); set a value, or measure with runtime=local"
            )
    else:
        uses_nccl(runtime, topology, cluster)


def list_compatible_topologies(sync: Rule) -> list[str]:
    """Return the names of the topologies that support this type of sync mode."""
    return [name for name, topology in TOPOLOGIES.items() if isinstance(sync, topology.policy_type)]


def check_stage_options(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Check a stage's sync mode against the other options of the stage.

    Raises: UsageError.
    """
    if sync.resizes and not weighs_by_samples(parts["aggregate"]):
        raise UsageError(
            f"aggregate={choices['aggregate']}: not supported with sync={choices['sync']}, where"
            " workers have different batch sizes and only weights by samples give the mean"
            " gradient; take aggregate=samples"
        )
    if sync.momentum_travels and not (
        isinstance(parts["optimizer"], SGD) and parts["optimizer"].momentum
    ):
        raise UsageError(
            f"sync={choices['sync']}: averages the momentum of SGD, and"
            f" optimizer={choices['optimizer']} has none here; take optimizer=sgd"
            " optimizer.momentum=0.9, or sync=local_sgd"
        )
    if isinstance(sync, ZeroOneAdam) and not is_adam(parts["optimizer"]):
        raise UsageError(
            f"sync={choices['sync']}: needs Adam, and the optimizer is"
            f" optimizer={choices['optimizer']}; take optimizer=adam or optimizer=adamw"
        )
    check_capabilities(sync, parts, choices)
    if isinstance(sync, ServerRule) and sync.messages() is not UPDATES:
        check_message_protocol(sync.messages(), parts, choices)
    topology: Topology = parts["topology"]
    if topology.pull_ratio is not None and PULLS not in topology.supports:
        raise UsageError(
            f"topology.pull_ratio: topology={choices['topology']} has no compressed pulls; remove"
            " topology.pull_ratio"
        )
    if topology.pull_ratio is not None and parts["compression"].traits.lossless:
        text = (
            "topology.pull_ratio: no effect without a compression; take compression=topk, or remove"
            " topology.pull_ratio"
        )
        raise NoEffectError(text, "topology.pull_ratio")


def is_adam(optimizer: Optimizer) -> bool:
    """Return True if the optimizer applies Adam to every parameter."""
    return isinstance(optimizer, Adam) and optimizer.elementwise


def capabilities_of(topology: Topology, sync: Rule) -> frozenset[str]:
    """Return the capabilities of the sync mode if it defines some, else those of the topology.

    A sync mode with its own message protocol defines its own capabilities.
    """
    return topology.supports if sync.supports is None else sync.supports


def check_capabilities(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse a codec, or weights of updates, that neither topology nor sync mode supports.

    Raises: UsageError.
    """
    topology: Topology = parts["topology"]
    supported = capabilities_of(topology, sync)
    if CODEC not in supported and not parts["compression"].traits.lossless:
        named = f"compression={choices['compression']}"
        if sync.supports is None and not topology.replicas:
            raise UsageError(
                f"{named}: not supported with topology={choices['topology']}; take"
                " compression=none, or topology=parameter_server"
            )
        why = "whose messages are not updates"
        fix = "take compression=none"
        if topology.replicas:
            why = "which sends whole models: most of a compressed model would be zero"
            fix += ", or sync=choco, which sends differences"
        raise UsageError(f"{named}: not supported with sync={choices['sync']}, {why}; {fix}")
    if WEIGHTS not in supported and (
        changed := describe_changed_weights(parts["aggregate"], choices["aggregate"])
    ):
        why = f"sync={choices['sync']}, which has its own rule to merge pushes"
        if topology.replicas:
            why = f"topology={choices['topology']}, where no server merges updates"
        raise UsageError(
            f"{changed}: not supported with {why}; take aggregate=mean with its defaults, and a"
            " schedule that does not scale updates"
        )


def check_closed_form_optimizer(parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse an optimizer with closed-form steps where the run cannot provide its sums.

    It needs means over all samples from one all-reduce, and a model and a loss with a closed-form
    minimum.
    Raises: UsageError.
    """
    name, sync, aggregate = f"optimizer={choices['optimizer']}", parts["sync"], parts["aggregate"]
    if not isinstance(parts["model"], MLP):
        raise UsageError(f"{name}: supports only multi-layer perceptrons; take model=mlp")
    if not isinstance(parts["task"], Classification | Regression):
        raise UsageError(
            f"{name}: supports only classification and regression; take task=classification or"
            " task=regression"
        )
    if (
        not isinstance(sync, StepRule)
        or sync.exchange != "gradient"
        or STATISTICS not in parts["topology"].supports
    ):
        raise UsageError(
            f"{name}: needs an all-reduce over all workers at every step; take sync=bsp"
            " topology=all_reduce"
        )
    if not parts["compression"].traits.lossless:
        raise UsageError(
            f"{name}: exchanges no updates, so a codec is not supported; take compression=none"
        )
    if (
        choices["aggregate"] != "mean"
        or aggregate.weights != "samples"
        or aggregate.clip_norm
        or aggregate.scale != 1
    ):
        raise UsageError(
            f"{name}: needs unweighted means over all samples; take aggregate=mean with its"
            " defaults"
        )


def check_message_protocol(
    messages: Updates, parts: Mapping[str, Any], choices: Mapping[str, str]
) -> None:
    """Refuse options that the message protocol of a sync mode does not support.

    Raises: UsageError.
    """
    sync, optimizer = f"sync={choices['sync']}", parts["optimizer"]
    if parts["topology"].pull_ratio is not None:
        raise UsageError(
            f"topology.pull_ratio: not supported with {sync}, which has its own pulls; remove"
            " topology.pull_ratio"
        )
    if messages.unbiased and not parts["compression"].traits.unbiased:
        raise UsageError(
            f"{sync}: needs an unbiased codec, and compression={choices['compression']} is biased;"
            " take compression=grid or compression=none"
        )
    plain = choices["optimizer"] == "sgd" and not optimizer.momentum and not optimizer.weight_decay
    if messages.plain and not plain:
        raise UsageError(
            f"{sync}: needs plain SGD steps; take optimizer=sgd optimizer.momentum=0"
            " optimizer.weight_decay=0"
        )


def describe_changed_weights(aggregate: Weighted, name: str) -> str | None:
    """Return the first setting of the aggregation rule that is not its default, or None."""
    if name != "mean":
        return f"aggregate={name}"
    guards = [
        key
        for key in ("staleness_discount", "clip_norm", "max_staleness")
        if getattr(aggregate, key) is not None
    ]
    return f"aggregate.{(guards or ['scale'])[0]}" if guards or aggregate.scale != 1 else None


def check_stages(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse stages that their topology cannot run, and stages that cannot follow one another.

    Raises: UsageError.
    """
    check_one_topology(stages, parts.stages)
    check_online_costs(parts, stages)
    extra = {extra_ranks(own.topology, own.sync, parts.cluster.node) for own in parts.stages}
    if len(extra) > 1:
        raise UsageError(
            "schedule: some stages need a coordinator process and others do not, and a run keeps"
            " its processes; take stages of one kind"
        )
    for before, stage, own in zip((None, *parts.stages), stages, parts.stages, strict=False):
        check_one_stage(before, stage, own, parts)
    for (previous, before), (stage, own) in pairwise(zip(stages, parts.stages, strict=True)):
        if stage.handover.get("momentum") != "reset":
            check_momentum_handover(stage.name, before, own)
        if not previous.until and type(before.sync).loop is Rule.loop:
            raise UsageError(
                f"stage {previous.name}: until is empty, so stage {stage.name} would never begin;"
                ' set until, for example {"commits": 100}'
            )


def check_online_costs(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse a planner that replans and has no costs to begin with.

    Raises: UsageError.
    """
    plans = parts.planner.follows and any(stage.h_preset is not None for stage in stages)
    declared = isinstance(parts.cluster, Cluster) and not parts.cluster.missing()
    if plans and not declared and not isinstance(parts.stages[0].sync, Profiling):
        raise UsageError(
            f"planner={option_name(parts.planner)}: needs initial costs, from the cluster or from a"
            " profiling stage, and"
            " there are none; take planner=balanced, or remove profile=FILE and take a schedule"
            " that profiles, for example schedule=ashl_next"
        )


def check_one_stage(
    before: StageParts | None, stage: StagePlan, own: StageParts, parts: Parts
) -> None:
    """Refuse a stage whose options are incompatible.

    Args: `before` has the options of the stage before, or None.
    Raises: UsageError.
    """
    sync, topology = own.sync, own.topology
    if sync.after_adam and not (
        before and is_adam(own.optimizer) and stage.handover.get("momentum") != "reset"
    ):
        raise UsageError(
            f"stage {stage.name}: sync={option_name(sync)} needs the moments of a stage with Adam;"
            " take schedule=one_bit_adam optimizer=adam"
        )
    check_quorum(sync, len(stage.workers))
    check_stage_end(stage, parts)
    if not isinstance(sync, topology.policy_type):
        raise UsageError(
            f"stage {stage.name}: sync={option_name(sync)} is not supported with"
            f" topology={topology_name(topology)}; take"
            f" topology={' or '.join(list_compatible_topologies(sync))}, or one sync mode for the"
            f" whole run, for example {INSTEAD.get(type(topology), 'sync=bsp')}"
        )
    if isinstance(topology, Halos):
        topology.check_tree(
            sync, parts.cluster.node, stage.h_preset is not None and parts.planner.follows
        )
    try:
        check_stage_options(
            sync, vars(own), {group: option_name(option) for group, option in vars(own).items()}
        )
    except NoEffectError:
        raise
    except UsageError as error:
        raise UsageError(f"stage {stage.name}: {error}") from error
    if stage.outer != AVERAGE:
        check_outer_optimizer(stage.name, sync, topology)


def check_stage_end(stage: StagePlan, parts: Parts) -> None:
    """Refuse a stage whose end depends on a value that the run does not have.

    Raises: UsageError.
    """
    if not parts.runtime.gradients and set(stage.until) & NEED_LOSS:
        raise UsageError(
            f"runtime.gradients=false: nothing is learned, and stage {stage.name} ends by"
            f" {', '.join(stage.until)}; take one sync mode for the whole run, for example sync=asp"
            " schedule=single"
        )
    if "accuracy" in stage.until and parts.task.metric != ACCURACY:
        raise UsageError(
            f"stage {stage.name}: until has accuracy, which the task does not report; take another"
            " end, for example loss"
        )


def option_name(option: Any) -> str:
    """Return an option's name as a user types it: the name of its file."""
    return (
        topology_name(option)
        if isinstance(option, Topology)
        else type(option).__module__.rpartition(".")[2]
    )


def check_momentum_handover(stage: str, before: StageParts, own: StageParts) -> None:
    """Refuse to keep momentum that the next stage's optimizer cannot use.

    The optimizer needs the same number of moments as the one before. Without a server, the moments
    must be identical on all workers.
    Raises: UsageError.
    """
    held, wanted = (len(parts.optimizer.init(1)) for parts in (before, own))
    identical = not wanted or before.sync.exchange == "gradient" or own.sync.exchange != "gradient"
    if held == wanted and (identical or own.topology.has_server):
        return
    why = "it differs between workers after local steps, and this stage needs the same on all"
    if held != wanted:
        why = f"this optimizer has {wanted} moments and the one before {held}"
    raise UsageError(
        f"stage {stage}: cannot keep the momentum of the stage before, {why}; take"
        " schedule.momentum=reset (in a plan file handover.momentum)"
    )


def check_outer_optimizer(stage: str, sync: Rule, topology: Topology) -> None:
    """Refuse an outer optimizer where no updates are merged, or another optimizer steps on them.

    Raises: UsageError.
    """
    supported = capabilities_of(topology, sync)
    if OUTER in supported and sync.exchange == "difference":
        return
    why = f"sync={option_name(sync)} does not push updates"
    if topology.replicas:
        why = "workers average their models, and no server merges updates"
    elif OUTER in supported:
        why = "gradients are merged, and `optimizer` steps on them"
    raise UsageError(
        f"outer: an outer optimizer has no effect in stage {stage}, {why}; take outer=average, or a"
        " mode that merges updates, for example sync=local_sgd"
    )


def check_one_topology(stages: Sequence[StagePlan], parts: Sequence[StageParts]) -> None:
    """Refuse stages of different topologies: a rank's state depends on the topology.

    Raises: UsageError.
    """
    for stage, own in zip(stages, parts, strict=True):
        if type(own.topology) is not type(parts[0].topology):
            raise UsageError(
                f"stage {stage.name}: topology={topology_name(own.topology)} differs from"
                f" topology={topology_name(parts[0].topology)} of stage {stages[0].name}, and a"
                " worker's state cannot be converted; take one topology for the whole run"
            )


def topology_name(topology: Topology) -> str:
    """Return the topology's name as a user types it."""
    return next(
        (
            name
            for name, kind in (TOPOLOGIES | RELATED_TOPOLOGIES).items()
            if isinstance(topology, kind)
        ),
        type(topology).__name__,
    )


def weighs_by_samples(aggregate: Weighted) -> bool:
    """Return True if the weight of a worker is in proportion to its samples."""
    one = WorkerPlan(
        local_steps=1, batch=1, data_share=0.5, compression_ratio=1.0, predicted_cycle_s=None
    )
    few, many = aggregate.weigh([one, replace(one, batch=3)])
    return many == 3 * few


def check_worker_count(sync: Rule | None, topology: Topology, num_workers: int, seed: int) -> None:
    """Refuse a sync mode or topology that does not support this number of workers.

    Raises: UsageError.
    """
    if sync is not None:
        check_quorum(sync, num_workers)
        topology.check(sync, num_workers, seed)


def check_quorum(sync: Rule, num_workers: int) -> None:
    """Refuse a quorum that is not a whole number from 1, or is more than the workers of a barrier.

    Raises: UsageError.
    """
    quorum = sync.quorum(num_workers)
    most = num_workers if sync.in_rounds else math.inf
    if type(quorum) is not int or not 1 <= quorum <= most:
        upper = "" if most == math.inf else f", at most the {num_workers} workers"
        raise UsageError(
            f"sync: the quorum of '{type(sync).__module__}.{type(sync).__name__}' is {quorum!r};"
            f" return the number of pushes in a merge, a whole number from 1{upper}"
        )


def count_workers(parts: Mapping[str, Any], world_size: int | None) -> int:
    """Return the number of workers.

    A job with as many processes as workers runs its server or coordinator as an additional process
    on the node of process 0.
    Raises: UsageError if the job's size does not fit the number of workers.
    """
    cluster, runtime, topology = (parts[key] for key in ("cluster", "runtime", "topology"))
    num_workers, extra = cluster.num_workers, extra_ranks(topology, parts["sync"], cluster.node)
    if isinstance(cluster, RealCluster):
        check_host_keys(cluster, runtime.name, extra)
    if runtime.name != "torchrun":
        if num_workers is None:
            raise UsageError(
                "cluster=real: the number of workers is not given; set it, for example"
                " cluster.num_workers=2"
            )
        return num_workers
    if world_size is None:
        raise UsageError(
            "runtime=torchrun: this process is not part of a job; start it as `torchrun … -m"
            " ashl.cli train …`"
        )
    other = "server" if topology.has_server else "coordinator"
    shared = 1 if extra == 1 else 0  # servers or coordinators that may share a worker's node
    if num_workers is None and extra and world_size - extra <= 1:
        alone = max(0, world_size - extra)
        fixes = [f"start {2 + extra} processes"]
        if shared and world_size > 1:
            fixes += [
                f"set cluster.num_workers={world_size} (the {other} then shares the node of process"
                " 0)"
            ]
        if alone:
            fixes += ["set cluster.num_workers=1 for one worker"]
        fixes += [f"take a topology without a {other}"]
        raise UsageError(
            f"runtime=torchrun: {pluralize(world_size, 'process gives', 'processes give')}"
            f" {pluralize(alone, 'worker', 'workers')} and {pluralize(extra, other, other + 's')},"
            f" and a run needs two workers; {', or '.join(fixes)}"
        )
    if num_workers is None:
        return world_size - extra
    if world_size - num_workers not in (extra, extra - shared):
        beside = f" and {pluralize(extra, other, other + 's')}" if extra else ""
        less = f", or {num_workers} if the {other} shares a node" if shared else ""
        raise UsageError(
            f"runtime=torchrun: the job has {pluralize(world_size, 'process', 'processes')}, and"
            f" {pluralize(num_workers, 'worker', 'workers')}{beside} need"
            f" {num_workers + extra}{less}; change --nproc-per-node or the cluster"
        )
    return num_workers


def pluralize(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def check_host_keys(cluster: RealCluster, runtime: str, extra: int) -> None:
    """Refuse keys that place workers or a server where the launcher cannot place them.

    Raises: UsageError.
    """
    for key, value in (("hosts", cluster.hosts), ("server_host", cluster.server_host)):
        if value is not None and runtime != "torchrun":
            raise UsageError(
                f"cluster.{key}: places processes of a job, and runtime={runtime} starts its own on"
                " this machine; start the command on these hosts, for example by torchrun, or"
                f" remove cluster.{key}"
            )
    if cluster.server_host is not None and not extra:
        text = (
            "cluster.server_host: no effect, this run has no server; remove it, or take another"
            " topology"
        )
        raise UnusedKeyError(text, "cluster.server_host")


def check_targets(limits: Limits, gradients: bool, task: Task, name: str) -> None:
    """Refuse targets that the run cannot reach or does not measure.

    Raises: UsageError.
    """
    if limits.target_accuracy is not None and task.metric != ACCURACY:
        metric = f"the metric {task.metric}" if task.metric else "no metric"
        instead = "stop.target_metric" if task.metric else "stop.target_loss"
        raise UsageError(
            f"stop.target_accuracy: task={name} reports {metric}, not accuracy; take {instead}"
        )
    if limits.target_metric is not None and not task.metric:
        raise UsageError(
            f"stop.target_metric: task={name} reports no metric; take stop.target_loss"
        )
    if not gradients and any(getattr(limits, target) is not None for target in TARGETS):
        raise UsageError(
            "runtime.gradients=false: nothing is learned, so no target can be reached; remove"
            " stop.target_…"
        )
    if not gradients and limits.patience is not None:
        raise NoEffectError(
            "stop.patience: no effect, runtime.gradients=false evaluates nothing; remove"
            " stop.patience",
            "stop.patience",
        )


def check_compression(
    parts: Mapping[str, Any],
    choices: Mapping[str, str],
    layout: Layout,
    num_workers: int,
) -> list[str]:
    """Check the codec against the other options.

    Args: `layout` has the name and shape of each layer of the model.
    Returns: notes on a codec that is accepted, one sentence each.
    Raises: UsageError.
    """
    option, topology, sync = parts["compression"], parts["topology"], parts["sync"]
    name = f"compression={choices['compression']}"
    check_signs(name, option, parts["optimizer"])
    codec = wrap_codec(option, layout)
    if codec.traits.lossless:
        return []
    check_codec_roles(name, innermost(codec))
    check_wrappers(name, option, parts["optimizer"], layout)
    if sync is not None:
        check_codec_exchange(name, option, sync, choices["sync"], parts["optimizer"])
    elif codec.estimator != "minibatch" or codec.traits.full_gradient:
        raise UsageError(
            f"{name}: compresses gradients, and the stages of schedule={choices['schedule']}"
            " exchange differences of models; take schedule=single sync=bsp"
        )
    if codec.traits.reduces:
        check_merged_aggregate(name, parts["aggregate"], choices["aggregate"])
    if isinstance(option, CountSketch):
        check_sketch(name, option, topology, parts["optimizer"])
    d = size_of(layout)
    check_pull_codec(name, option, topology, d)
    check_codec_topology(name, option, codec, choices["topology"], topology, d)
    return note_compression(name, option, codec, parts, d, num_workers)


def check_pull_codec(name: str, option: Codec, topology: Topology, d: int) -> None:
    """Refuse compressed pulls with a codec that cannot encode them.

    Raises: UsageError.
    """
    if not topology.has_server or topology.pull_ratio is None:
        return
    pulled = option.for_pulls()
    if not (pulled.decodes_alone and pulled.traits.contraction and not pulled.traits.reduces):
        raise UsageError(
            f"topology.pull_ratio: not supported with {name}, a pull needs a contraction without"
            " state, for example compression=topk; remove topology.pull_ratio, or take another"
            " compression"
        )
    check_density("topology.pull_ratio", topology.pull_ratio, d)


def check_codec_topology(
    name: str, option: Codec, codec: Codec, topology_name: str, topology: Topology, d: int
) -> None:
    """Refuse a codec whose payloads the topology cannot merge.

    Raises: UsageError.
    """
    all_reduce = topology_name == "all_reduce"
    if isinstance(option, TernGrad) and option.shared_scale and not all_reduce:
        raise UsageError(
            f"compression.shared_scale=true: {name} agrees on a scale before each all-reduce, and"
            f" topology={topology_name} has none; take topology=all_reduce, or"
            " compression.shared_scale=false"
        )
    if topology.replicas and not (option.decodes_alone and shrinks_differences(option, d)):
        raise UsageError(
            f"{name}: not supported with topology={topology_name}, neighbours need a contraction"
            " without state; take another compression, for example compression=topk"
        )
    adaptive = option.critical_ratio is not None  # each worker decides how many elements it sends
    if adaptive and codec.traits.linear and all_reduce:
        raise UsageError(
            "compression.critical_ratio: each worker chooses its own density, and the all-reduce"
            f" of {name} needs the same density on all; remove it, or take"
            " topology=parameter_server"
        )


def check_codec_roles(name: str, codec: Codec) -> None:
    """Refuse a codec that has a role's methods and does not derive from the role's class.

    Raises: UsageError.
    """
    for role, promised in {
        Reduces: codec.traits.reduces,
        Linear: codec.traits.linear,
        Collective: False,
    }.items():
        methods = {key for key in vars(role) if not key.startswith("_")}
        if not isinstance(codec, role) and (promised or methods & set(dir(codec))):
            raise UsageError(
                f"{name}: has traits or methods of a {role.__name__} and is not one; derive"
                f" {type(codec).__name__} from ashl.compression.contract.{role.__name__}"
            )
    if (
        codec.decodes_alone
        and not type(codec).__module__.startswith("ashl.")
        and codec.code not in OWN_CODES
    ):
        raise UsageError(
            f"{name}: its wire code is {codec.code}, which is reserved; give {type(codec).__name__}"
            f" a `code: ClassVar[int]` from {OWN_CODES[0]} to {OWN_CODES[-1]}"
        )


def shrinks_differences(option: Codec, d: int) -> bool:
    """Return True if repeated encoding of the remaining difference makes it tend to zero."""
    traits = option.traits
    return not traits.scale_free and (
        traits.contraction or traits.drains or option.bound(None, d) < 1
    )


def check_wrappers(name: str, option: Codec, optimizer: Optimizer, layout: Layout) -> None:
    """Refuse momentum in two places, and densities of less than one element.

    Raises: UsageError.
    """
    if option.momentum is not None:
        if momentum := optimizer.momentum:
            raise UsageError(
                f"compression.momentum={option.momentum:g}: with optimizer.momentum={momentum:g}"
                " momentum is applied twice; set optimizer.momentum=0"
            )
        if option.error_feedback and not (option.traits.contraction or option.traits.drains):
            raise UsageError(
                f"compression.momentum={option.momentum:g}: {name} is not a contraction, so it has"
                " no residual to correct; remove compression.momentum"
            )
    d = size_of(layout)
    ratio, critical = option.ratio, option.critical_ratio
    for key, share in {"ratio": ratio, "critical_ratio": critical}.items():
        if share is not None:
            check_density(f"compression.{key}", share, d)
    if critical is not None and ratio is not None and critical < ratio:
        raise UsageError(
            f"compression.critical_ratio={critical:g}: the density while gradients change fast is"
            f" less than compression.ratio={ratio:g}, the density otherwise; exchange the two"
            " values"
        )


def check_density(key: str, share: float, d: int) -> None:
    """Refuse a density that sends less than one of `d` elements.

    Raises: UsageError.
    """
    if share * d < 1:
        raise UsageError(
            f"{key}={share:g}: sends less than one of the model's {d} elements; take at least 1/{d}"
        )


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True if a step is lr · gradient, except for weight decay."""
    return isinstance(optimizer, SGD) and not optimizer.momentum


def check_codec_exchange(
    name: str, codec: Codec, sync: Rule, sync_name: str, optimizer: Optimizer
) -> None:
    """Refuse a codec that is not made for the vectors that the sync mode exchanges.

    Raises: UsageError.
    """
    gradients = "sync=bsp" + (", or compression.scale=mean" if isinstance(codec, Sign) else "")
    if codec.traits.scale_free and sync.exchange != "gradient":
        raise UsageError(
            f"{name}: loses the length of an update, so it is for gradients, and sync={sync_name}"
            f" exchanges differences of models; take {gradients}"
        )
    estimator = codec.estimator
    curved = codec.traits.full_gradient and not is_plain_sgd(optimizer)
    if (codec.traits.full_gradient or estimator != "minibatch") and sync.exchange != "gradient":
        raise UsageError(
            f"{name}: compresses gradients, and sync={sync_name} exchanges differences of models;"
            f" take sync=bsp{' optimizer=sgd optimizer.momentum=0' if curved else ''}"
        )
    if curved:
        raise UsageError(
            f"{name}: compares changes of gradients with the steps of plain SGD; take optimizer=sgd"
            " optimizer.momentum=0"
        )
    if estimator == "full" and sync.resizes:
        raise UsageError(
            f"compression.estimator=full: uses all samples of a worker at once, so sync={sync_name}"
            " has no batch sizes to choose; take sync=bsp, or compression.estimator=minibatch"
        )


def check_signs(name: str, option: Codec, optimizer: Optimizer) -> None:
    """Refuse settings of sign codecs that contradict each other, and momentum in two places.

    Raises: UsageError.
    """
    if isinstance(option, Sign) and option.vote == "majority" and option.scale != "none":
        fix = "compression.scale=none" + (
            " compression.error_feedback=false" if option.error_feedback else ""
        )
        raise UsageError(
            f"compression.scale={option.scale}: compression.vote=majority applies signs without a"
            f" scale; set {fix}"
        )
    if isinstance(option, Sign) and option.scale == "none" and option.per_layer:
        raise UsageError(
            "compression.per_layer: no effect, compression.scale=none has no scale per layer;"
            " remove compression.per_layer"
        )
    if option.beta is not None:
        for key, momentum in (("compression", option.momentum), ("optimizer", optimizer.momentum)):
            if momentum:
                raise UsageError(
                    f"compression.beta={option.beta:g}: {name} sends a momentum, so with"
                    f" {key}.momentum={momentum:g} momentum is applied twice; set"
                    f" {key}.momentum={'null' if key == 'compression' else 0}, or"
                    " compression.beta=null"
                )


def check_sketch(name: str, option: CountSketch, topology: Topology, optimizer: Optimizer) -> None:
    """Refuse a sketch where a worker cannot know which part of the sum was recovered.

    Raises: UsageError.
    """
    if topology.has_server and (option.error_feedback or option.momentum is not None):
        raise UsageError(
            f"{name}: a worker keeps the elements that were not recovered, and a server does not"
            " send their indices; take topology=all_reduce, compression=fetch_sgd, or"
            " compression.error_feedback=false without compression.momentum"
        )
    if topology.replicas:
        raise UsageError(
            f"{name}: not supported with averages of neighbours, a recovered vector may be longer"
            " than the encoded one; take compression=topk, or topology=all_reduce"
        )
    momentum = optimizer.momentum
    if isinstance(option, FetchSGD) and option.decay and momentum:
        raise UsageError(
            f"compression.decay={option.decay:g}: {name} keeps momentum in the sketch, so with"
            f" optimizer.momentum={momentum:g} momentum is applied twice; set optimizer.momentum=0"
        )


def check_merged_aggregate(name: str, aggregate: Weighted, aggregate_name: str) -> None:
    """Refuse weights of single payloads where all payloads are decoded together.

    Raises: UsageError.
    """
    if isinstance(aggregate, FedNova):
        raise UsageError(
            f"aggregate={aggregate_name}: weighs each payload, and {name} merges all payloads at"
            " once; take aggregate=mean"
        )
    if aggregate.staleness_discount is not None:
        raise UsageError(
            f"aggregate.staleness_discount: weighs each payload, and {name} merges all payloads at"
            " once; remove it"
        )


def note_dense_pulls(plan: Plan, parts: Parts) -> tuple[str, ...]:
    """Return a note on `topology.pull_ratio` where pushes are compressed and pulls could be."""
    d = plan.num_params
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        topology, codec, sync = own.topology, own.compression, own.sync
        plain = isinstance(sync, ServerRule) and sync.messages() is UPDATES
        if (
            not plain
            or codec.traits.lossless
            or PULLS not in topology.supports
            or topology.pull_ratio is not None
        ):
            continue
        sent = max(worker.message_bytes or 0 for worker in stage.workers)
        pulled = codec.for_pulls()
        if (
            sent < 4 * d
            and pulled.decodes_alone
            and pulled.traits.contraction
            and not pulled.traits.reduces
        ):
            return (
                (
                    f"pushes are compressed and pulls are not ({4 * d / 1e6:.3g} MB each);"
                    " topology.pull_ratio=0.1 also compresses pulls"
                ),
            )
    return ()


def note_compression(
    name: str, option: Codec, codec: Codec, parts: Mapping[str, Any], d: int, num_workers: int
) -> list[str]:
    """Return notes on a codec that is accepted, one sentence each."""
    topology, sync, momentum = parts["topology"], parts["sync"], parts["optimizer"].momentum
    ratio, gradients = option.ratio, sync is not None and sync.exchange == "gradient"
    notes = []
    if is_biased_without_residual(option):
        takes_feedback = codec.traits.contraction or codec.traits.drains
        without = (
            " without compression.error_feedback=true"
            if takes_feedback
            else ", which does not support error feedback,"
        )
        notes.append(
            f"{name}{without} is biased: elements are lost, and training may stop improving"
        )
    if codec.traits.full_gradient and codec.estimator == "minibatch":
        notes.append(
            f"{name} with compression.estimator=minibatch sees gradient noise as change: it skips"
            " hardly any push"
        )
    if (
        gradients
        and option.error_feedback
        and momentum >= MUCH_MOMENTUM
        and codec.bound(ratio, d) > MUCH_RESIDUAL
    ):
        notes.append(
            f"{name} keeps most of an update in the residual, and optimizer.momentum={momentum:g}"
            " repeats it: training may overshoot; optimizer.momentum=0 with a larger optimizer.lr,"
            " or compression.momentum, may help"
        )
    if (
        topology.has_server
        and not codec.traits.variable
        and codec.encoded_nbytes(ratio, d) >= 4 * d
    ):
        notes.append(
            f"{name} saves no bytes here: {codec.encoded_nbytes(ratio, d) / 1e6:.3g} MB a push, as"
            " much as without compression"
        )
    if not topology.has_server and not codec.traits.linear:
        notes += note_gathered_payloads(name, codec, ratio, d, num_workers)
    return notes


def is_biased_without_residual(option: Codec) -> bool:
    """Return True if a codec is biased and no residual keeps the elements that it leaves out."""
    residual = (
        not isinstance(option, Wrappable) or option.error_feedback or option.momentum is not None
    )
    biased = option.decodes_alone and not option.traits.unbiased and not option.traits.reduces
    return biased and not residual


def note_gathered_payloads(
    name: str, codec: Codec, ratio: float | None, d: int, num_workers: int
) -> list[str]:
    """Return a note if gathered payloads are at least as many bytes as a dense ring all-reduce."""
    if isinstance(innermost(codec), Collective):
        return []
    gathered = codec.encoded_nbytes(ratio, d) * (num_workers - 1)
    ring = 2 * (num_workers - 1) / num_workers * 4 * d
    if gathered < ring:
        return []
    most = "up to " if codec.traits.variable else ""
    return [
        f"{name} cannot be summed in encoded form, so its payloads are gathered:"
        f" {most}{gathered / 1e6:.3g} MB a round; all-reduce without compression moves"
        f" {ring / 1e6:.3g} MB"
    ]


def check_annealed_values(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse a server learning rate that cannot change between stages, and an H by gradient noise
    that cannot be planned.

    Raises: UsageError.
    """
    for (before, stage), own in zip(pairwise(stages), parts.stages[1:], strict=True):
        if (
            stage.aggregate["scale"] != before.aggregate["scale"]
            and own.sync.exchange != "difference"
        ):
            raise UsageError(
                f"stage {stage.name}: the server learning rate (aggregate.scale) changes, and"
                f" sync={option_name(own.sync)} has none, as it merges gradients; take a mode that"
                " merges updates, for example sync=local_sgd sync.local_steps=1, or"
                " optimizer.schedule=cosine"
            )
    if isinstance(parts.planner, Goodput):
        for stage, own in zip(stages, parts.stages, strict=True):
            if stage.h_preset is not None and (why := explain_unseen_updates(own, parts)):
                raise UsageError(
                    f"planner=goodput: compares whole updates of workers, and in stage {stage.name}"
                    f" {why}; take planner=online"
                )


def explain_unseen_updates(own: StageParts, parts: Parts) -> str | None:
    """Return why no server receives whole updates of single workers, or None if one does."""
    if not parts.runtime.gradients:
        return "runtime.gradients=false computes none"
    if not own.topology.has_server or isinstance(own.topology, Halos):
        return f"topology={option_name(own.topology)} has no server that receives them"
    if own.compression.traits.reduces:
        return f"compression={option_name(own.compression)} decodes only all payloads together"
    if own.overlap.fragments:
        return f"overlap={option_name(own.overlap)} sends single fragments"
    plain = (
        isinstance(own.sync, ServerRule)
        and own.sync.messages() is UPDATES
        and not own.sync.momentum_travels
    )
    if not plain or own.sync.exchange != "difference":
        return f"sync={option_name(own.sync)} does not push updates"
    return None


def check_sharded_server(plan: Plan, parts: Parts) -> None:
    """Refuse several servers where the model cannot be merged shard by shard.

    Raises: UsageError.
    """
    topology, cluster = parts.stages[0].topology, parts.cluster
    if not isinstance(topology, ShardedServer):
        return
    name = f"topology={option_name(topology)}"
    topology.bounds([layer.size for layer in layout_of(plan.layers)])
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if own.topology != topology:
            raise UsageError(
                f"{name}: stage {stage.name} has other shards than stage {plan.stages[0].name}, and"
                " servers cannot exchange shards; take the same topology.servers and"
                " topology.partition_by in all stages"
            )
        check_sharded_stage(name, stage, own, parts)
    if isinstance(cluster, Cluster) and cluster.exchange_s is not None:
        raise UsageError(
            f"{name}: no effect with cluster.exchange_s, where no NIC is ever busy; set"
            " cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s, or take"
            f" {ONE_SERVER}"
        )
    if isinstance(cluster, Cluster) and cluster.node is not None:
        raise UsageError(
            f"{name}: not supported with cluster.node, which does not place several servers; take"
            f" cluster.node=null, or {ONE_SERVER}"
        )


def check_sharded_stage(name: str, stage: StagePlan, own: StageParts, parts: Parts) -> None:
    """Refuse a stage that needs the whole model at one server.

    Raises: UsageError.
    """
    sync, outer = own.sync, own.outer
    plain = type(sync).loop is Rule.loop and type(sync).step is Rule.step
    if (
        not isinstance(sync, ServerRule)
        or not plain
        or sync.messages() is not UPDATES
        or sync.takes_all
    ):
        raise UsageError(
            f"{name}: merges updates shard by shard, and sync={option_name(sync)} has its own loop,"
            f" messages or step; take sync=bsp, local_sgd, asp or ssp, or {ONE_SERVER}"
        )
    if stage.h_preset is not None and parts.planner.follows:
        raise UsageError(
            f"{name}: not supported with a planner that replans, no server receives whole pushes;"
            f" take planner=balanced, or {ONE_SERVER}"
        )
    if sync.exchange == "gradient" and not own.optimizer.elementwise:
        raise UsageError(
            f"{name}: not supported with optimizer={option_name(own.optimizer)}, which steps on"
            f" whole layers, and a server has a shard; take optimizer=sgd, or {ONE_SERVER}"
        )
    if type(outer).for_layers is not Outer.for_layers:
        raise UsageError(
            f"{name}: not supported with outer={option_name(outer)}, which steps on whole layers;"
            f" take outer=nesterov, or {ONE_SERVER}"
        )


def overlaps_steps(own: StageParts) -> bool:
    """Return True if a worker exchanges while it computes."""
    return isinstance(own.overlap, Delayed) or not own.overlap.serial


def blocks_on_failure(own: StageParts) -> bool:
    """Return True if an overlapped exchange with a server blocks when a worker fails.

    It does not where the server merges whole updates, or where workers regroup.
    """
    whole = (
        isinstance(own.topology, ParameterServer)
        and isinstance(own.overlap, Delayed)
        and not own.overlap.fragments
    )
    return overlaps_steps(own) and not (whole or own.topology.regroups)


def survives_only_in_sim(own: StageParts, parts: Parts) -> bool:
    """Return True if the stage survives a failed worker only in virtual time.

    Real processes cannot abort collectives of NCCL.
    """
    return (
        exchanges_by_collectives(own)
        and parts.runtime.backend != "gloo"
        and device_of(parts.runtime) != HOST
    )


def exchanges_by_collectives(own: StageParts) -> bool:
    """Return True if workers exchange by all-reduce."""
    return isinstance(own.topology, AllReduce | PartialAllReduce)


def forbids_rejoin(own: StageParts) -> bool:
    """Return True if a failed worker cannot rejoin."""
    return isinstance(own.topology, ShardedServer)


def has_failure_protocol(own: StageParts) -> bool:
    """Return True if the topology and the sync mode have a protocol for failed workers."""
    tolerant = FAULT_TOLERANT in capabilities_of(own.topology, own.sync)
    return tolerant and not own.topology.has_fixed_size


def survives_failure(parts: Parts) -> bool:
    """Return True if a run on real processes continues without a failed worker in every stage."""
    return not sends_messages_by_nccl(parts) and all(
        has_failure_protocol(own)
        and not (blocks_on_failure(own) or survives_only_in_sim(own, parts))
        for own in parts.stages
    )


def can_block_forever(parts: Parts) -> bool:
    """Return True if workers may block on a hung worker until its process ends.

    Messages of an all-reduce over some of the workers cannot be aborted.
    """
    return any(isinstance(own.topology, PartialAllReduce) for own in parts.stages)


def sends_messages_by_nccl(parts: Parts) -> bool:
    """Return True if NCCL carries the messages of a server, which cannot be aborted."""
    return parts.runtime.backend == "nccl" and parts.stages[0].topology.has_server


def admits_rejoin(parts: Parts) -> bool:
    """Return True if a failed worker, or its replacement, can rejoin a run on real processes."""
    return survives_failure(parts) and not any(map(forbids_rejoin, parts.stages))


def describe_modes(parts: Parts) -> str:
    """Return the topologies, sync modes and overlaps of a run as a user types them."""
    words = list[str]()
    for own in parts.stages:
        words += [f"topology={option_name(own.topology)}", f"sync={option_name(own.sync)}"]
        words += [f"overlap={option_name(own.overlap)}"] if overlaps_steps(own) else []
    return " ".join(dict.fromkeys(words))


def check_other_worker_count(parts: Parts, run_dir: Path) -> None:
    """Refuse to resume with another number of workers where the saved state belongs to workers.

    Raises: UsageError.
    """
    for own in parts.stages:
        shared_state = isinstance(own.topology, ParameterServer | AllReduce)
        plain = not isinstance(own.sync, ServerRule) or own.sync.messages() is UPDATES
        if overlaps_steps(own) or not (shared_state and plain) or not has_failure_protocol(own):
            raise UsageError(
                f"cluster.num_workers: a run with {describe_modes(parts)} cannot resume with"
                " another number of workers, its checkpoint has state of each worker; start a new"
                f" run from its weights with run.start_from={run_dir}"
            )


def check_max_restarts(parts: Parts, checkpoint_s: float | None) -> None:
    """Refuse `runtime.max_restarts` where a restarted worker could not rejoin.

    Raises: UsageError.
    """
    runtime = parts.runtime
    if runtime.name == "sim" or not runtime.max_restarts:
        return
    named = f"runtime.max_restarts={runtime.max_restarts}"
    if runtime.name != "local":
        raise UsageError(
            f"{named}: with runtime={runtime.name} the launcher of the job restarts processes; set"
            " runtime.max_restarts=0"
        )
    if checkpoint_s is not None:
        raise UsageError(
            f"{named}: a run with run.checkpoint_s does not support rejoins; remove one of the two"
        )
    if not admits_rejoin(parts):
        raise UsageError(
            f"{named}: a run with {describe_modes(parts)} does not support rejoins; remove it, or"
            " take topology=parameter_server or all_reduce with sync=bsp overlap=none, or restart"
            " from checkpoints with run.checkpoint_s and --resume"
        )


def check_failure_keys(parts: Parts) -> None:
    """Refuse settings of failure handling in a run that ends at the first failure.

    Raises: UsageError.
    """
    runtime, named = parts.runtime, list[str]()
    if runtime.min_workers > 1:
        named.append(f"runtime.min_workers={runtime.min_workers}")
    if runtime.on_worker_failure != "skip":
        named.append(f"runtime.on_worker_failure={runtime.on_worker_failure}")
    if named and not all(map(has_failure_protocol, parts.stages)):
        raise UsageError(
            f"{', '.join(named)}: a run with {describe_modes(parts)} ends when a worker fails;"
            f" remove it, or {TOLERANT_INSTEAD}"
        )


def check_faults(parts: Parts, stages: Sequence[StagePlan], checkpoint_s: float | None) -> None:
    """Refuse injected faults, and settings of failure handling, that the run does not support.

    Raises: UsageError.
    """
    check_max_restarts(parts, checkpoint_s)
    fault_kinds, n = set(parts.cluster.fault_kinds), len(stages[0].workers)
    if parts.runtime.min_workers > n:
        raise UsageError(
            f"runtime.min_workers={parts.runtime.min_workers}: the run has {n} workers; take at"
            f" most {n}"
        )
    check_failure_keys(parts)
    if parts.runtime.on_worker_failure == "reshard":
        check_reshard(parts, stages)
    if not fault_kinds:
        return
    named = ", ".join(sorted(fault_kinds))
    if parts.runtime.name != "sim" and (fault_kinds - {FAIL} or parts.runtime.name != "local"):
        raise UsageError(
            f"cluster.events, cluster.churn ({named}): supported in virtual time only, except fail"
            " with runtime=local; take runtime=sim"
        )
    if checkpoint_s is not None:
        raise UsageError(
            f"run.checkpoint_s: not supported together with injected faults ({named}); remove"
            " run.checkpoint_s, or the faults"
        )
    if SERVER_FAIL in fault_kinds and not parts.stages[0].topology.has_server:
        raise UsageError(
            f"cluster.events: topology={option_name(parts.stages[0].topology)} has no server that"
            " could fail; remove server_fail, or take topology=parameter_server"
        )
    for stage, own in zip(stages, parts.stages, strict=True):
        check_stage_faults(stage.name, own, parts, fault_kinds)


def check_stage_faults(name: str, own: StageParts, parts: Parts, fault_kinds: set[str]) -> None:
    """Refuse faults that a stage cannot handle.

    Raises: UsageError.
    """
    named = ", ".join(sorted(fault_kinds))
    where = f"cluster.{'churn' if 'churn' in fault_kinds else 'events'} ({named})"
    if fault_kinds & MEMBERSHIP_KINDS and not has_failure_protocol(own):
        mode = (
            f"sync={option_name(own.sync)}"
            if FAULT_TOLERANT in own.topology.supports
            else f"topology={option_name(own.topology)}"
        )
        raise UsageError(
            f"{where}: stage {name} has {mode}, which cannot continue without a failed worker;"
            f" remove these faults, or {TOLERANT_INSTEAD}"
        )
    if fault_kinds & REJOIN_KINDS and forbids_rejoin(own):
        raise UsageError(
            f"{where}: stage {name} has topology={option_name(own.topology)}, where a failed worker"
            " cannot rejoin; take topology=parameter_server, or only faults of kind fail"
        )
    if (
        fault_kinds & MEMBERSHIP_KINDS
        and parts.runtime.name != "sim"
        and survives_only_in_sim(own, parts)
    ):
        raise UsageError(
            f"{where}: stage {name} reduces by NCCL, and real processes survive a failed worker"
            " only with gloo; take runtime.backend=gloo, or runtime=sim"
        )
    if blocks_on_failure(own) and fault_kinds - {LINK_DOWN, SERVER_FAIL}:
        raise UsageError(
            f"{where}: not supported with overlap={option_name(own.overlap)}, an overlapped"
            " exchange blocks when a worker fails; take overlap=none"
        )


def check_reshard(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse to reshard the data where a worker keeps state of its whole shard.

    Raises: UsageError.
    """
    for stage, own in zip(stages, parts.stages, strict=True):
        estimator = own.sync.estimator or own.compression.estimator
        whole = isinstance(own.sync, ServerRule) and own.sync.messages().whole
        if (
            whole
            or estimator not in MINIBATCH_ESTIMATORS
            or type(own.optimizer).statistics is not Optimizer.statistics
        ):
            raise UsageError(
                f"runtime.on_worker_failure=reshard: in stage {stage.name} a worker computes on its"
                " whole shard at once, which cannot grow during the run; take"
                " runtime.on_worker_failure=skip"
            )
