"""What comes of a collective in virtual time."""

from typing import Any

from ashl.cluster.all_reduce_costs import AllReduceCost
from ashl.cluster.network import Exchange, Ports
from ashl.runtime.collective_queue import Collective
from ashl.runtime.effects import AllReduce
from ashl.runtime.sums import HALVES_OF_A_SUM, sum_in_rank_order, together
from ashl.size_only import SizeOnly


def price_collective(
    effect: Collective, tensors: list[Any], network: Exchange | Ports, now_ns: int
) -> tuple[Any, int, int, AllReduceCost | None]:
    """(result, cost in ns, bytes that each member of the ring sends and receives, or of a sum by another algorithm
    those of each)."""
    g, group, size_only = len(tensors), effect.group, isinstance(tensors[0], SizeOnly)
    if isinstance(effect, AllReduce):
        nbytes = tensors[0].nbytes - (0 if size_only else effect.piggybacked * tensors[0].element_size())
        if effect.op in HALVES_OF_A_SUM:
            gathers = effect.op == "gather"
            total = nbytes * g if gathers else -(-nbytes // (4 * g)) * 4 * g
            cost, moved = network.all_gather_ns(group, total, now_ns), total * (g - 1) // g
            return together(tensors) if gathers else sum_in_rank_order(tensors), cost, moved, None
        cost, own = network.all_reduce_ns(group, nbytes, now_ns), None
        if network.summing is not None:
            own = network.summing.known(group, nbytes)
        return sum_in_rank_order(tensors, effect.op), cost, 2 * (g - 1) * nbytes // g, own
    longest = max(t.nbytes for t in tensors) - (0 if size_only else effect.piggybacked)  # as which all of them travel
    total = g * longest
    return tensors, network.all_gather_ns(group, total, now_ns), total * (g - 1) // g, None
