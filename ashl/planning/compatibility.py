"""Check a plan, its stages, and the faults that it injects or survives.

`ashl.planning.capabilities` finds options that do not work together. The checks here need more than
the options: the number of workers, the layers of the model, the order of stages, or faults. Each
raises UsageError with one sentence, `key=value: problem; fix`. The predicates at the end of the
module answer during a run: may the run continue without a failed worker, and may a worker rejoin.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ashl.cluster.spec import FAIL, SERVER_FAIL, Cluster, RealCluster
from ashl.compression.contract import (
    Codec,
    Collective,
    Layout,
    Linear,
    Reduces,
    Wrappable,
    size_of,
)
from ashl.compression.wrappers import inner_codec, wrap_codec
from ashl.config.override import group_of, key_of
from ashl.errors import NoEffectError, UnusedKeyError, UsageError
from ashl.optimizer.contract import Optimizer
from ashl.overlap.contract import Delayed
from ashl.plan.plan import TARGETS, Limits, Plan, Spec, StagePlan
from ashl.planning.capabilities import (
    Choice,
    can_encode_pulls,
    capabilities_of,
    check_choice,
    has_plain_messages,
    is_adam,
)
from ashl.planning.device import uses_nccl
from ashl.planning.instantiate import Parts, StageParts, layout_of
from ashl.planning.settings import STAGE_GROUPS
from ashl.stage.contract import FAULT_TOLERANT, PULLS, Rule, Topology, extra_ranks
from ashl.sync.profiling import Profiling
from ashl.task.contract import ACCURACY, Task
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer, ServerRule
from ashl.topology.partial_all_reduce import PartialAllReduce
from ashl.topology.sharded_server import ShardedServer

# ends of a stage that depend on the loss or the accuracy
NEED_LOSS = {"loss", "evaluated_loss", "accuracy", "rises", "plateau"}
# wire codes of codecs outside this package
OWN_CODES = range(128, 256)
# gradient estimators that compute on minibatches, not on the whole shard
MINIBATCH_ESTIMATORS = ("minibatch", "moments")
MEMBERSHIP_KINDS = {FAIL, "rejoin", "churn"}  # faults that change the set of running workers
TOLERANT_INSTEAD = (
    "take topology=all_reduce or topology=parameter_server with sync=bsp, or restart from"
    " checkpoints with run.checkpoint_s and --resume"
)


def check_sync_overrides(schedule: str, overrides: Sequence[str]) -> None:
    """Refuse `sync=` with a schedule that sets the sync mode of each stage.

    Raises: UnusedKeyError.
    """
    typed = [override for override in overrides if group_of(override) == "sync"]
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


def check_costs(parts: Mapping[str, Any]) -> None:
    """Refuse a cluster without costs in virtual time, and a backend that the run cannot use.

    Raises: UsageError.
    """
    runtime, cluster = parts["runtime"], parts["cluster"]
    if runtime.name != "sim":
        uses_nccl(runtime, parts["topology"], cluster)
    elif isinstance(cluster, RealCluster):
        raise UsageError(
            "cluster=real: declares no costs, which runtime=sim needs; take another cluster,"
            " add the profile=FILE that was measured on this one, or take runtime=local"
        )
    elif missing := cluster.missing_costs():
        raise UsageError(
            f"cluster.{missing[0]}: not declared, and runtime=sim needs it (a missing cost is"
            " not zero); set a value, or measure with runtime=local"
        )


def check_stages(parts: Parts, plan: Plan) -> None:
    """Refuse stages whose options do not work together, and stages that cannot follow one another.

    Raises: UsageError.
    """
    stages = plan.stages
    check_one_topology(stages)
    topology = parts.stages[0].topology
    if isinstance(topology, ShardedServer):
        topology.bounds([layer.size for layer in layout_of(plan.layers)])  # checks them
    check_online_costs(parts, stages)
    extra = {extra_ranks(own.topology, own.sync, parts.cluster.node) for own in parts.stages}
    if len(extra) > 1:
        raise UsageError(
            "schedule: some stages need a coordinator process and others do not, and a run keeps"
            " its processes; take stages of one kind"
        )
    for stage, own in zip(stages, parts.stages, strict=True):
        check_quorum(own.sync, len(stage.workers))
        check_stage_end(stage, parts)
        check_choice(stage_choice(plan, stage, own, parts), stage.name)
    for before, stage, own in zip((None, *parts.stages), stages, parts.stages, strict=False):
        continues = before is not None and stage.handover.get("momentum") != "reset"
        if own.sync.after_adam and not (before and continues and is_adam(own.optimizer)):
            raise UsageError(
                f"stage {stage.name}: sync={option_name(own.sync)} needs the moments of a stage"
                " with Adam; take schedule=one_bit_adam optimizer=adam"
            )
        if before is not None and continues:
            check_momentum_handover(stage.name, before, own)
    check_order(parts, stages)


def check_order(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse a stage that never ends, and a server learning rate that cannot change.

    Raises: UsageError.
    """
    rows = zip(pairwise(stages), parts.stages, parts.stages[1:], strict=False)
    for (previous, stage), before, own in rows:
        if not previous.until and type(before.sync).loop is Rule.loop:
            raise UsageError(
                f"stage {previous.name}: until is empty, so stage {stage.name} would never begin;"
                ' set until, for example {"commits": 100}'
            )
        changes = stage.aggregate["scale"] != previous.aggregate["scale"]
        if changes and own.sync.exchange != "difference":
            raise UsageError(
                f"stage {stage.name}: the server learning rate (aggregate.scale) changes, and"
                f" sync={option_name(own.sync)} has none, as it merges gradients; take a mode that"
                " merges updates, for example sync=local_sgd sync.local_steps=1, or"
                " optimizer.schedule=cosine"
            )


def stage_choice(plan: Plan, stage: StagePlan, own: StageParts, parts: Parts) -> Choice:
    """Return the options of a stage, as `check_choice` judges them."""
    planner = parts.planner if stage.h_preset is not None else None
    names = {group: option_name(option) for group, option in vars(own).items()}
    of_run = {group: plan.choices.get(group, "") for group in ("model", "task", "cluster")}
    return Choice(
        **vars(own),
        planner=planner,
        model=parts.model,
        task=parts.task,
        cluster=parts.cluster,
        gradients=parts.runtime.gradients,
        num_workers=plan.num_workers,
        layout=layout_of(plan.layers),
        names={**names, **of_run, "planner": option_name(parts.planner)},
        scheduled="sync" not in plan.choices,
    )


def check_online_costs(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse a planner that replans and has no costs to begin with.

    Raises: UsageError.
    """
    plans = parts.planner.replans and any(stage.h_preset is not None for stage in stages)
    declared = isinstance(parts.cluster, Cluster) and not parts.cluster.missing_costs()
    if plans and not declared and not isinstance(parts.stages[0].sync, Profiling):
        raise UsageError(
            f"planner={option_name(parts.planner)}: needs initial costs, from the cluster or from a"
            " profiling stage, and"
            " there are none; take planner=balanced, or remove profile=FILE and take a schedule"
            " that profiles, for example schedule=ashl_next"
        )


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
    return type(option).__module__.rpartition(".")[2]


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


def check_one_topology(stages: Sequence[StagePlan]) -> None:
    """Refuse stages of different topologies: a rank's state depends on the topology and its keys.

    Only the density of pulls may differ.
    Raises: UsageError.
    """

    def fixed_keys(stage: StagePlan) -> Spec:
        return {key: value for key, value in stage.topology.items() if key != "pull_ratio"}

    for stage in stages:
        if fixed_keys(stage) != fixed_keys(stages[0]):
            raise UsageError(
                f"stage {stage.name}: the topology, or a key of it, differs from that of stage"
                f" {stages[0].name}, and a worker's state cannot be converted; take one topology"
                " for the whole run"
            )


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

    Raises: UsageError if the job's size does not fit the number of workers.
    """
    cluster, runtime, topology = (parts[key] for key in ("cluster", "runtime", "topology"))
    num_workers, extra = cluster.num_workers, extra_ranks(topology, parts["sync"], cluster.node)
    if isinstance(cluster, RealCluster):
        check_hosts(cluster, runtime.name)
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
    found = world_size - extra
    if found == num_workers or (num_workers is None and (not extra or found > 1)):
        return found
    asked = num_workers or 2
    other = "server" if topology.has_server else "coordinator"
    beside = f" and {pluralize(extra, other, other + 's')}" if extra else ""
    raise UsageError(
        f"runtime=torchrun: the job has {pluralize(world_size, 'process', 'processes')}, and"
        f" {pluralize(asked, 'worker', 'workers')}{beside} need {asked + extra}; change"
        " the number of processes (--nproc-per-node of torchrun, or `slots=` in the hosts file), or"
        " set cluster.num_workers"
    )


def pluralize(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def check_hosts(cluster: RealCluster, runtime: str) -> None:
    """Raise UsageError if cluster.hosts is set where no launcher places the processes."""
    if cluster.hosts is not None and runtime != "torchrun":
        raise UsageError(
            f"cluster.hosts: places processes of a job, and runtime={runtime} starts its own on"
            " this machine; start the command on these hosts, for example by torchrun, or remove"
            " cluster.hosts"
        )


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
    """Check the values of the codec for this model.

    Args: `layout` has the name and shape of each layer of the model.
    Returns: notes on the codec, one sentence each.
    Raises: UsageError.
    """
    option, topology, d = parts["compression"], parts["topology"], size_of(layout)
    name = f"compression={choices['compression']}"
    codec = wrap_codec(option, layout)
    if codec.traits.lossless:
        return []
    check_codec_roles(name, inner_codec(codec))
    shares = {
        "compression.ratio": option.ratio,
        "compression.critical_ratio": option.critical_ratio,
        "topology.pull_ratio": topology.pull_ratio if topology.has_server else None,
    }
    for key, share in shares.items():
        if share is not None and share * d < 1:
            raise UsageError(
                f"{key}={share:g}: sends less than one of the model's {d} elements; take at least"
                f" 1/{d}"
            )
    if option.critical_ratio and option.ratio and option.critical_ratio < option.ratio:
        raise UsageError(
            f"compression.critical_ratio={option.critical_ratio:g}: the density while gradients"
            f" change fast is less than compression.ratio={option.ratio:g}, the density otherwise;"
            " exchange the two values"
        )
    return note_compression(name, option, codec, parts, d, num_workers)


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


def note_dense_pulls(plan: Plan, parts: Parts) -> tuple[str, ...]:
    """Return a note on `topology.pull_ratio` where pushes are compressed and pulls could be."""
    d = plan.num_params
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        topology, codec, sync = own.topology, own.compression, own.sync
        plain = isinstance(sync, ServerRule) and has_plain_messages(sync)
        if (
            not plain
            or codec.traits.lossless
            or PULLS not in topology.supports
            or topology.pull_ratio is not None
        ):
            continue
        sent = max(worker.message_bytes or 0 for worker in stage.workers)
        if sent < 4 * d and can_encode_pulls(codec):
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
    topology, ratio, notes = parts["topology"], option.ratio, list[str]()
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
    if isinstance(inner_codec(codec), Collective):
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


def has_failure_protocol(own: StageParts) -> bool:
    """Return True if the topology and the sync mode have a protocol for failed workers."""
    tolerant = FAULT_TOLERANT in capabilities_of(own.topology, own.sync)
    return tolerant and not own.topology.has_fixed_size


def explain_intolerance(own: StageParts, runtime: Any, cluster: Any) -> str | None:
    """Return why a stage cannot continue without a failed worker; None if it can. Then this worker
    can rejoin, too.
    """
    if own.topology.has_fixed_size:
        return (
            f"the graph of topology={option_name(own.topology)} does not exist for every number of"
            " workers; take topology.graph=ring, or remove these faults"
        )
    if not has_failure_protocol(own):
        mode = (
            f"sync={option_name(own.sync)}"
            if FAULT_TOLERANT in own.topology.supports
            else f"topology={option_name(own.topology)}"
        )
        return (
            f"{mode} cannot continue without a failed worker; remove these faults, or"
            f" {TOLERANT_INSTEAD}"
        )
    if runtime.name != "sim" and uses_nccl(runtime, own.topology, cluster):
        return (
            "its operations of NCCL cannot be aborted when a worker fails; take"
            " runtime.backend=gloo, or runtime=sim"
        )
    return None


def survives_failure(parts: Parts) -> bool:
    """Return True if a run on real processes continues without a failed worker in every stage, and
    this worker can rejoin.
    """
    return not any(explain_intolerance(own, parts.runtime, parts.cluster) for own in parts.stages)


def can_block_forever(parts: Parts) -> bool:
    """Return True if workers may block on a hung worker until its process ends.

    Messages of an all-reduce over some of the workers cannot be aborted.
    """
    return any(isinstance(own.topology, PartialAllReduce) for own in parts.stages)


def describe_modes(parts: Parts) -> str:
    """Return the topologies, sync modes and overlaps of a run as a user types them."""
    words = list[str]()
    for own in parts.stages:
        words += [f"topology={option_name(own.topology)}", f"sync={option_name(own.sync)}"]
        if isinstance(own.overlap, Delayed) or not own.overlap.serial:
            words.append(f"overlap={option_name(own.overlap)}")
    return " ".join(dict.fromkeys(words))


def check_max_restarts(parts: Parts) -> None:
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
    if not survives_failure(parts):
        raise UsageError(
            f"{named}: a run with {describe_modes(parts)} does not support rejoins; remove it, or"
            " take topology=parameter_server or all_reduce with sync=bsp overlap=none, or restart"
            " from checkpoints with run.checkpoint_s and --resume"
        )


def check_failure_keys(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse settings of failure handling that a run does not support.

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
    if runtime.on_worker_failure == "reshard":
        check_reshard(parts, stages)
    if runtime.on_worker_failure == "keep_batch":
        check_keep_batch(parts, stages)


def check_faults(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse injected faults, and settings of failure handling, that the run does not support.

    Raises: UsageError.
    """
    check_max_restarts(parts)
    fault_kinds, n = set(parts.cluster.fault_kinds), len(stages[0].workers)
    if parts.runtime.min_workers > n:
        raise UsageError(
            f"runtime.min_workers={parts.runtime.min_workers}: the run has {n} workers; take at"
            f" most {n}"
        )
    check_failure_keys(parts, stages)
    if not fault_kinds:
        return
    named = ", ".join(sorted(fault_kinds))
    if parts.runtime.name != "sim" and (fault_kinds - {FAIL} or parts.runtime.name != "local"):
        raise UsageError(
            f"cluster.events, cluster.churn ({named}): supported in virtual time only, except fail"
            " with runtime=local; take runtime=sim"
        )
    if SERVER_FAIL in fault_kinds and not parts.stages[0].topology.has_server:
        raise UsageError(
            f"cluster.events: topology={option_name(parts.stages[0].topology)} has no server that"
            " could fail; remove server_fail, or take topology=parameter_server"
        )
    if not fault_kinds & MEMBERSHIP_KINDS:
        return
    where = f"cluster.{'churn' if 'churn' in fault_kinds else 'events'} ({named})"
    for stage, own in zip(stages, parts.stages, strict=True):
        if why := explain_intolerance(own, parts.runtime, parts.cluster):
            raise UsageError(f"{where}: not supported in stage {stage.name}, {why}")


def check_keep_batch(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse to hold the global batch where a round is not one gradient of every worker.

    Raises: UsageError.
    """
    for stage, own in zip(stages, parts.stages, strict=True):
        sync, n = own.sync, len(stage.workers)
        if isinstance(sync, Profiling):
            continue
        why = None
        if not sync.in_rounds or sync.exchange != "gradient" or sync.quorum(n) < n:
            why = f"sync={option_name(sync)} does not merge one gradient of every worker at once"
        elif sync.resizes:
            why = f"sync={option_name(sync)} sets the batches itself"
        elif (sync.estimator or own.compression.estimator) != "minibatch":
            why = f"stage {stage.name} exchanges more than the gradient of a minibatch"
        elif not own.overlap.serial:
            why = f"overlap={option_name(own.overlap)} sends a gradient before it is accumulated"
        elif type(own.topology) not in (ParameterServer, AllReduce):
            why = f"topology={option_name(own.topology)} does not set the batches of its workers"
        if why is not None:
            raise UsageError(
                f"runtime.on_worker_failure=keep_batch: {why}; take sync=bsp overlap=none with"
                " topology=parameter_server or all_reduce, or runtime.on_worker_failure=skip"
            )


def check_reshard(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Refuse to reshard the data where a worker keeps state of its whole shard.

    Raises: UsageError.
    """
    for stage, own in zip(stages, parts.stages, strict=True):
        estimator = own.sync.estimator or own.compression.estimator
        whole = isinstance(own.sync, ServerRule) and own.sync.pushes_full_gradients
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
