"""Algorithm of all-reduces (`topology.algorithm`): its checks, and a note on its duration."""

from dataclasses import replace
from typing import Any

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster, RealCluster
from ashl.compression.contract import Layout, size_of
from ashl.errors import UsageError
from ashl.plan.plan import Plan, StagePlan
from ashl.planning.compatibility import option_name
from ashl.planning.instantiate import Parts, StageParts, layout_of, link_of

LINKS = {"bandwidth_mbit_s", "latency_s", "intra_node_bandwidth_mbit_s"}
DROP = "or remove topology.algorithm"


def nodes_of_workers(cluster: Any) -> tuple[int, ...] | None:
    """Return the node of each worker; None if it is not known."""
    if isinstance(cluster, RealCluster) and cluster.hosts is not None:
        return tuple(map(cluster.hosts.index, cluster.hosts))
    return cluster.node


def check_stage_algorithm(
    algorithm: str, stage: StagePlan, own: StageParts, parts: Parts, layout: Layout
) -> None:
    """Refuse an algorithm that a stage does not support.

    A hierarchy needs nodes, `auto` needs declared costs, and real processes support only a
    hierarchy. Gathered payloads, and all-reduces in two halves, always use a ring.
    Raises: UsageError.
    """
    name, cluster = f"topology.algorithm={algorithm}", parts.cluster
    if parts.runtime.name != "sim" and algorithm != "hierarchical":
        raise UsageError(
            f"{name}: supported in virtual time only, gloo or NCCL chooses the algorithm on real"
            f" processes; take runtime=sim, topology.algorithm=hierarchical, {DROP}"
        )
    if algorithm == "hierarchical" and nodes_of_workers(cluster) is None:
        where = "cluster.hosts" if isinstance(cluster, RealCluster) else "cluster.node"
        raise UsageError(
            f"{name}: reduces inside each node first, and {where} is not set; give the node of each"
            " worker, for example"
            f" '{where}=[{'a,a,b,b' if where == 'cluster.hosts' else '0,0,1,1'}]', or take"
            " topology.algorithm=ring"
        )
    missing = LINKS & set(cluster.missing_costs()) if isinstance(cluster, Cluster) else LINKS
    if missing and isinstance(cluster, Cluster) and cluster.bandwidth_mbit_s is not None:
        raise UsageError(
            f"{name}: needs the costs of links, and cluster.{min(missing)} is not declared; set"
            f" cluster.{min(missing)}"
        )
    if missing and algorithm == "auto":
        raise UsageError(
            f"{name}: compares the costs of links, and this cluster declares none; set"
            " cluster.bandwidth_mbit_s and cluster.latency_s, or name the algorithm, for example"
            " topology.algorithm=halving"
        )
    if own.overlap.reduce_scatter_all_gather:
        raise UsageError(
            f"{name}: not supported with overlap={option_name(own.overlap)}, which splits an"
            f" all-reduce into two halves of a ring; take overlap=priority, {DROP}"
        )
    if not link_of(own.compression, layout, 0, size_of(layout)).has_constant_size:
        raise UsageError(
            f"{name}: not supported with compression={option_name(own.compression)} in stage"
            f" {stage.name}, payloads that cannot be summed are gathered on a ring; take"
            f" compression=none, random_mask or power_sgd, {DROP}"
        )


def note_reduction_times(plan: Plan, parts: Parts, cost_cluster: Any) -> tuple[str, ...]:
    """Return notes on the duration of an all-reduce by the chosen algorithm.

    Raises: UsageError if a stage does not support the algorithm.
    """
    algorithm, found = parts.stages[0].topology.algorithm, list[str]()
    if algorithm is None:
        return ()
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        check_stage_algorithm(algorithm, stage, own, parts, layout_of(plan.layers))
    if plan.num_workers == 1:
        return ()
    if isinstance(cost_cluster, Cluster) and not LINKS & set(cost_cluster.missing_costs()):
        nbytes = plan.stages[-1].workers[0].message_bytes or 0
        group = tuple(range(plan.num_workers))
        links = make_network(replace(cost_cluster, events=()), 4 * plan.num_params, algorithm)
        assert links.all_reduce_costs is not None
        best = links.all_reduce_costs.initial_cost(group, nbytes)
        picks = f" picks {best.algorithm}" if algorithm == "auto" else ""
        found.append(
            f"topology.algorithm={algorithm}{picks}: an all-reduce of {nbytes} bytes takes"
            f" {best.cost_ns / 1e6:.4g} ms"
        )
    if (
        isinstance(parts.cluster, RealCluster)
        and parts.runtime.name != "sim"
        and parts.runtime.reduction == "deterministic"
    ):
        found.append(
            "topology.algorithm=hierarchical has no effect with runtime.reduction=deterministic,"
            " which reduces in rank order; take runtime.reduction=backend"
        )
    return tuple(found)
