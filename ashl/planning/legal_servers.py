"""Several servers, refused where the pieces of a model cannot be merged one by one."""

from ashl.cluster.spec import Cluster
from ashl.errors import UsageError
from ashl.outer.contract import Outer
from ashl.plan.plan import Plan, StagePlan
from ashl.planning.build import Parts, StageParts, layout_of
from ashl.planning.legal import chosen
from ashl.stage.stage import Rule
from ashl.topology.parameter_server import UPDATES, ServerRule
from ashl.topology.sharded_server import ShardedServer

ONE = "topology=parameter_server"


def check_servers(plan: Plan, parts: Parts) -> None:
    """Raises UsageError, with what to take instead."""
    topology, cluster = parts.stages[0].topology, parts.cluster
    if not isinstance(topology, ShardedServer):
        return
    name = f"topology={chosen(topology)}"
    topology.bounds([layer.size for layer in layout_of(plan.layers)])
    for stage, own in zip(plan.stages, parts.stages, strict=True):
        if own.topology != topology:
            raise UsageError(
                f"{name}: stage {stage.name} has other servers than stage {plan.stages[0].name}, and none can hand its "
                "piece over; take the same topology.servers and topology.cut in all stages"
            )
        check_pieces(name, stage, own, parts)
    if isinstance(cluster, Cluster) and cluster.exchange_s is not None:
        raise UsageError(
            f"{name} gains ports, and with cluster.exchange_s no port is ever busy; give cluster.exchange_s=null with "
            f"cluster.bandwidth_mbit_s and cluster.latency_s, or take {ONE}"
        )
    if isinstance(cluster, Cluster) and cluster.node is not None:
        raise UsageError(
            f"{name}: where the servers would be on the machines of cluster.node is not built yet; take "
            f"cluster.node=null, or {ONE}"
        )


def check_pieces(name: str, stage: StagePlan, own: StageParts, parts: Parts) -> None:
    """Refuse what wants all of the model at once."""
    sync, outer = own.sync, own.outer
    plain = type(sync).loop is Rule.loop and type(sync).step is Rule.step
    if not isinstance(sync, ServerRule) or not plain or sync.messages() is not UPDATES or sync.takes_all:
        raise UsageError(
            f"{name} merges plain updates piece by piece, and sync={chosen(sync)} has a loop, messages or a step of "
            f"its own; take sync=bsp, local_sgd, asp or ssp, or {ONE}"
        )
    if stage.h_preset is not None and parts.planner.follows:
        raise UsageError(
            f"{name}: no server sees whole pushes, and a planner that plans anew wants one; take another, or {ONE}"
        )
    if sync.exchange == "gradient" and not own.optimizer.elementwise:
        raise UsageError(
            f"{name}: optimizer={chosen(own.optimizer)} steps on whole layers, and a server has a piece of the model; "
            f"take optimizer=sgd, or {ONE}"
        )
    if type(outer).for_layers is not Outer.for_layers:
        raise UsageError(f"{name}: outer={chosen(outer)} goes layer by layer; take outer=nesterov, or {ONE}")
