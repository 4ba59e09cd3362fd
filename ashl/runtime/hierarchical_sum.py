"""Sum over nodes in three collectives of the backend: reduce inside each node, all-reduce across, broadcast inside.

The first worker of each node is its leader. A group that is not all workers, as after a failure, is summed flat.

Source: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018, with one leader in
the place of one shard for each member.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ashl.runtime.collectives import Wait
from ashl.runtime.rendezvous import world

Team = tuple[int, ...]


class Hierarchy(NamedTuple):
    """The workers of each node, in rank order."""

    nodes: tuple[Team, ...]

    @property
    def leaders(self) -> Team:
        return tuple(node[0] for node in self.nodes)

    @property
    def members(self) -> Team:
        return tuple(sorted(rank for node in self.nodes for rank in node))

    @property
    def teams(self) -> list[Team]:
        """The groups of ranks that need a process group of their own."""
        return [team for team in (*self.nodes, self.leaders) if 1 < len(team) < len(self.members)]

    def moved(self, rank: int, nbytes: int) -> tuple[int, int]:
        """Return the bytes that this rank sends and receives in one sum."""
        (own,) = (node for node in self.nodes if rank in node)
        if rank != own[0]:
            return nbytes, nbytes
        across = 2 * (len(self.nodes) - 1) * nbytes // len(self.nodes)
        inside = (len(own) - 1) * nbytes
        return across + inside, across + inside


def hierarchy_of(nodes: Sequence[int]) -> Hierarchy:
    """Return the hierarchy of workers whose nodes are these, in rank order."""
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return Hierarchy(tuple(tuple(ranks) for ranks in by_node.values()))


def all_reduce(
    tensor: Tensor,
    op: str,
    rank: int,
    hierarchy: Hierarchy,
    groups: Mapping[Team, dist.ProcessGroup | None],
    wait: Wait | None,
) -> Tensor:
    """Return a new tensor with the sum or maximum over all workers, the same bits on all of them."""
    total, kind = tensor.clone(), dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    (own,) = (node for node in hierarchy.nodes if rank in node)

    def finish(work: dist.Work) -> None:
        (wait or dist.Work.wait)(work)

    def process_group(team: Team) -> dist.ProcessGroup:
        return groups.get(team) or world()

    if len(own) > 1:
        reduce = dist.ReduceOptions()
        reduce.reduceOp, reduce.rootRank = dist.ReduceOp(kind), 0
        finish(process_group(own).reduce([total], reduce))
    if rank == own[0] and len(hierarchy.nodes) > 1:
        across = dist.AllreduceOptions()
        across.reduceOp = dist.ReduceOp(kind)
        finish(process_group(hierarchy.leaders).allreduce([total], across))
    if len(own) > 1:
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank = 0
        finish(process_group(own).broadcast([total], broadcast))
    return total
