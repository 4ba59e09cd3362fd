"""Which simulator is for which cluster: where nobody holds anybody up but at ports, `ashl.runtime.sim`; else one on
shared cores, `ashl.runtime.shared_cores`, be it on a machine for each rank."""

from __future__ import annotations

from ashl.cluster.cores import Pair
from ashl.cluster.network import Exchange, Ports
from ashl.cluster.spec import Beside, Cluster, Fitted, SharedCores, Sums
from ashl.cluster.speed import NS, Speed
from ashl.cluster.summing import beside_of
from ashl.runtime.channel import Posted
from ashl.runtime.effects import Compute
from ashl.runtime.node import Observer
from ashl.runtime.shared_cores import SharedSim
from ashl.runtime.sim import Sim


class BesideSim(SharedSim):
    """Ranks on a machine each, where sums and computing slow each other down while both go on."""

    def __init__(
        self,
        num_ranks: int,
        speed: Speed,
        network: Ports,
        observer: Observer,
        beside: Beside,
        both_ways: tuple[float, float] | None,
    ) -> None:
        super().__init__(num_ranks, speed, network, observer, machine_each(num_ranks), both_ways)
        for unit, mover in zip(self._units, self._movers, strict=True):
            unit.cores = mover.cores = Pair({unit: 1 - beside.lost, mover: 1 / beside.slowed})
        self._parts = beside.parts

    def _whole_ns(self, rank: int, effect: Compute) -> int:
        cost, count = super()._whole_ns(rank, effect), len(effect.parts)
        if self._parts is None or count < 2:
            return cost
        return cost + round((self._parts.step_s + count * self._parts.part_s) * NS)

    def _start_ns(self, posted: Posted) -> int:
        """Of another task than the main one: threads hand it over."""
        if self._parts is None or all(member.main for member, _ in posted.arrived.values()):
            return 0
        return round(self._parts.sum_s * NS)


def machine_each(num_ranks: int) -> SharedCores:
    """Each rank on a machine of its own, where messages cost nothing, and a sum all of its time."""
    return SharedCores(
        machine=tuple(range(num_ranks)),
        cores=(2.0,) * num_ranks,
        resumed_s=(),
        quantum_s=1.0,
        ends=(Sums(latency_s=0.0, s_per_byte=0.0),),
        before=1.0,
        busy=(),
    )


def both_ways_of(cluster: Cluster) -> tuple[float, float] | None:
    """As `SharedSim` takes it; None = nothing is slower, or workers come and go, where it is only counted."""
    if not isinstance(cluster, Fitted) or not cluster.server_crossed_s_per_byte or cluster.churn:
        return None
    crossed, ways = cluster.server_crossed_s_per_byte, (cluster.server_in, cluster.server_out)
    into, out = (min(1.0, crossed / way.s_per_byte) if way.s_per_byte else 0.0 for way in ways)  # taking turns at most
    return (into, out) if into or out else None


def simulator(
    num_ranks: int,
    speed: Speed,
    costs: Exchange | Ports,
    observer: Observer,
    *,
    overlaps: bool = False,
    serves: bool = True,
) -> Sim:
    """The one for a cluster, and a run in which sums may go on beside computing and there may be a server."""
    cluster = speed.cluster
    shared = cluster.shared if isinstance(cluster, Fitted) else None
    beside, both_ways = beside_of(cluster) if overlaps else None, both_ways_of(cluster) if serves else None
    if not isinstance(costs, Ports) or not (shared or beside or both_ways):
        return Sim(num_ranks, speed, costs, observer)
    if shared is None and beside is not None:
        return BesideSim(num_ranks, speed, costs, observer, beside, both_ways)
    return SharedSim(num_ranks, speed, costs, observer, shared or machine_each(num_ranks), both_ways)
