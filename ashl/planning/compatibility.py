"""Check that the chosen options work together.

Each check takes options that are already made and raises UsageError: one sentence that names the
clashing options, the reason, and an alternative. `ashl.planning.compile_plan` calls the checks in
this order: single choices (`check_combination`, `check_compression`), stages (`check_stages`,
`check_annealed_values`), checkpoints and faults (`check_checkpoints`, `check_faults`), and several
servers (`check_sharded_server`). The predicates beside them answer the same questions during a run:
may it continue without a failed worker, may a worker rejoin, may the run resume with another number
of workers.

Source: the traps of compression are those that Xu et al., "GRACE", ICDCS 2021, and the papers of
the methods name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ashl.aggregate.fednova import FedNova
from ashl.aggregate.weighted import Weighted
from ashl.cluster.all_reduce_costs import contention_of
from ashl.cluster.spec import FAIL, LINK_DOWN, SERVER_FAIL, Cluster, RealCluster
from ashl.compression.common.code import Code
from ashl.compression.common.count_sketch import CountSketch
from ashl.compression.contract import Codec, Collective, Layout, Linear, Reduces, size_of
from ashl.compression.fetch_sgd import FetchSGD
from ashl.compression.sign import Sign
from ashl.compression.terngrad import TernGrad
from ashl.compression.wire.entropy_code import check_code
from ashl.compression.wrappers.compose import wrap_codec
from ashl.compression.wrappers.options import Wrappers
from ashl.compression.wrappers.wrapper import innermost
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
from ashl.stage.stage import (
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
    sums_beside,
)
from ashl.sync.profiling import Profiling
from ashl.sync.zero_one_adam import ZeroOneAdam
from ashl.task.classification import Classification
from ashl.task.contract import ACCURACY, Task
from ashl.task.regression import Regression
from ashl.topology.all_reduce import AllReduce, StepRule
from ashl.topology.gossip import Gossip, RoamingRule, RoundRule
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
RELATED_TOPOLOGIES = {
    "halos": Halos,
    "sharded_server": ShardedServer,
}  # no error advises to take these
INSTEAD = {
    Gossip: "sync=d_psgd",
    PartialAllReduce: "sync=ripples_smart",
}  # a mode that knows the topology
NEED_LOSS = {
    "loss",
    "evaluated_loss",
    "accuracy",
    "rises",
    "plateau",
}  # rules by which a stage ends
OWN_CODES = range(128, 256)  # on the wire: those of codecs that are not of this package
MUCH, MOST = 0.8, 0.7  # momentum, and a lost share of an update, that together overshoot
ONE_SERVER = "topology=parameter_server"
MINIBATCH_ESTIMATORS = (
    "minibatch",
    "moments",
)  # estimators that take the worker's samples as they come
REJOIN_KINDS = {"rejoin", "churn"}  # where workers come while others run
MEMBERSHIP_KINDS = {FAIL, *REJOIN_KINDS}  # what changes who takes part
TOLERANT_INSTEAD = (
    "take topology=all_reduce or topology=parameter_server with sync=bsp, or restart from"
    " checkpoints with run.checkpoint_s and --resume"
)


def check_sync_overrides(schedule: str, overrides: Sequence[str]) -> None:
    """Refuse `sync=` beside a schedule that names the sync mode of each stage. Raises
    UnusedKeyError.
    """
    typed = [override for override in overrides if key_of(override).partition(".")[0] == "sync"]
    if typed:
        raise UnusedKeyError(
            f"schedule={schedule} names the sync mode of each of its stages, so {typed[0]} has no"
            " effect; drop it, or take schedule=single",
            key_of(typed[0]),
        )


def check_plan_overrides(
    path: str, plan: Plan, config: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Refuse settings that no stage of a plan file has. Raises UsageError."""
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
                f"plan={path} says what each stage does, so {override} has no effect; drop it, or"
                " make a new plan without plan="
            )


def check_combination(parts: dict[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse what makes no sense, saying why and what to take instead. `choices` has the options'
    names.
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
                f"{key}={choices[key]} lists {unknown[0]!r} in `supports`, which is no capability;"
                f" the capabilities are: {', '.join(sorted(CAPABILITIES))}"
            )
    if sync is not None and not isinstance(sync, topology.policy_type):
        barrier = isinstance(sync, BarrierRule)
        why = {
            AllReduce: (
                "its rule is asked where pushes come, at a server"
                if barrier
                else (
                    "a sum over all workers cannot start before the last one has come, so nobody"
                    " can be ahead"
                )
            ),
            Gossip: "its workers share no model that they could wait for",
        }.get(type(topology), f"{sync_name} has no rule for it")
        other = INSTEAD.get(type(topology), "sync=bsp or sync=local_sgd")
        raise UsageError(
            f"sync={sync_name} is not supported with topology={topology_name}: {why}; take "
            f"topology={' or '.join(list_compatible_topologies(sync))}, or {other}"
        )
    if type(parts["optimizer"]).statistics is not Optimizer.statistics:
        check_closed_form_optimizer(parts, choices)
    if sync is not None:
        check_stage_options(sync, parts, choices)
    if runtime.name == "sim":
        if isinstance(cluster, RealCluster):
            raise UsageError(
                "cluster=real is what is there, and virtual time needs declared costs; take another"
                " cluster, give the profile=FILE that was measured on it, or take runtime=local"
            )
        if missing := cluster.missing():
            raise UsageError(
                f"runtime=sim needs cluster.{missing[0]}, which is not declared (a missing cost is"
                " never zero); give it a value, or measure with runtime=local"
            )
    else:
        uses_nccl(runtime, topology, cluster)


def list_compatible_topologies(sync: Rule) -> list[str]:
    """Return the topologies whose loops call this type of sync mode."""
    return [name for name, topology in TOPOLOGIES.items() if isinstance(sync, topology.policy_type)]


def check_stage_options(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Check a stage's sync mode against its other options, wherever it is named. Raises
    UsageError.
    """
    if sync.resizes and not weighs_by_samples(parts["aggregate"]):
        raise UsageError(
            f"aggregate={choices['aggregate']} is not supported with sync={choices['sync']}: its"
            " workers' batches differ, and only weights by samples make one mean gradient of them;"
            " take aggregate=samples"
        )
    if sync.momentum_travels and not (
        isinstance(parts["optimizer"], SGD) and parts["optimizer"].momentum
    ):
        raise UsageError(
            f"sync={choices['sync']} averages the momentum of SGD with the model, and there is none"
            " here; take optimizer=sgd optimizer.momentum=0.9, or sync=local_sgd"
        )
    if isinstance(sync, ZeroOneAdam) and not is_adam(parts["optimizer"]):
        raise UsageError(
            f"sync={choices['sync']} steps as Adam does, and optimizer={choices['optimizer']} is"
            " another one; take optimizer=adam or optimizer=adamw"
        )
    check_capabilities(sync, parts, choices)
    if isinstance(sync, ServerRule) and sync.messages() is not UPDATES:
        check_message_protocol(sync.messages(), parts, choices)
    topology: Topology = parts["topology"]
    if topology.pull_ratio is not None and PULLS not in topology.supports:
        raise UsageError(
            f"topology={choices['topology']} has no compressed pulls; drop topology.pull_ratio"
        )
    if topology.pull_ratio is not None and parts["compression"].traits.lossless:
        text = (
            "topology.pull_ratio needs a compression to pull with; take compression=topk, or"
            " drop it"
        )
        raise NoEffectError(text, "topology.pull_ratio")


def is_adam(optimizer: Optimizer) -> bool:
    """Return True if the optimizer is Adam for all elements."""
    return isinstance(optimizer, Adam) and optimizer.elementwise


def capabilities_of(topology: Topology, sync: Rule) -> frozenset[str]:
    """Return what the topology supports, or what the sync mode says where it has messages of its
    own.
    """
    return topology.supports if sync.supports is None else sync.supports


def check_capabilities(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse a codec, or weights of updates, that neither topology nor sync mode supports. Raises
    UsageError.
    """
    topology: Topology = parts["topology"]
    carried = capabilities_of(topology, sync)
    if CODEC not in carried and not parts["compression"].traits.lossless:
        if sync.supports is None and not topology.replicas:
            raise UsageError(
                f"compression={choices['compression']} is not supported with"
                f" topology={choices['topology']}, which does not carry it; take compression=none,"
                " or topology=parameter_server"
            )
        why = "its messages are no updates that a codec would know"
        if topology.replicas:
            why = "whole models travel, and most of a compressed model would be zero"
        raise UsageError(
            f"compression={choices['compression']} is not supported with sync={choices['sync']}:"
            f" {why}; take compression=none"
            + (", or sync=choco: it sends differences" if topology.replicas else "")
        )
    if WEIGHTS not in carried and (
        what := describe_changed_weights(parts["aggregate"], choices["aggregate"])
    ):
        who, why = f"sync={choices['sync']}", "it makes of each push what its rule says"
        if topology.replicas:
            who, why = (
                f"topology={choices['topology']}",
                "workers average their models, and no server adds up updates",
            )
        raise UsageError(
            f"{who} has no place for {what}: {why}; leave aggregate as it is, and take no schedule"
            " that scales updates"
        )


def check_closed_form_optimizer(parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """An optimizer that solves for the weights needs sums over all workers, and a model that it can
    solve.
    """
    name, sync, aggregate = f"optimizer={choices['optimizer']}", parts["sync"], parts["aggregate"]
    if not isinstance(parts["model"], MLP):
        raise UsageError(
            f"{name} solves for the layers of a multi-layer perceptron; take model=mlp"
        )
    if not isinstance(parts["task"], Classification | Regression):
        raise UsageError(
            f"{name} fits classes or values; take task=classification or task=regression"
        )
    if (
        not isinstance(sync, StepRule)
        or sync.exchange != "gradient"
        or STATISTICS not in parts["topology"].supports
    ):
        raise UsageError(
            f"{name} needs sums over all workers at once; take sync=bsp topology=all_reduce"
        )
    if not parts["compression"].traits.lossless:
        raise UsageError(
            f"{name} exchanges no updates that a codec would know; take compression=none"
        )
    if (
        choices["aggregate"] != "mean"
        or aggregate.weights != "samples"
        or aggregate.clip_norm
        or aggregate.scale != 1
    ):
        raise UsageError(
            f"{name} needs means over all samples as they are; leave aggregate as it is"
        )


def check_message_protocol(
    messages: Updates, parts: Mapping[str, Any], choices: Mapping[str, str]
) -> None:
    """A sync mode with messages of its own leaves nothing to weigh, and has pulls of its own."""
    sync, optimizer = f"sync={choices['sync']}", parts["optimizer"]
    if parts["topology"].pull_ratio is not None:
        raise UsageError(f"{sync} has pulls of its own; drop topology.pull_ratio")
    if messages.unbiased and not parts["compression"].traits.unbiased:
        raise UsageError(
            f"{sync} needs a codec that keeps the mean, and compression={choices['compression']}"
            " does not; take compression=grid, or none"
        )
    plain = choices["optimizer"] == "sgd" and not optimizer.momentum and not optimizer.weight_decay
    if messages.plain and not plain:
        raise UsageError(
            f"{sync} takes plain steps of its own; take optimizer=sgd optimizer.momentum=0"
            " optimizer.weight_decay=0"
        )


def describe_changed_weights(aggregate: Weighted, name: str) -> str | None:
    """Return the first setting of the aggregation rule that differs from its default, or None."""
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
    Raises UsageError.
    """
    check_one_topology(stages, parts.stages)
    plans = parts.planner.follows and any(stage.h_preset is not None for stage in stages)
    declared = isinstance(parts.cluster, Cluster) and not parts.cluster.missing()
    if plans and not declared and not isinstance(parts.stages[0].sync, Profiling):
        raise UsageError(
            "planner=online begins with costs that the cluster declares or that the run profiles"
            " itself, and there are none; take planner=balanced, or a schedule that profiles, as"
            " schedule=ashl_next, without profile=FILE"
        )
    extra = {extra_ranks(own.topology, own.sync, parts.cluster.node) for own in parts.stages}
    if len(extra) > 1:
        raise UsageError(
            "some stages need a coordinator and others do without, and the processes of a run stay"
            " the same; take stages of one kind"
        )
    for before, stage, own in zip((None, *parts.stages), stages, parts.stages, strict=False):
        sync, topology = own.sync, own.topology
        if sync.after_adam and not (
            before and is_adam(own.optimizer) and stage.handover.get("momentum") != "reset"
        ):
            raise UsageError(
                f"stage {stage.name} goes on with what Adam has learned; take schedule=one_bit_adam"
                " optimizer=adam"
            )
        check_quorum(sync, len(stage.workers))
        if not parts.runtime.gradients and set(stage.until) & NEED_LOSS:
            raise UsageError(
                f"runtime.gradients=false learns nothing, and stage {stage.name} ends by"
                f" {', '.join(stage.until)}; take one sync mode for the whole run, as in sync=asp"
                " schedule=single"
            )
        if "accuracy" in stage.until and parts.task.metric != ACCURACY:
            raise UsageError(
                f"stage {stage.name} ends by accuracy, and the task has none; take another rule, as"
                " loss"
            )
        if not isinstance(sync, topology.policy_type):
            raise UsageError(
                f"stage {stage.name} of the schedule has no rule for"
                f" topology={topology_name(topology)}; take"
                f" topology={' or '.join(list_compatible_topologies(sync))}, or one sync mode for"
                f" the whole run, as in {INSTEAD.get(type(topology), 'sync=bsp')}"
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
    for (last, before), (stage, own) in pairwise(zip(stages, parts.stages, strict=True)):
        if stage.handover.get("momentum") != "reset":
            check_momentum_handover(stage.name, before, own)
        if not last.until and type(before.sync).loop is Rule.loop:
            raise UsageError(
                f"stage {last.name} has no rule by which it ends, so that stage {stage.name} would"
                ' never begin; give its until one, as in {"commits": 100}'
            )


def option_name(option: Any) -> str:
    """Return an option's name as it is typed: the name of its file."""
    return (
        topology_name(option)
        if isinstance(option, Topology)
        else type(option).__module__.rpartition(".")[2]
    )


def check_momentum_handover(stage: str, before: StageParts, own: StageParts) -> None:
    """Refuse to keep momentum that the next stage's optimizer cannot use. Raises UsageError.

    It needs the same moments and, without a server, moments that are identical on all workers.
    """
    held, wanted = (len(parts.optimizer.init(1)) for parts in (before, own))
    alike = not wanted or before.sync.exchange == "gradient" or own.sync.exchange != "gradient"
    if held == wanted and (alike or own.topology.has_server):
        return
    why = "each worker has another one after steps of its own, and all have to step alike"
    if held != wanted:
        why = "its optimizer remembers other things than the one before"
    raise UsageError(
        f"stage {stage} cannot take over the momentum of the stage before: {why}; take"
        " momentum=reset"
    )


def check_outer_optimizer(stage: str, sync: Rule, topology: Topology) -> None:
    """An outer optimizer needs merged updates, and to be the only one that steps on what
    is merged.
    """
    carried = capabilities_of(topology, sync)
    if OUTER in carried and sync.exchange == "difference":
        return
    why = "what is pushed there is no update"
    if topology.replicas:
        why = "workers average their models, and no server adds up updates"
    elif OUTER in carried:
        why = "gradients are merged, and the optimizer is what steps on them"
    raise UsageError(
        f"an outer optimizer has nothing to step on in stage {stage}: {why}; take outer=average, or"
        " a mode that merges updates, as sync=local_sgd"
    )


def check_one_topology(stages: Sequence[StagePlan], parts: Sequence[StageParts]) -> None:
    """Each rank takes its state along from stage to stage, and what it holds is the topology's to
    say.
    """
    for stage, own in zip(stages, parts, strict=True):
        if type(own.topology) is not type(parts[0].topology):
            raise UsageError(
                f"stage {stages[0].name} has topology={topology_name(parts[0].topology)} and stage"
                f" {stage.name} has topology={topology_name(own.topology)}, but no worker can take"
                " its state from one to the other; take one topology for the whole run"
            )


def topology_name(topology: Topology) -> str:
    """Return the topology's name as it is typed."""
    return next(
        (
            name
            for name, kind in (TOPOLOGIES | RELATED_TOPOLOGIES).items()
            if isinstance(topology, kind)
        ),
        type(topology).__name__,
    )


def weighs_by_samples(aggregate: Weighted) -> bool:
    """Return True if a worker with three times the samples has three times the weight."""
    one = WorkerPlan(
        local_steps=1, batch=1, data_share=0.5, compression_ratio=1.0, predicted_cycle_s=None
    )
    few, many = aggregate.weigh([one, replace(one, batch=3)])
    return many == 3 * few


def check_worker_count(sync: Rule | None, topology: Topology, num_workers: int, seed: int) -> None:
    """Refuse rules that so many workers cannot keep."""
    if sync is not None:
        check_quorum(sync, num_workers)
        topology.check(sync, num_workers, seed)


def check_quorum(sync: Rule, num_workers: int) -> None:
    """A merge takes a whole number of pushes, and a barrier no more of them than there are workers
    to wait for.
    """
    quorum = sync.quorum(num_workers)
    most = num_workers if sync.in_rounds else math.inf
    if type(quorum) is not int or not 1 <= quorum <= most:
        whole = "up" if most == math.inf else f"to the {num_workers} workers that there are"
        raise UsageError(
            f"the quorum of '{type(sync).__module__}.{type(sync).__name__}' is {quorum!r}, where a"
            f" whole number from 1 {whole} is expected: so many pushes make a merge"
        )


def count_workers(parts: Mapping[str, Any], world_size: int | None) -> int:
    """Return how many workers there are. Raises UsageError where the job's size says otherwise.

    A job of as many processes as workers has its server, or coordinator, on the node of process 0,
    as a process more.
    """
    cluster, runtime, topology = (parts[key] for key in ("cluster", "runtime", "topology"))
    num_workers, extra = cluster.num_workers, extra_ranks(topology, parts["sync"], cluster.node)
    if isinstance(cluster, RealCluster):
        check_host_keys(cluster, runtime.name, extra)
    if runtime.name != "torchrun":
        if num_workers is None:
            raise UsageError(
                "cluster=real needs the number of processes: give cluster.num_workers=2, say"
            )
        return num_workers
    if world_size is None:
        raise UsageError(
            "runtime=torchrun needs a job to join: start it as `torchrun … -m ashl.cli train …`"
        )
    other = "server" if topology.has_server else "coordinator"
    shared = 1 if extra == 1 else 0  # of the others, how many need no process of their own
    if num_workers is None and extra and world_size - extra <= 1:
        alone, fixes = max(0, world_size - extra), [f"start {2 + extra} processes"]
        if shared and world_size > 1:
            fixes += [
                f"give cluster.num_workers={world_size} (the {other} then shares the node of"
                " process 0)"
            ]
        if alone:
            fixes += ["cluster.num_workers=1 if one worker is meant"]
        raise UsageError(
            f"{pluralize(world_size, 'process makes', 'processes make')}"
            f" {pluralize(alone, 'worker', 'workers')} and {pluralize(extra, other, other + 's')},"
            " and one worker learns alone;"
            f" {', or '.join([*fixes, f'take a topology without a {other}'])}"
        )
    if num_workers is None:
        return world_size - extra
    if world_size - num_workers not in (extra, extra - shared):
        beside = f" and a {other}" if extra else ""
        less = f", or {num_workers} where the {other} shares a node" if shared else ""
        raise UsageError(
            f"the job has {pluralize(world_size, 'process', 'processes')}, but"
            f" {pluralize(num_workers, 'worker', 'workers')}{beside} need"
            f" {num_workers + extra}{less}; change --nproc-per-node or the cluster"
        )
    return num_workers


def pluralize(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def check_host_keys(cluster: RealCluster, runtime: str, extra: int) -> None:
    """Refuse hosts where nobody can be sent to them."""
    for key, value in (("hosts", cluster.hosts), ("server_host", cluster.server_host)):
        if value is not None and runtime != "torchrun":
            raise UsageError(
                f"cluster.{key} says where processes of a job are, and runtime={runtime} has none"
                " but its own; start the command on these hosts, by torchrun say, or drop"
                f" cluster.{key}"
            )
    if cluster.server_host is not None and not extra:
        text = (
            "cluster.server_host names a place for a server, and here there is none; drop it, or"
            " take another topology"
        )
        raise UnusedKeyError(text, "cluster.server_host")


def check_targets(limits: Limits, gradients: bool, task: Task, name: str) -> None:
    """Where nothing is learned, nothing can be reached, and not every task has an accuracy."""
    if limits.target_accuracy is not None and task.metric != ACCURACY:
        judged = f"is judged by {task.metric}" if task.metric else "has no metric"
        instead = "stop.target_metric" if task.metric else "stop.target_loss"
        raise UsageError(
            f"stop.target_accuracy: task={name} {judged}, not by accuracy; take {instead}"
        )
    if limits.target_metric is not None and not task.metric:
        raise UsageError(f"stop.target_metric: task={name} has no metric; take stop.target_loss")
    if not gradients and any(getattr(limits, target) is not None for target in TARGETS):
        raise UsageError(
            "runtime.gradients=false learns nothing, so a target cannot be reached; drop"
            " stop.target_…"
        )
    if not gradients and limits.patience is not None:
        raise NoEffectError(
            "runtime.gradients=false evaluates nothing; drop stop.patience", "stop.patience"
        )


def check_compression(
    parts: Mapping[str, Any],
    choices: Mapping[str, str],
    layout: Layout,
    num_workers: int,
) -> list[str]:
    """Check the codec against the other options; return notes, one sentence each. Raises
    UsageError.
    """
    option, topology, sync = parts["compression"], parts["topology"], parts["sync"]
    name = f"compression={choices['compression']}"
    check_signs(name, option, parts["optimizer"])
    codec = wrap_codec(option, layout)
    if codec.traits.lossless:
        return []
    check_codec_roles(name, innermost(codec))
    check_wrappers(name, option, parts["optimizer"], layout)
    check_code(option.entropy)
    if sync is not None:
        check_codec_exchange(name, option, sync, choices["sync"], parts["optimizer"])
    elif codec.estimator != "minibatch" or codec.traits.full_gradient:
        raise UsageError(
            f"{name} is about gradients at one model, and the stages of"
            f" schedule={choices['schedule']} exchange differences between models; take"
            " schedule=single sync=bsp"
        )
    if codec.traits.reduces:
        check_merged_aggregate(name, parts["aggregate"], choices["aggregate"])
    if isinstance(option, CountSketch):
        check_sketch(name, option, topology, parts["optimizer"])
    if isinstance(option, TernGrad) and option.shared_scale and choices["topology"] != "all_reduce":
        raise UsageError(
            f"{name} with compression.shared_scale=true is an agreement of all workers before each"
            " sum; take topology=all_reduce, or compression.shared_scale=false"
        )
    pulled = option.for_pulls()
    if (
        topology.has_server
        and topology.pull_ratio is not None
        and not (
            isinstance(pulled, Code) and pulled.traits.contraction and not pulled.traits.reduces
        )
    ):
        raise UsageError(
            f"topology.pull_ratio is not supported with {name}: a pull needs a codec without memory"
            " that never enlarges what it is given, as compression=topk; drop topology.pull_ratio,"
            " or take another compression"
        )
    d = size_of(layout)
    if topology.has_server and topology.pull_ratio is not None:
        check_density("topology.pull_ratio", topology.pull_ratio, d)
    if topology.replicas and not (isinstance(option, Code) and shrinks_differences(option, d)):
        raise UsageError(
            f"{name} is not supported with topology={choices['topology']}: replicas of neighbours"
            " need a codec without memory that never enlarges what it is given; take one, as"
            " compression=topk"
        )
    alone = option.critical_ratio is not None  # each worker decides how much it sends
    if alone and codec.traits.linear and choices["topology"] == "all_reduce":
        raise UsageError(
            f"{name} is summed on its way, for which all must send as much, and with"
            " compression.critical_ratio each worker decides for itself; drop it, or take"
            " topology=parameter_server"
        )
    return note_compression(name, option, codec, parts, d, num_workers)


def check_codec_roles(name: str, codec: Codec) -> None:
    """Refuse a codec that has a role's methods and does not derive from the role's class. Raises
    UsageError.
    """
    if (
        isinstance(codec, Code)
        and not type(codec).__module__.startswith("ashl.")
        and codec.code not in OWN_CODES
    ):
        raise UsageError(
            f"{name} writes bodies with code = {codec.code}; give {type(codec).__name__} a `code:"
            f" ClassVar[int]` from {OWN_CODES[0]} to {OWN_CODES[-1]}, its number on the wire"
        )
    for role, promised in {
        Reduces: codec.traits.reduces,
        Linear: codec.traits.linear,
        Collective: False,
    }.items():
        asked = {key for key in vars(role) if not key.startswith("_")}
        if not isinstance(codec, role) and (promised or asked & set(dir(codec))):
            raise UsageError(
                f"{name} does what a {role.__name__} does, and is none; derive"
                f" {type(codec).__name__} from ashl.compression.contract.{role.__name__}"
            )


def shrinks_differences(option: Codec, d: int) -> bool:
    """Return True if the rest of a difference that is sent repeatedly tends to zero."""
    traits = option.traits
    return not traits.scale_free and (
        traits.contraction or traits.drains or option.bound(None, d) < 1
    )


def check_wrappers(name: str, option: Codec, optimizer: Optimizer, layout: Layout) -> None:
    """Refuse momentum in two places, and densities of less than one element. Raises UsageError."""
    if option.momentum is not None:
        if momentum := optimizer.momentum:
            raise UsageError(
                f"compression.momentum={option.momentum:g} is momentum correction, and"
                f" optimizer.momentum={momentum:g} would count every velocity twice; set"
                " optimizer.momentum=0"
            )
        if option.error_feedback and not (option.traits.contraction or option.traits.drains):
            raise UsageError(
                f"{name} is not a contraction, so no residual may be kept; drop"
                " compression.momentum"
            )
    d = size_of(layout)
    ratio, critical = option.ratio, option.critical_ratio
    for key, share in {"ratio": ratio, "critical_ratio": critical}.items():
        if share is not None:
            check_density(f"compression.{key}", share, d)
    if critical is not None and ratio is not None and critical < ratio:
        raise UsageError(
            f"compression.critical_ratio={critical:g} is what is kept while gradients change fast,"
            f" and must be no less than compression.ratio={ratio:g}, which is kept while they do"
            " not; take the one for the other"
        )


def check_density(key: str, share: float, d: int) -> None:
    if share * d < 1:
        raise UsageError(
            f"{key}={share:g} keeps less than one of the model's {d} elements; take at least 1/{d}"
        )


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return True if a step is lr · gradient, except for weight decay."""
    return isinstance(optimizer, SGD) and not optimizer.momentum


def check_codec_exchange(
    name: str, codec: Codec, sync: Rule, sync_name: str, optimizer: Optimizer
) -> None:
    """Refuse a codec that is not made for what the sync mode exchanges. Raises UsageError."""
    gradients = "sync=bsp" + (", or compression.scale=mean" if isinstance(codec, Sign) else "")
    if codec.traits.scale_free and sync.exchange != "gradient":
        raise UsageError(
            f"{name} forgets how long an update is, so that it is for gradients, and"
            f" sync={sync_name} exchanges differences between models; take {gradients}"
        )
    estimator = codec.estimator
    curved = codec.traits.full_gradient and not is_plain_sgd(optimizer)
    if (codec.traits.full_gradient or estimator != "minibatch") and sync.exchange != "gradient":
        raise UsageError(
            f"{name} is about gradients at one model, and sync={sync_name} exchanges differences"
            " between models; take"
            f" sync=bsp{' optimizer=sgd optimizer.momentum=0' if curved else ''}"
        )
    if curved:
        raise UsageError(
            f"{name} compares what has changed with how far plain gradient descent has moved the"
            " model; take optimizer=sgd optimizer.momentum=0"
        )
    if estimator == "full" and sync.resizes:
        raise UsageError(
            f"{name} with compression.estimator=full takes all samples of a worker at once, which"
            f" leaves sync={sync_name} no batches to size; take sync=bsp, or"
            " compression.estimator=minibatch"
        )


def check_signs(name: str, option: Codec, optimizer: Optimizer) -> None:
    """Signs without a scale have none to keep apart, and a vote has no use for one."""
    if isinstance(option, Sign) and option.vote == "majority" and option.scale != "none":
        fix = "compression.scale=none" + (
            " compression.error_feedback=false" if option.error_feedback else ""
        )
        raise UsageError(f"{name} with compression.vote=majority applies a sign; set {fix}")
    if isinstance(option, Sign) and option.scale == "none" and option.per_layer:
        raise UsageError(
            f"{name} with compression.scale=none is the same for each layer and for all; drop"
            " compression.per_layer"
        )
    if option.beta is not None:
        for key, momentum in (("compression", option.momentum), ("optimizer", optimizer.momentum)):
            if momentum:
                raise UsageError(
                    f"{name} with compression.beta={option.beta:g} sends a momentum, and"
                    f" {key}.momentum={momentum:g} would count every velocity twice; take one of"
                    " them"
                )


def check_sketch(name: str, option: CountSketch, topology: Topology, optimizer: Optimizer) -> None:
    """Refuse a sketch where a worker cannot know what is recovered of the sum. Raises
    UsageError.
    """
    if topology.has_server and (option.error_feedback or option.momentum is not None):
        raise UsageError(
            f"{name} keeps at a worker what was not recovered, and a parameter server does not tell"
            " what that was; take topology=all_reduce, compression=fetch_sgd, or"
            " compression.error_feedback=false and no compression.momentum"
        )
    if topology.replicas:
        raise UsageError(
            f"{name} is not supported with replicas of neighbours: what it recovers of one vector"
            " may be larger than the vector; take compression=topk, or topology=all_reduce"
        )
    momentum = optimizer.momentum
    if isinstance(option, FetchSGD) and option.decay and momentum:
        raise UsageError(
            f"{name} keeps the momentum in the sketch (compression.decay={option.decay:g}), and"
            f" optimizer.momentum={momentum:g} would count every velocity twice; set"
            " optimizer.momentum=0"
        )


def check_merged_aggregate(name: str, aggregate: Weighted, aggregate_name: str) -> None:
    """Refuse weights by payload where payloads are merged together. Raises UsageError."""
    if isinstance(aggregate, FedNova):
        raise UsageError(
            f"{name} merges all bodies at once, and aggregate={aggregate_name} weighs each by"
            " itself; take aggregate=mean"
        )
    if aggregate.staleness_discount is not None:
        raise UsageError(
            f"{name} merges all bodies at once, so aggregate.staleness_discount has none to act on;"
            " drop it"
        )


def note_dense_pulls(plan: Plan, parts: Parts) -> tuple[str, ...]:
    """Name `topology.pull_ratio` where pushes are compressed and pulls, which could be, are not."""
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
            and isinstance(pulled, Code)
            and pulled.traits.contraction
            and not pulled.traits.reduces
        ):
            return (
                (
                    f"pushes are compressed and pulls are not ({4 * d / 1e6:.3g} MB each);"
                    " topology.pull_ratio=0.1 compresses pulls, too"
                ),
            )
    return ()


def note_compression(
    name: str, option: Codec, codec: Codec, parts: Mapping[str, Any], d: int, num_workers: int
) -> list[str]:
    """Return what is worth knowing of a codec that is accepted, one sentence each."""
    found = []
    topology, sync, momentum = parts["topology"], parts["sync"], parts["optimizer"].momentum
    keeps = not isinstance(option, Wrappers) or option.error_feedback or option.momentum is not None
    if (
        isinstance(option, Code)
        and not option.traits.unbiased
        and not keeps
        and not option.traits.reduces
    ):
        takes_feedback = codec.traits.contraction or codec.traits.drains
        without = (
            " without compression.error_feedback=true"
            if takes_feedback
            else ", which takes no error feedback,"
        )
        found.append(
            f"{name}{without} is biased: what it leaves out is lost, and training may stand still"
        )
    if codec.traits.full_gradient and codec.estimator == "minibatch":
        found.append(
            f"{name} with compression.estimator=minibatch takes the noise of gradients for change:"
            " hardly anything is ever left out"
        )
    ratio, after = option.ratio, sync is not None and sync.exchange == "gradient"
    if after and option.error_feedback and momentum >= MUCH and codec.bound(ratio, d) > MOST:
        found.append(
            f"{name} keeps most of an update for later, which optimizer.momentum={momentum:g}"
            " carries on once more: training may overshoot; optimizer.momentum=0 with a larger"
            " optimizer.lr, or compression.momentum, may help"
        )
    if (
        topology.has_server
        and not codec.traits.variable
        and codec.encoded_nbytes(ratio, d) >= 4 * d
    ):
        found.append(
            f"{name} shortens nothing here: "
            f"{codec.encoded_nbytes(ratio, d) / 1e6:.3g} MB a push, as without compression"
        )
    if (
        not topology.has_server
        and not codec.traits.linear
        and not isinstance(innermost(codec), Collective)
    ):
        each = codec.encoded_nbytes(ratio, d) * (num_workers - 1)
        ring = 2 * (num_workers - 1) / num_workers * 4 * d
        if each >= ring:
            most = "up to " if codec.traits.variable else ""
            found.append(
                f"{name} does not add up on its way, so its bodies are gathered:"
                f" {most}{each / 1e6:.3g} MB a round, where summing without compression moves"
                f" {ring / 1e6:.3g} MB"
            )
    return found


def check_annealed_values(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse a server learning rate, or an H by gradient noise, that cannot change. Raises
    UsageError.
    """
    for (before, stage), own in zip(pairwise(stages), parts.stages[1:], strict=True):
        if (
            stage.aggregate["scale"] != before.aggregate["scale"]
            and own.sync.exchange != "difference"
        ):
            raise UsageError(
                f"the server's step is another one in stage {stage.name}, and"
                f" sync={option_name(own.sync)} has none: it merges gradients, on which the"
                " optimizer steps; take a mode that merges updates, as sync=local_sgd"
                " sync.local_steps=1, or let the rate fall with optimizer.schedule=cosine"
            )
    if isinstance(parts.planner, Goodput):
        for stage, own in zip(stages, parts.stages, strict=True):
            if stage.h_preset is not None and (why := explain_unseen_updates(own, parts)):
                raise UsageError(
                    "planner=goodput weighs whole updates against each other, and in stage"
                    f" {stage.name} {why}; take planner=online"
                )


def explain_unseen_updates(own: StageParts, parts: Parts) -> str | None:
    """Return why no server sees whole updates one by one, or None if one does."""
    if not parts.runtime.gradients:
        return "there are none (runtime.gradients=false)"
    if not own.topology.has_server or isinstance(own.topology, Halos):
        return f"topology={option_name(own.topology)} has no server that sees them"
    if own.compression.traits.reduces:
        return f"compression={option_name(own.compression)} makes them only of all bodies together"
    if own.overlap.fragments:
        return f"overlap={option_name(own.overlap)} brings a fragment at a time"
    plain = (
        isinstance(own.sync, ServerRule)
        and own.sync.messages() is UPDATES
        and not own.sync.momentum_travels
    )
    if not plain or own.sync.exchange != "difference":
        return f"sync={option_name(own.sync)} pushes something else"
    return None


def check_sharded_server(plan: Plan, parts: Parts) -> None:
    """Refuse several servers where shards of a model cannot be merged one by one. Raises
    UsageError.
    """
    topology, cluster = parts.stages[0].topology, parts.cluster
    if not isinstance(topology, ShardedServer):
        return
    name = f"topology={option_name(topology)}"
    topology.bounds([layer.size for layer in layout_of(plan.layers)])
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if own.topology != topology:
            raise UsageError(
                f"{name}: stage {stage.name} has other servers than stage {plan.stages[0].name},"
                " and none can hand its piece over; take the same topology.servers and"
                " topology.partition_by in all stages"
            )
        check_sharded_stage(name, stage, own, parts)
    if isinstance(cluster, Cluster) and cluster.exchange_s is not None:
        raise UsageError(
            f"{name} gains ports, and with cluster.exchange_s no port is ever busy; give"
            " cluster.exchange_s=null with cluster.bandwidth_mbit_s and cluster.latency_s, or take"
            f" {ONE_SERVER}"
        )
    if isinstance(cluster, Cluster) and cluster.node is not None:
        raise UsageError(
            f"{name}: where the servers would be on the machines of cluster.node is not built yet;"
            f" take cluster.node=null, or {ONE_SERVER}"
        )


def check_sharded_stage(name: str, stage: StagePlan, own: StageParts, parts: Parts) -> None:
    """Refuse a stage that needs the whole model at one server. Raises UsageError."""
    sync, outer = own.sync, own.outer
    plain = type(sync).loop is Rule.loop and type(sync).step is Rule.step
    if (
        not isinstance(sync, ServerRule)
        or not plain
        or sync.messages() is not UPDATES
        or sync.takes_all
    ):
        raise UsageError(
            f"{name} merges plain updates piece by piece, and sync={option_name(sync)} has a loop,"
            f" messages or a step of its own; take sync=bsp, local_sgd, asp or ssp, or {ONE_SERVER}"
        )
    if stage.h_preset is not None and parts.planner.follows:
        raise UsageError(
            f"{name}: no server sees whole pushes, and a planner that replans needs one; take"
            f" another, or {ONE_SERVER}"
        )
    if sync.exchange == "gradient" and not own.optimizer.elementwise:
        raise UsageError(
            f"{name}: optimizer={option_name(own.optimizer)} steps on whole layers, and a server"
            f" has a piece of the model; take optimizer=sgd, or {ONE_SERVER}"
        )
    if type(outer).for_layers is not Outer.for_layers:
        raise UsageError(
            f"{name}: outer={option_name(outer)} goes layer by layer; take outer=nesterov, or"
            f" {ONE_SERVER}"
        )


def overlaps_steps(own: StageParts) -> bool:
    """Return True if a worker exchanges while it computes."""
    return isinstance(own.overlap, Delayed) or not own.overlap.serial


def blocks_on_failure(own: StageParts) -> bool:
    """Return True if an overlapped exchange blocks when a worker fails.

    A server that merges whole updates handles failures itself, and bucketed all-reduces of one step
    are retried.
    """
    whole = (
        isinstance(own.topology, ParameterServer)
        and isinstance(own.overlap, Delayed)
        and not own.overlap.fragments
    )
    parts = (
        isinstance(own.topology, AllReduce)
        and not isinstance(own.overlap, Delayed)
        and not own.overlap.overlaps_next_forward
    )
    return overlaps_steps(own) and not (whole or parts)


def survives_only_in_sim(own: StageParts, parts: Parts) -> bool:
    """Return True if the stage continues without a failed worker only in virtual time: NCCL sums
    cannot be aborted.
    """
    return (
        exchanges_by_collectives(own)
        and parts.runtime.backend != "gloo"
        and device_of(parts.runtime) != HOST
    )


def exchanges_by_collectives(own: StageParts) -> bool:
    """Return True if workers exchange by collective sums."""
    return isinstance(own.topology, AllReduce | PartialAllReduce)


def forbids_rejoin(own: StageParts) -> bool:
    """Return True if a failed worker cannot rejoin."""
    return isinstance(own.topology, ShardedServer)


def has_failure_protocol(own: StageParts) -> bool:
    """Return True if the topology and the sync mode have a protocol for failed workers."""
    return FAULT_TOLERANT in capabilities_of(own.topology, own.sync)


def survives_failure(parts: Parts) -> bool:
    """Return True if a run on processes continues without a failed worker in every stage."""
    return not sends_messages_by_nccl(parts) and all(
        has_failure_protocol(own)
        and not (blocks_on_failure(own) or survives_only_in_sim(own, parts))
        for own in parts.stages
    )


def can_block_forever(parts: Parts) -> bool:
    """Return True if workers may block on a hung worker until its process ends.

    Messages of all-reduces over some of the workers cannot be aborted.
    """
    return any(isinstance(own.topology, PartialAllReduce) for own in parts.stages)


def sends_messages_by_nccl(parts: Parts) -> bool:
    """Return True if NCCL carries messages of a server, which cannot be aborted."""
    return parts.runtime.backend == "nccl" and parts.stages[0].topology.has_server


def admits_rejoin(parts: Parts) -> bool:
    """Return True if a failed worker, or another in its place, can rejoin a run on processes."""
    return survives_failure(parts) and not any(map(forbids_rejoin, parts.stages))


def describe_modes(parts: Parts) -> str:
    """Return the topologies, sync modes and overlaps of a run, as they are typed."""
    words = list[str]()
    for own in parts.stages:
        words += [f"topology={option_name(own.topology)}", f"sync={option_name(own.sync)}"]
        words += [f"overlap={option_name(own.overlap)}"] if overlaps_steps(own) else []
    return " ".join(dict.fromkeys(words))


def check_other_worker_count(parts: Parts, run_dir: Path) -> None:
    """Refuse to resume with another number of workers where the saved state belongs to workers.
    Raises UsageError.
    """
    for own in parts.stages:
        alike = isinstance(own.topology, ParameterServer | AllReduce)
        plain = not isinstance(own.sync, ServerRule) or own.sync.messages() is UPDATES
        if overlaps_steps(own) or not (alike and plain) or not has_failure_protocol(own):
            raise UsageError(
                f"a run with {describe_modes(parts)} cannot go on with another number of workers,"
                " as what it keeps belongs to those that it has; a new one takes its weights"
                f" along: run.start_from={run_dir}"
            )


def check_max_restarts(parts: Parts, checkpoint_s: float | None) -> None:
    """Refuse `runtime.max_restarts` where a restarted worker could not rejoin. Raises
    UsageError.
    """
    runtime = parts.runtime
    if runtime.name == "sim" or not runtime.max_restarts:
        return
    named = f"runtime.max_restarts={runtime.max_restarts}"
    if runtime.name != "local":
        raise UsageError(f"{named}: the launcher of the job starts these processes; set it to 0")
    if checkpoint_s is not None:
        raise UsageError(
            f"{named}: a run that leaves checkpoints (run.checkpoint_s) does not support rejoins;"
            " drop one of the two"
        )
    if not admits_rejoin(parts):
        raise UsageError(
            f"{named}: a run with {describe_modes(parts)} does not support rejoins; drop it, or"
            " take topology=parameter_server or all_reduce with sync=bsp overlap=none, or restart"
            " from checkpoints with run.checkpoint_s and --resume"
        )


def check_failure_keys(parts: Parts) -> None:
    """Raises UsageError where settings say what follows a failure and the run ends with the first
    one.
    """
    runtime, named = parts.runtime, list[str]()
    if runtime.min_workers > 1:
        named.append(f"runtime.min_workers={runtime.min_workers}")
    if runtime.on_worker_failure != "skip":
        named.append(f"runtime.on_worker_failure={runtime.on_worker_failure}")
    if named and not all(map(has_failure_protocol, parts.stages)):
        raise UsageError(
            f"{', '.join(named)}: a run with {describe_modes(parts)} ends when a worker fails; drop"
            f" it, or {TOLERANT_INSTEAD}"
        )


def check_faults(parts: Parts, stages: Sequence[StagePlan], checkpoint_s: float | None) -> None:
    """Refuse injected faults, and failure settings, that the run cannot handle. Raises
    UsageError.
    """
    check_max_restarts(parts, checkpoint_s)
    fault_kinds, n = set(parts.cluster.fault_kinds), len(stages[0].workers)
    if parts.runtime.min_workers > n:
        raise UsageError(
            f"runtime.min_workers={parts.runtime.min_workers}, and there are {n} workers; take at"
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
            f"cluster.events and cluster.churn ({named}) are for virtual time, except fail with"
            " runtime=local; take runtime=sim"
        )
    if checkpoint_s is not None:
        raise UsageError(
            f"run.checkpoint_s: no checkpoint holds yet what befalls a cluster ({named}); drop it,"
            " or the events"
        )
    if SERVER_FAIL in fault_kinds and not parts.stages[0].topology.has_server:
        raise UsageError(
            f"cluster.events: topology={option_name(parts.stages[0].topology)} has no server that"
            " could fail; drop server_fail, or take topology=parameter_server"
        )
    for stage, own in zip(stages, parts.stages, strict=True):
        check_stage_faults(stage.name, own, parts, fault_kinds)


def check_stage_faults(name: str, own: StageParts, parts: Parts, fault_kinds: set[str]) -> None:
    """Refuse faults that a stage cannot handle. Raises UsageError."""
    named = ", ".join(sorted(fault_kinds))
    where = f"cluster.{'churn' if 'churn' in fault_kinds else 'events'} ({named})"
    if fault_kinds & MEMBERSHIP_KINDS and not has_failure_protocol(own):
        who = (
            f"sync={option_name(own.sync)}"
            if FAULT_TOLERANT in own.topology.supports
            else f"topology={option_name(own.topology)}"
        )
        raise UsageError(
            f"{where}: stage {name} has {who}, which cannot continue without a failed worker;"
            f" remove these failures, or {TOLERANT_INSTEAD}"
        )
    if fault_kinds & REJOIN_KINDS and forbids_rejoin(own):
        raise UsageError(
            f"{where}: stage {name} has topology={option_name(own.topology)}, where a failed worker"
            " cannot rejoin yet; take topology=parameter_server, or events of fail alone"
        )
    if (
        fault_kinds & MEMBERSHIP_KINDS
        and parts.runtime.name != "sim"
        and survives_only_in_sim(own, parts)
    ):
        raise UsageError(
            f"{where}: stage {name} sums by NCCL, and processes go on without a worker only where"
            " gloo sums; take runtime.backend=gloo, or runtime=sim"
        )
    if blocks_on_failure(own) and fault_kinds - {LINK_DOWN, SERVER_FAIL}:
        raise UsageError(
            f"{where} with overlap={option_name(own.overlap)} is not built yet: what goes on beside"
            " a step would not stand still; take overlap=none"
        )


def check_reshard(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse resharding where a worker keeps state of its whole shard. Raises UsageError."""
    for stage, own in zip(stages, parts.stages, strict=True):
        estimator = own.sync.estimator or own.compression.estimator
        whole = isinstance(own.sync, ServerRule) and own.sync.messages().whole
        if (
            whole
            or estimator not in MINIBATCH_ESTIMATORS
            or type(own.optimizer).statistics is not Optimizer.statistics
        ):
            raise UsageError(
                f"runtime.on_worker_failure=reshard: in stage {stage.name} a worker computes with"
                " its whole shard at once, which cannot grow on the way; take"
                " runtime.on_worker_failure=skip"
            )


def check_checkpoints(every_s: float | None, parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse to promise checkpoints where none can be made."""
    if every_s is None:
        return
    real, slowed = parts.runtime.name != "sim", contention_of(parts.cluster) is not None
    if (
        slowed
        and not real
        and any(sums_beside(own.sync, own.topology, own.overlap) for own in parts.stages)
    ):
        raise UsageError(
            "run.checkpoint_s: by the profile sums and computing slow each other down, and no"
            " checkpoint holds how far both are; drop it, or take overlap=none"
        )
    if real and len(stages) > 1 and any(map(saves_one_round, parts.stages)):
        raise UsageError(
            "run.checkpoint_s: real processes leave checkpoints of sync=hop and sync=d_admm in"
            " plans of one stage only, as workers come to another after different numbers of"
            " rounds; drop it, or take one stage"
        )
    lockstep = runs_in_lockstep(parts, len(stages[0].workers))
    for stage, own in zip(stages, parts.stages, strict=True):
        if real and not (lockstep or resumes_without_lockstep(own)):
            raise UsageError(
                f"run.checkpoint_s: in stage {stage.name} not all go round by round, and real"
                " processes leave checkpoints only then, where servers merge their updates, or"
                " where models are averaged in groups or pairs; drop it, or take sync=bsp,"
                " sync=local_sgd or sync=ssp"
            )


def runs_in_lockstep(parts: Parts, num_workers: int) -> bool:
    """Return True if in every stage no message is in flight when all workers begin a round.

    Except messages that are sent then, or retransmitted after a resume.
    """
    return all(stage_runs_in_lockstep(own, num_workers) for own in parts.stages)


def stage_runs_in_lockstep(own: StageParts, num_workers: int) -> bool:
    sync = own.sync
    if not sync.in_rounds or sync.quorum(num_workers) < num_workers:
        return False
    return isinstance(sync, ServerRule | RoundRule) or isinstance(own.topology, AllReduce)


def retransmits_on_resume(parts: Parts) -> bool:
    """Return True if workers in synchronous rounds retransmit messages when they resume from a
    checkpoint.
    """
    return any(isinstance(own.sync, RoundRule) and own.sync.lag for own in parts.stages)


def saves_one_round(own: StageParts) -> bool:
    """Return True if workers are saved at the start of the same round, each when it reaches it."""
    return isinstance(own.sync, RoamingRule) and own.sync.kept == "round"


def resumes_without_lockstep(own: StageParts) -> bool:
    """Return True if workers may resume from a server's state, or each from its own.

    See `ashl.topology.parameter_server`, `ashl.topology.partial_all_reduce` and
    `ashl.topology.coordinator`.
    """
    if isinstance(own.topology, PartialAllReduce):
        return True
    if isinstance(own.sync, RoamingRule):
        return bool(own.sync.kept)
    return (
        own.topology.has_server
        and FAULT_TOLERANT in capabilities_of(own.topology, own.sync)
        and own.overlap.serial
    )
