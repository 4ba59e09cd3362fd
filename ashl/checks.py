"""Combinations that make no sense, refused in words that say why and what to take instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ashl.cluster.spec import RealCluster
from ashl.compression.feedback import with_feedback
from ashl.construct import construct
from ashl.errors import UsageError
from ashl.plan.plan import Limits, StagePlan

NEED_LOSS = {"loss", "evaluated_loss", "accuracy", "plateau"}  # rules by which a stage ends


def refuse_sync(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """A schedule that says which sync mode each stage has leaves nothing for `sync=` to say."""
    given = [override for override in overrides if override.lstrip("+").startswith(("sync=", "sync."))]
    if given:
        name = config["schedule"]["_target_"].rsplit(".", 2)[-2]
        raise UsageError(
            f"schedule={name} names the sync mode of each of its stages, so {given[0]} has no say; drop it, or "
            "take schedule=single"
        )


def check_combination(parts: dict[str, Any]) -> None:
    """Refuse what makes no sense, saying why and what to take instead."""
    sync, topology, runtime, cluster = (parts[key] for key in ("sync", "topology", "runtime", "cluster"))
    topology_name = type(topology).__module__.rsplit(".", 1)[-1]
    sync_name = type(sync).__module__.rsplit(".", 1)[-1] if sync is not None else ""
    if sync is not None and topology_name not in sync.topologies:
        why = {
            "all_reduce": "a sum over all workers cannot start before the last one has come, so nobody can be ahead",
        }.get(topology_name, f"{sync_name} has no rule for it")
        raise UsageError(
            f"sync={sync_name} makes no sense with topology={topology_name}: {why}; take "
            f"topology={' or '.join(sync.topologies)}, or sync=bsp or sync=local_sgd"
        )
    codec = with_feedback(parts["compression"])
    if not topology.has_server and not codec.flags.lossless:
        name = type(parts["compression"]).__module__.rsplit(".", 1)[-1]
        raise UsageError(
            f"compression={name} makes no sense with topology={topology_name}: what a sum meets on its way must add "
            "up, and compressed vectors do not; take compression=none, or topology=parameter_server"
        )
    if topology.has_server and topology.pull_ratio is not None and codec.flags.lossless:
        raise UsageError("topology.pull_ratio needs a compression to pull with; take compression=topk, or drop it")
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


def check_stages(stages: Sequence[StagePlan], topology: Any, gradients: bool, allow: Sequence[str]) -> None:
    """Refuse a schedule whose stages the topology cannot run, or that needs a loss where nothing is learned."""
    name = type(topology).__module__.rsplit(".", 1)[-1]
    for stage in stages:
        sync = construct(stage.sync, "sync", allow)
        if not gradients and set(stage.until) & NEED_LOSS:
            raise UsageError(
                f"runtime.gradients=false learns nothing, and stage {stage.name} ends by {', '.join(stage.until)}; "
                "take one sync mode for the whole run, as in sync=asp"
            )
        if name not in sync.topologies:
            raise UsageError(
                f"stage {stage.name} of the schedule has no rule for topology={name}; take "
                f"topology={' or '.join(sync.topologies)}, or one sync mode for the whole run, as in sync=bsp"
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


def check_targets(limits: Limits, gradients: bool, loss: str) -> None:
    """Where nothing is learned, nothing can be reached, and a regression has no accuracy."""
    if limits.target_accuracy is not None and loss == "squared":
        raise UsageError("stop.target_accuracy: this data set's targets are values, not classes; take stop.target_loss")
    if not gradients and (limits.target_accuracy is not None or limits.target_loss is not None):
        raise UsageError("runtime.gradients=false learns nothing, so a target cannot be reached; drop stop.target_…")
