"""What befalls a cluster, refused where a run could not go on as it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ashl.cluster.spec import FAIL, LINK_DOWN, SERVER_FAIL
from ashl.errors import UsageError
from ashl.learn.device import HOST
from ashl.optimizer.contract import Optimizer
from ashl.overlap.contract import Delayed
from ashl.plan.plan import StagePlan
from ashl.planning.build import Parts, StageParts
from ashl.planning.device import device_of
from ashl.planning.legal import carried_by, chosen
from ashl.stage.stage import CHURN
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import UPDATES, ParameterServer, ServerRule
from ashl.topology.partial_all_reduce import PartialAllReduce
from ashl.topology.sharded_server import ShardedServer

PIECEWISE = ("minibatch", "moments")  # estimators that take the worker's samples as they come
COMING = {"join", "churn"}  # where workers come while others run
MEMBERS = {FAIL, *COMING}  # what changes who takes part
INSTEAD = (
    "take topology=all_reduce or topology=parameter_server with sync=bsp, or restart from checkpoints with "
    "run.checkpoint_s and --resume"
)


def beside(own: StageParts) -> bool:
    """Whether a worker's exchanges go on beside its steps."""
    return isinstance(own.overlap, Delayed) or not own.overlap.serial


def entangled(own: StageParts) -> bool:
    """... so that none can go on without another. With a server that merges whole updates they are its own affair, and
    sums of parts that end with the step are all done once more."""
    whole = isinstance(own.topology, ParameterServer) and isinstance(own.overlap, Delayed) and not own.overlap.fragments
    parts = isinstance(own.topology, AllReduce) and not isinstance(own.overlap, Delayed) and not own.overlap.crosses
    return beside(own) and not (whole or parts)


def virtual_only(own: StageParts, parts: Parts) -> bool:
    """Whether it goes on without a worker in virtual time, and not on processes, where sums do if gloo carries them."""
    return by_sums(own) and parts.runtime.backend != "gloo" and device_of(parts.runtime) != HOST


def by_sums(own: StageParts) -> bool:
    """Return True if workers exchange by collective sums."""
    return isinstance(own.topology, AllReduce | PartialAllReduce)


def closed(own: StageParts) -> bool:
    """Whether a worker that is lost cannot come back."""
    return isinstance(own.topology, ShardedServer)


def survives(own: StageParts) -> bool:
    """Return True if the topology and the sync mode have a protocol for failed workers."""
    return CHURN in carried_by(own.topology, own.sync)


def goes_on(parts: Parts) -> bool:
    """Whether a run on processes goes on without a worker that is lost, in every stage that does not only measure."""
    return not by_grants(parts) and all(
        survives(own) and not (entangled(own) or virtual_only(own, parts)) for own in parts.stages
    )


def can_wait_for_good(parts: Parts) -> bool:
    """Whether others may wait for a worker that stands still, whatever they hear of it, until its process is ended:
    messages of sums over some of the workers cannot be broken off."""
    return any(isinstance(own.topology, PartialAllReduce) for own in parts.stages)


def by_grants(parts: Parts) -> bool:
    """Whether NCCL carries messages, which then nobody can break off that waits for the other side."""
    return parts.runtime.backend == "nccl" and parts.stages[0].topology.has_server


def lets_in(parts: Parts) -> bool:
    """... and lets it, or another in its place, come back."""
    return goes_on(parts) and not any(map(closed, parts.stages))


def modes_of(parts: Parts) -> str:
    """What of a run decides that, as it is chosen."""
    words = list[str]()
    for own in parts.stages:
        words += [f"topology={chosen(own.topology)}", f"sync={chosen(own.sync)}"]
        words += [f"overlap={chosen(own.overlap)}"] if beside(own) else []
    return " ".join(dict.fromkeys(words))


def check_rescaled(parts: Parts, run_dir: Path) -> None:
    """Raises UsageError where what a run keeps has no meaning for another number of workers."""
    for own in parts.stages:
        alike = isinstance(own.topology, ParameterServer | AllReduce)
        plain = not isinstance(own.sync, ServerRule) or own.sync.messages() is UPDATES
        if beside(own) or not (alike and plain) or not survives(own):
            raise UsageError(
                f"a run with {modes_of(parts)} cannot go on with another number of workers, as what it keeps belongs "
                f"to those that it has; a new one takes its weights along: run.start_from={run_dir}"
            )


def check_respawn(parts: Parts, checkpoint_s: float | None) -> None:
    """Raises UsageError where nobody who is killed would be started anew."""
    runtime = parts.runtime
    if runtime.name == "sim" or not runtime.respawn:
        return
    named = f"runtime.respawn={runtime.respawn}"
    if runtime.name != "local":
        raise UsageError(f"{named}: others have started these processes, and nobody starts them anew; drop it")
    if checkpoint_s is not None:
        raise UsageError(
            f"{named}: a run that leaves checkpoints (run.checkpoint_s) lets nobody back; drop one of the two"
        )
    if not lets_in(parts):
        raise UsageError(
            f"{named}: a run with {modes_of(parts)} lets nobody back; drop it, or take topology=parameter_server or "
            "all_reduce with sync=bsp overlap=none, or restart from checkpoints with run.checkpoint_s and --resume"
        )


def check_survivors(parts: Parts) -> None:
    """Raises UsageError where settings say what follows a failure and the run ends with the first one."""
    runtime, named = parts.runtime, list[str]()
    if runtime.min_workers > 1:
        named.append(f"runtime.min_workers={runtime.min_workers}")
    if runtime.on_loss != "forget":
        named.append(f"runtime.on_loss={runtime.on_loss}")
    if named and not all(map(survives, parts.stages)):
        raise UsageError(
            f"{', '.join(named)}: a run with {modes_of(parts)} ends when a worker fails; drop it, or {INSTEAD}"
        )


def check_churn(parts: Parts, stages: Sequence[StagePlan], checkpoint_s: float | None) -> None:
    """Raises UsageError, with what to take instead."""
    check_respawn(parts, checkpoint_s)
    befalls, n = set(parts.cluster.befalls), len(stages[0].workers)
    if parts.runtime.min_workers > n:
        raise UsageError(
            f"runtime.min_workers={parts.runtime.min_workers}, and there are {n} workers; take at most {n}"
        )
    check_survivors(parts)
    if parts.runtime.on_loss == "reshard":
        check_reshard(parts, stages)
    if not befalls:
        return
    named = ", ".join(sorted(befalls))
    if parts.runtime.name != "sim" and (befalls - {FAIL} or parts.runtime.name != "local"):
        raise UsageError(
            f"cluster.events and cluster.churn ({named}) are for virtual time, but for fail with runtime=local; take "
            "runtime=sim"
        )
    if checkpoint_s is not None:
        raise UsageError(
            f"run.checkpoint_s: no checkpoint holds yet what befalls a cluster ({named}); drop it, or the events"
        )
    if SERVER_FAIL in befalls and not parts.stages[0].topology.has_server:
        raise UsageError(
            f"cluster.events: topology={chosen(parts.stages[0].topology)} has no server that could fail; drop "
            "server_fail, or take topology=parameter_server"
        )
    for stage, own in zip(stages, parts.stages, strict=True):
        check_stage(stage.name, own, parts, befalls)


def check_stage(name: str, own: StageParts, parts: Parts, befalls: set[str]) -> None:
    """Raises UsageError where a stage cannot go on through what befalls the cluster."""
    named = ", ".join(sorted(befalls))
    where = f"cluster.{'churn' if 'churn' in befalls else 'events'} ({named})"
    if befalls & MEMBERS and not survives(own):
        who = f"sync={chosen(own.sync)}" if CHURN in own.topology.carries else f"topology={chosen(own.topology)}"
        raise UsageError(
            f"{where}: stage {name} has {who}, which cannot go on without a failed worker; remove these failures, or "
            f"{INSTEAD}"
        )
    if befalls & COMING and closed(own):
        raise UsageError(
            f"{where}: stage {name} has topology={chosen(own.topology)}, where a failed worker cannot rejoin yet; take "
            "topology=parameter_server, or events of fail alone"
        )
    if befalls & MEMBERS and parts.runtime.name != "sim" and virtual_only(own, parts):
        raise UsageError(
            f"{where}: stage {name} sums by NCCL, and processes go on without a worker only where gloo sums; take "
            "runtime.backend=gloo, or runtime=sim"
        )
    if entangled(own) and befalls - {LINK_DOWN, SERVER_FAIL}:
        raise UsageError(
            f"{where} with overlap={chosen(own.overlap)} is not built yet: what goes on beside a step would not stand "
            "still; take overlap=none"
        )


def check_reshard(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Where a worker keeps something of the whole of its shard, that cannot grow on the way."""
    for stage, own in zip(stages, parts.stages, strict=True):
        estimator = own.sync.estimator or own.compression.estimator
        whole = isinstance(own.sync, ServerRule) and own.sync.messages().whole
        if whole or estimator not in PIECEWISE or type(own.optimizer).statistics is not Optimizer.statistics:
            raise UsageError(
                f"runtime.on_loss=reshard: in stage {stage.name} a worker computes with its whole shard at once, which "
                "cannot grow on the way; take runtime.on_loss=forget"
            )
