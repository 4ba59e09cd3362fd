"""By which algorithm the sums of an all-reduce go: what makes no sense of it, and what it comes to,
in words.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ashl.cluster.network import network
from ashl.cluster.spec import Cluster, RealCluster
from ashl.compression.contract import Layout, size_of
from ashl.errors import UsageError
from ashl.plan.plan import Plan, StagePlan
from ashl.planning.compatibility import option_name
from ashl.planning.instantiate import Parts, StageParts, layout_of, link_of

LINKS = {"bandwidth_mbit_s", "latency_s", "intra_node_bandwidth_mbit_s"}
DROP = "or drop topology.algorithm"


def nodes_of_workers(cluster: Any) -> tuple[int, ...] | None:
    """The machine of each worker; None where nobody says."""
    if isinstance(cluster, RealCluster) and cluster.hosts is not None:
        return tuple(map(cluster.hosts.index, cluster.hosts))
    return cluster.node


def check_reduction_algorithm(parts: Parts, stages: Sequence[StagePlan], layout: Layout) -> None:
    """Raises UsageError, with what to take instead."""
    algorithm = parts.stages[0].topology.algorithm
    for stage, own in zip(stages, parts.stages, strict=True):
        if own.topology.algorithm != algorithm:
            raise UsageError(
                f"stage {stage.name} has topology.algorithm={own.topology.algorithm or 'null'} and"
                f" stage {stages[0].name} has {algorithm or 'null'}; give all stages of a run one"
            )
        if algorithm is not None:
            check_stage_algorithm(algorithm, stage, own, parts, layout)


def check_stage_algorithm(
    algorithm: str, stage: StagePlan, own: StageParts, parts: Parts, layout: Layout
) -> None:
    """Refuse a hierarchy without nodes, a choice without costs, an algorithm on processes, and what
    is no sum.
    """
    name, cluster = f"topology.algorithm={algorithm}", parts.cluster
    if parts.runtime.name != "sim" and algorithm != "hierarchical":
        raise UsageError(
            f"{name} is a cost of virtual time, and on processes gloo or NCCL chooses how a sum"
            f" travels; take runtime=sim, topology.algorithm=hierarchical, {DROP}"
        )
    if algorithm == "hierarchical" and nodes_of_workers(cluster) is None:
        where = "cluster.hosts" if isinstance(cluster, RealCluster) else "cluster.node"
        raise UsageError(
            f"{name} sums inside each machine first, and {where} does not say who shares one; give"
            " the machine of each worker, as in"
            f" '{where}=[{'a,a,b,b' if where == 'cluster.hosts' else '0,0,1,1'}]', or take"
            " topology.algorithm=ring"
        )
    missing = LINKS & set(cluster.missing()) if isinstance(cluster, Cluster) else LINKS
    if missing and isinstance(cluster, Cluster) and cluster.bandwidth_mbit_s is not None:
        raise UsageError(f"{name} costs what its links do; give cluster.{min(missing)} a value")
    if missing and algorithm == "auto":
        raise UsageError(
            f"{name} weighs declared costs, and this cluster does not say what its links are;"
            " declare cluster.bandwidth_mbit_s and cluster.latency_s, or name the algorithm, as in"
            " topology.algorithm=halving"
        )
    if own.overlap.reduce_scatter_all_gather:
        raise UsageError(
            f"{name} is not supported with overlap={option_name(own.overlap)}, which sends sums in"
            f" two halves round a ring; take overlap=priority, {DROP}"
        )
    if not link_of(own.compression, layout, 0, size_of(layout)).adds_up:
        raise UsageError(
            f"{name} is not supported with compression={option_name(own.compression)} in stage"
            f" {stage.name}: what does not add up is gathered round a ring; take compression=none,"
            f" random_mask or power_sgd, {DROP}"
        )


def note_reduction_times(plan: Plan, parts: Parts, clock: Any) -> tuple[str, ...]:
    """What a sum of all takes by the algorithm that was asked for, beside the others. Raises
    UsageError where they cannot go so."""
    check_reduction_algorithm(parts, plan.stages, layout_of(plan.layers))
    algorithm, found = parts.stages[0].topology.algorithm, list[str]()
    if algorithm is None or plan.num_workers == 1:
        return ()
    if isinstance(clock, Cluster) and not LINKS & set(clock.missing()):
        nbytes, group = (
            plan.stages[-1].workers[0].message_bytes or 0,
            tuple(range(plan.num_workers)),
        )
        summing = network(replace(clock, events=()), 4 * plan.num_params, algorithm).summing
        assert summing is not None
        taken = [summing.by(name, group, nbytes, 0) for name in summing.candidates(group)]
        best = summing.known(group, nbytes)
        if best.algorithm not in {known.algorithm for known in taken}:
            taken.append(best)
        text = f"topology.algorithm={algorithm}" + (
            f" picks {best.algorithm}" if algorithm == "auto" else ""
        )
        times = ", ".join(f"{known.algorithm} {known.cost_ns / 1e6:.4g}" for known in taken)
        found.append(
            f"{text}: a sum of {nbytes} bytes takes {best.cost_ns / 1e6:.4g} ms (ms: {times})"
        )
    if (
        isinstance(parts.cluster, RealCluster)
        and parts.runtime.name != "sim"
        and parts.runtime.reduction == "deterministic"
    ):
        found.append(
            "topology.algorithm=hierarchical has no effect with runtime.reduction=deterministic,"
            " which sums in rank order; take runtime.reduction=backend"
        )
    return tuple(found)
