"""Combinations that make no sense, refused in words that say why and what to take instead."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ashl.aggregate.weighted import Weighted
from ashl.cluster.spec import Cluster, RealCluster
from ashl.config.override import key_of
from ashl.errors import NoEffectError, UnusedKeyError, UsageError
from ashl.model.mlp import MLP
from ashl.optimizer.adam import Adam
from ashl.optimizer.contract import Optimizer
from ashl.optimizer.sgd import SGD
from ashl.plan.plan import AVERAGE, TARGETS, Limits, Plan, Spec, StagePlan, WorkerPlan
from ashl.planning.build import Parts, StageParts
from ashl.planning.device import by_nccl
from ashl.planning.settings import STAGE_GROUPS
from ashl.stage.stage import CARGO, CODEC, OUTER, PULLS, STATISTICS, WEIGHTS, Rule, Topology, extra_ranks
from ashl.sync.profiling import Profiling
from ashl.sync.zero_one_adam import ZeroOneAdam
from ashl.task.classification import Classification
from ashl.task.contract import ACCURACY, Task
from ashl.task.regression import Regression
from ashl.topology.all_reduce import AllReduce, StepRule
from ashl.topology.gossip import Gossip
from ashl.topology.halos import Halos
from ashl.topology.parameter_server import UPDATES, BarrierRule, ParameterServer, ServerRule, Updates
from ashl.topology.partial_all_reduce import PartialAllReduce
from ashl.topology.sharded_server import ShardedServer

TOPOLOGIES = {  # by the name of the option
    "parameter_server": ParameterServer,
    "all_reduce": AllReduce,
    "gossip": Gossip,
    "partial_all_reduce": PartialAllReduce,
}
NEAR = {"halos": Halos, "sharded_server": ShardedServer}  # ... that nobody is advised to take for a sync mode's sake
INSTEAD = {Gossip: "sync=d_psgd", PartialAllReduce: "sync=ripples_smart"}  # a mode that knows the topology
NEED_LOSS = {"loss", "evaluated_loss", "accuracy", "rises", "plateau"}  # rules by which a stage ends


def refuse_sync(schedule: str, overrides: Sequence[str]) -> None:
    """A schedule that says which sync mode each stage has leaves nothing for `sync=` to say."""
    typed = [override for override in overrides if key_of(override).partition(".")[0] == "sync"]
    if typed:
        raise UnusedKeyError(
            f"schedule={schedule} names the sync mode of each of its stages, so {typed[0]} has no say; drop it, or "
            "take schedule=single",
            key_of(typed[0]),
        )


def refuse_unheard(path: str, plan: Plan, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """A given plan says what its stages do: what was typed and none of them has would be without effect."""
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
                f"plan={path} says what each stage does, so {override} has no say; drop it, or plan anew without plan="
            )


def check_combination(parts: dict[str, Any], choices: Mapping[str, str]) -> None:
    """Refuse what makes no sense, saying why and what to take instead. `choices` has the options' names."""
    sync, topology, runtime, cluster = (parts[key] for key in ("sync", "topology", "runtime", "cluster"))
    topology_name, sync_name = choices["topology"], choices.get("sync", "")
    for key, part in (("topology", topology), ("sync", sync)):
        if unknown := sorted((part.carries if part is not None and part.carries is not None else CARGO) - CARGO):
            raise UsageError(
                f"{key}={choices[key]} says that it carries {unknown[0]!r}, which there is not; there are: "
                f"{', '.join(sorted(CARGO))}"
            )
    if sync is not None and not isinstance(sync, topology.asks):
        barrier = isinstance(sync, BarrierRule)
        why = {
            AllReduce: "its rule is asked where pushes come, at a server"
            if barrier
            else "a sum over all workers cannot start before the last one has come, so nobody can be ahead",
            Gossip: "its workers share no model that they could wait for",
        }.get(type(topology), f"{sync_name} has no rule for it")
        other = INSTEAD.get(type(topology), "sync=bsp or sync=local_sgd")
        raise UsageError(
            f"sync={sync_name} makes no sense with topology={topology_name}: {why}; take "
            f"topology={' or '.join(topologies_of(sync))}, or {other}"
        )
    if type(parts["optimizer"]).statistics is not Optimizer.statistics:
        check_sweeping(parts, choices)
    if sync is not None:
        check_rules(sync, parts, choices)
    if runtime.name == "sim":
        if isinstance(cluster, RealCluster):
            raise UsageError(
                "cluster=real is what is there, and virtual time needs declared costs; take another cluster, "
                "give the profile=FILE that was measured on it, or take runtime=local"
            )
        if missing := cluster.missing():
            raise UsageError(
                f"runtime=sim needs cluster.{missing[0]}, which is not declared (a missing cost is never zero); give "
                "it a value, or measure with runtime=local"
            )
    else:
        by_nccl(runtime, topology, cluster)


def topologies_of(sync: Rule) -> list[str]:
    """The topologies that ask such a rule."""
    return [name for name, topology in TOPOLOGIES.items() if isinstance(sync, topology.asks)]


def check_rules(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """What holds of one stage, whether it was chosen or stands in a schedule or in a plan that was given."""
    if sync.resizes and not follows_samples(parts["aggregate"]):
        raise UsageError(
            f"aggregate={choices['aggregate']} makes no sense with sync={choices['sync']}: its workers' batches "
            "differ, and only weights by samples make one mean gradient of them; take aggregate=samples"
        )
    if sync.momentum_travels and not (isinstance(parts["optimizer"], SGD) and parts["optimizer"].momentum):
        raise UsageError(
            f"sync={choices['sync']} averages the momentum of SGD with the model, and there is none here; take "
            "optimizer=sgd optimizer.momentum=0.9, or sync=local_sgd"
        )
    if isinstance(sync, ZeroOneAdam) and not adam(parts["optimizer"]):
        raise UsageError(
            f"sync={choices['sync']} steps as Adam does, and optimizer={choices['optimizer']} is another one; take "
            "optimizer=adam or optimizer=adamw"
        )
    check_carried(sync, parts, choices)
    if isinstance(sync, ServerRule) and sync.messages() is not UPDATES:
        check_messages(sync.messages(), parts, choices)
    topology: Topology = parts["topology"]
    if topology.pull_ratio is not None and PULLS not in topology.carries:
        raise UsageError(f"topology={choices['topology']} has no compressed pulls; drop topology.pull_ratio")
    if topology.pull_ratio is not None and parts["compression"].flags.lossless:
        text = "topology.pull_ratio needs a compression to pull with; take compression=topk, or drop it"
        raise NoEffectError(text, "topology.pull_ratio")


def adam(optimizer: Optimizer) -> bool:
    """Whether it is Adam in all elements."""
    return isinstance(optimizer, Adam) and optimizer.elementwise


def carried_by(topology: Topology, sync: Rule) -> frozenset[str]:
    """What travels there: the topology says it, or the sync mode where it brings messages of its own."""
    return topology.carries if sync.carries is None else sync.carries


def check_carried(sync: Rule, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """What travels beside plain updates has to be carried by the topology, or by the sync mode where it says so."""
    topology: Topology = parts["topology"]
    carried = carried_by(topology, sync)
    if CODEC not in carried and not parts["compression"].flags.lossless:
        if sync.carries is None and not topology.replicas:
            raise UsageError(
                f"compression={choices['compression']} makes no sense with topology={choices['topology']}, which does "
                "not carry it; take compression=none, or topology=parameter_server"
            )
        why = "its messages are no updates that a codec would know"
        if topology.replicas:
            why = "whole models travel, and most of a compressed model would be zero"
        raise UsageError(
            f"compression={choices['compression']} makes no sense with sync={choices['sync']}: {why}; take "
            "compression=none" + (", or sync=choco: it sends differences" if topology.replicas else "")
        )
    if WEIGHTS not in carried and (what := changed(parts["aggregate"], choices["aggregate"])):
        who, why = f"sync={choices['sync']}", "it makes of each push what its rule says"
        if topology.replicas:
            who, why = f"topology={choices['topology']}", "workers average their models, and nobody adds up updates"
        raise UsageError(
            f"{who} has no place for {what}: {why}; leave aggregate as it is, and take no schedule that scales updates"
        )


def check_sweeping(parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """An optimizer that solves for the weights needs sums over all workers, and a model that it can solve."""
    name, sync, aggregate = f"optimizer={choices['optimizer']}", parts["sync"], parts["aggregate"]
    if not isinstance(parts["model"], MLP):
        raise UsageError(f"{name} solves for the layers of a multi-layer perceptron; take model=mlp")
    if not isinstance(parts["task"], Classification | Regression):
        raise UsageError(f"{name} fits classes or values; take task=classification or task=regression")
    if not isinstance(sync, StepRule) or sync.exchange != "gradient" or STATISTICS not in parts["topology"].carries:
        raise UsageError(f"{name} needs sums over all workers at once; take sync=bsp topology=all_reduce")
    if not parts["compression"].flags.lossless:
        raise UsageError(f"{name} exchanges no updates that a codec would know; take compression=none")
    if choices["aggregate"] != "mean" or aggregate.weights != "samples" or aggregate.clip_norm or aggregate.scale != 1:
        raise UsageError(f"{name} needs means over all samples as they are; leave aggregate as it is")


def check_messages(messages: Updates, parts: Mapping[str, Any], choices: Mapping[str, str]) -> None:
    """A sync mode with messages of its own leaves nothing to weigh, and has pulls of its own."""
    sync, optimizer = f"sync={choices['sync']}", parts["optimizer"]
    if parts["topology"].pull_ratio is not None:
        raise UsageError(f"{sync} has pulls of its own; drop topology.pull_ratio")
    if messages.unbiased and not parts["compression"].flags.unbiased:
        raise UsageError(
            f"{sync} needs a codec that keeps the mean, and compression={choices['compression']} does not; take "
            "compression=grid, or none"
        )
    plain = choices["optimizer"] == "sgd" and not optimizer.momentum and not optimizer.weight_decay
    if messages.plain and not plain:
        raise UsageError(
            f"{sync} takes plain steps of its own; take optimizer=sgd optimizer.momentum=0 optimizer.weight_decay=0"
        )


def changed(aggregate: Weighted, name: str) -> str | None:
    """What of the aggregation rule is not as it is when nothing is said."""
    if name != "mean":
        return f"aggregate={name}"
    guards = [key for key in ("discount", "clip_norm", "max_delay") if getattr(aggregate, key) is not None]
    return f"aggregate.{(guards or ['scale'])[0]}" if guards or aggregate.scale != 1 else None


def check_stages(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse stages that their topology cannot run, that need a loss where nothing is learned, or whose ranks cannot
    take over what the ranks of the stage before leave."""
    check_one_topology(stages, parts.stages)
    plans = parts.planner.follows and any(stage.h_preset is not None for stage in stages)
    declared = isinstance(parts.cluster, Cluster) and not parts.cluster.missing()
    if plans and not declared and not isinstance(parts.stages[0].sync, Profiling):
        raise UsageError(
            "planner=online begins with costs that the cluster declares or that the run profiles itself, and there are "
            "none; take planner=balanced, or a schedule that profiles, as schedule=ashl_next, without profile=FILE"
        )
    extra = {extra_ranks(own.topology, own.sync, parts.cluster.node) for own in parts.stages}
    if len(extra) > 1:
        raise UsageError(
            "some stages need a coordinator and others do without, and the processes of a run stay the same; take "
            "stages of one kind"
        )
    for before, stage, own in zip((None, *parts.stages), stages, parts.stages, strict=False):
        sync, topology = own.sync, own.topology
        if sync.after_adam and not (before and adam(own.optimizer) and stage.handover.get("momentum") != "reset"):
            raise UsageError(
                f"stage {stage.name} goes on with what Adam has learned; take schedule=one_bit_adam optimizer=adam"
            )
        check_quorum(sync, len(stage.workers))
        if not parts.runtime.gradients and set(stage.until) & NEED_LOSS:
            raise UsageError(
                f"runtime.gradients=false learns nothing, and stage {stage.name} ends by {', '.join(stage.until)}; "
                "take one sync mode for the whole run, as in sync=asp schedule=single"
            )
        if "accuracy" in stage.until and parts.task.metric != ACCURACY:
            raise UsageError(f"stage {stage.name} ends by accuracy, and the task has none; take another rule, as loss")
        if not isinstance(sync, topology.asks):
            raise UsageError(
                f"stage {stage.name} of the schedule has no rule for topology={name_of(topology)}; take "
                f"topology={' or '.join(topologies_of(sync))}, or one sync mode for the whole run, as in "
                f"{INSTEAD.get(type(topology), 'sync=bsp')}"
            )
        if isinstance(topology, Halos):
            topology.check_tree(sync, parts.cluster.node, stage.h_preset is not None and parts.planner.follows)
        try:
            check_rules(sync, vars(own), {group: chosen(option) for group, option in vars(own).items()})
        except NoEffectError:
            raise
        except UsageError as error:
            raise UsageError(f"stage {stage.name}: {error}") from error
        if stage.outer != AVERAGE:
            check_outer(stage.name, sync, topology)
    for (last, before), (stage, own) in pairwise(zip(stages, parts.stages, strict=True)):
        if stage.handover.get("momentum") != "reset":
            check_momentum(stage.name, before, own)
        if not last.until and type(before.sync).loop is Rule.loop:
            raise UsageError(
                f"stage {last.name} has no rule by which it ends, so that stage {stage.name} would never begin; give "
                'its until one, as in {"commits": 100}'
            )


def chosen(option: Any) -> str:
    """The name under which an option is chosen: an option is a file, and so is its class."""
    return name_of(option) if isinstance(option, Topology) else type(option).__module__.rpartition(".")[2]


def check_momentum(stage: str, before: StageParts, own: StageParts) -> None:
    """A stage that keeps momentum needs one that its optimizer knows and, where all step alike, one that is alike."""
    held, wanted = (len(parts.optimizer.init(1)) for parts in (before, own))
    alike = not wanted or before.sync.exchange == "gradient" or own.sync.exchange != "gradient"
    if held == wanted and (alike or own.topology.has_server):
        return
    why = "each worker has another one after steps of its own, and all have to step alike"
    if held != wanted:
        why = "its optimizer remembers other things than the one before"
    raise UsageError(f"stage {stage} cannot take over the momentum of the stage before: {why}; take momentum=reset")


def check_outer(stage: str, sync: Rule, topology: Topology) -> None:
    """An outer optimizer needs merged updates, and to be the only one that steps on what is merged."""
    carried = carried_by(topology, sync)
    if OUTER in carried and sync.exchange == "difference":
        return
    why = "what is pushed there is no update"
    if topology.replicas:
        why = "workers average their models, and nobody adds up updates"
    elif OUTER in carried:
        why = "gradients are merged, and the optimizer is what steps on them"
    raise UsageError(
        f"an outer optimizer has nothing to step on in stage {stage}: {why}; take outer=average, or a mode that merges "
        "updates, as sync=local_sgd"
    )


def check_one_topology(stages: Sequence[StagePlan], parts: Sequence[StageParts]) -> None:
    """Each rank takes its state along from stage to stage, and what it holds is the topology's to say."""
    for stage, own in zip(stages, parts, strict=True):
        if type(own.topology) is not type(parts[0].topology):
            raise UsageError(
                f"stage {stages[0].name} has topology={name_of(parts[0].topology)} and stage {stage.name} has "
                f"topology={name_of(own.topology)}, but no worker can take its state from one to the other; take one "
                "topology for the whole run"
            )


def name_of(topology: Topology) -> str:
    """The topology as it is chosen."""
    return next(
        (name for name, kind in (TOPOLOGIES | NEAR).items() if isinstance(topology, kind)), type(topology).__name__
    )


def follows_samples(aggregate: Weighted) -> bool:
    """Whether a worker with three times the samples has three times the weight."""
    one = WorkerPlan(local_steps=1, batch=1, data_share=0.5, compression_ratio=1.0, predicted_cycle_s=None)
    few, many = aggregate.weigh([one, replace(one, batch=3)])
    return many == 3 * few


def check_workers(sync: Rule | None, topology: Topology, num_workers: int, seed: int) -> None:
    """Refuse rules that so many workers cannot keep."""
    if sync is not None:
        check_quorum(sync, num_workers)
        topology.check(sync, num_workers, seed)


def check_quorum(sync: Rule, num_workers: int) -> None:
    """A merge takes a whole number of pushes, and a barrier no more of them than there are workers to wait for."""
    quorum = sync.quorum(num_workers)
    most = num_workers if sync.in_rounds else math.inf
    if type(quorum) is not int or not 1 <= quorum <= most:
        whole = "up" if most == math.inf else f"to the {num_workers} workers that there are"
        raise UsageError(
            f"the quorum of '{type(sync).__module__}.{type(sync).__name__}' is {quorum!r}, where a whole number from 1 "
            f"{whole} is expected: so many pushes make a merge"
        )


def count_workers(parts: Mapping[str, Any], world_size: int | None) -> int:
    """Return how many workers there are. Raises UsageError where the job's size says otherwise.

    A job of as many processes as workers has its server, or coordinator, on the node of process 0, as a process more.
    """
    cluster, runtime, topology = (parts[key] for key in ("cluster", "runtime", "topology"))
    num_workers, extra = cluster.num_workers, extra_ranks(topology, parts["sync"], cluster.node)
    if isinstance(cluster, RealCluster):
        check_places(cluster, runtime.name, extra)
    if runtime.name != "torchrun":
        if num_workers is None:
            raise UsageError("cluster=real needs the number of processes: give cluster.num_workers=2, say")
        return num_workers
    if world_size is None:
        raise UsageError("runtime=torchrun needs a job to join: start it as `torchrun … -m ashl.cli train …`")
    other = "server" if topology.has_server else "coordinator"
    shared = 1 if extra == 1 else 0  # of the others, how many need no process of their own
    if num_workers is None and extra and world_size - extra <= 1:
        alone, fixes = max(0, world_size - extra), [f"start {2 + extra} processes"]
        if shared and world_size > 1:
            fixes += [f"give cluster.num_workers={world_size} (the {other} then shares the node of process 0)"]
        if alone:
            fixes += ["cluster.num_workers=1 if one worker is meant"]
        raise UsageError(
            f"{counted(world_size, 'process makes', 'processes make')} {counted(alone, 'worker', 'workers')} and "
            f"{counted(extra, other, other + 's')}, and one worker learns alone; "
            f"{', or '.join([*fixes, f'take a topology without a {other}'])}"
        )
    if num_workers is None:
        return world_size - extra
    if world_size - num_workers not in (extra, extra - shared):
        beside = f" and a {other}" if extra else ""
        less = f", or {num_workers} where the {other} shares a node" if shared else ""
        raise UsageError(
            f"the job has {counted(world_size, 'process', 'processes')}, but "
            f"{counted(num_workers, 'worker', 'workers')}{beside} need {num_workers + extra}{less}; change "
            "--nproc-per-node or the cluster"
        )
    return num_workers


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def check_places(cluster: RealCluster, runtime: str, extra: int) -> None:
    """Refuse hosts where nobody can be sent to them."""
    for key, value in (("hosts", cluster.hosts), ("server_host", cluster.server_host)):
        if value is not None and runtime != "torchrun":
            raise UsageError(
                f"cluster.{key} says where processes of a job are, and runtime={runtime} has none but its own; start "
                f"the command on these hosts, by torchrun say, or drop cluster.{key}"
            )
    if cluster.server_host is not None and not extra:
        text = (
            "cluster.server_host names a place for a server, and here there is none; drop it, or take another topology"
        )
        raise UnusedKeyError(text, "cluster.server_host")


def check_targets(limits: Limits, gradients: bool, task: Task, name: str) -> None:
    """Where nothing is learned, nothing can be reached, and not every task has an accuracy."""
    if limits.target_accuracy is not None and task.metric != ACCURACY:
        judged = f"is judged by {task.metric}" if task.metric else "has no metric"
        instead = "stop.target_metric" if task.metric else "stop.target_loss"
        raise UsageError(f"stop.target_accuracy: task={name} {judged}, not by accuracy; take {instead}")
    if limits.target_metric is not None and not task.metric:
        raise UsageError(f"stop.target_metric: task={name} has no metric; take stop.target_loss")
    if not gradients and any(getattr(limits, target) is not None for target in TARGETS):
        raise UsageError("runtime.gradients=false learns nothing, so a target cannot be reached; drop stop.target_…")
    if not gradients and limits.patience is not None:
        raise NoEffectError("runtime.gradients=false evaluates nothing; drop stop.patience", "stop.patience")
