"""Collectives on real processes: by the backend, over a subset of the ranks, and by nodes.

`all_reduce` and `all_gather` use a process group of the backend. With `exact` a sum has the same
bits on every run: a reduce-scatter by direct exchange, in which each member sums its chunk in rank
order, and an all-gather; it moves 2(g − 1)/g of the vector in each direction, as a ring does. The
sum of two vectors is the same in either order, so two members may use the backend's own; up to
`HOPS_COUNT` elements they gather both vectors in one hop instead.

`all_reduce_subset` sums over some of the ranks without a process group of their own, by tagged
messages. To make a process group takes all ranks, and on demand it hangs where members have made a
different number of groups before. Member j receives chunk j of every vector, sums it in rank order
and sends the sum to the others. Bits and bytes are those of an exact sum. A subset has one sum at a
time, and its messages carry a number of its own. A failed member breaks only the connections to it,
so survivors send everything that they can; in place of a sum that lacks a term a survivor sends a
NaN that no arithmetic makes, and the receiver of it raises RuntimeError. A rejoined worker is
reached by a group of two with each peer, so nothing of an earlier incarnation enters a sum.

`all_reduce_by_node` sums in three collectives of the backend: reduce inside each node, all-reduce
across the nodes, broadcast inside. The first worker of each node is its leader. After a failure the
sum is flat.

Source of the sum by nodes: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training
in a Flash", 2018, with one leader in the place of one shard for each member.

`wait` replaces the blocking wait for the backend, so that a caller can stop waiting when a member
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime.rendezvous import world
from ashl.runtime.sums import HALVES, sum_in_rank_order

Group = tuple[int, ...]
Wait = Callable[[Any], None]  # until what the backend was asked for has been done
GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)  # of older ones
HOPS_COUNT = 2**15  # elements: up to here a hop takes longer than the bytes in it


def nccl_available() -> bool:
    """Whether this build of torch has NCCL."""
    return dist.is_nccl_available()


def all_reduce(
    tensor: Tensor,
    group: tuple[int, ...],
    op: str,
    pg: dist.ProcessGroup | None,
    exact: bool,
    wait: Wait | None = None,
) -> Tensor:
    """A new tensor with the sum or maximum over the group."""
    g = len(group)
    if g == 1:
        return tensor
    if op == "sum" and (exact or tensor.dtype in HALVES):  # gloo itself knows no bfloat16
        if g > 2:
            return _exact_sum(tensor, g, pg, wait)
        if tensor.numel() <= HOPS_COUNT or tensor.dtype in HALVES:
            return _sum_by_gather(tensor, pg, wait)
    total = tensor.clone()
    kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    if wait is None:
        dist.all_reduce(total, kind, group=pg)
    else:
        how = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp(kind)
        wait((pg or world()).allreduce([total], how))
    return total


def _gather(total: Tensor, mine: Tensor, pg: dist.ProcessGroup | None, wait: Wait | None) -> None:
    """All members' vectors of one length, one after the other."""
    if wait is None:
        getattr(dist, GATHER)(total, mine, group=pg)
    else:
        wait((pg or world())._allgather_base(total, mine))


def _sum_by_gather(tensor: Tensor, pg: dist.ProcessGroup | None, wait: Wait | None) -> Tensor:
    return sum_in_rank_order(gather_equal(tensor, 2, pg, wait).chunk(2))


def _exact_sum(tensor: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None) -> Tensor:
    return gather_equal(reduce_scatter(tensor, g, pg, wait), g, pg, wait)[: tensor.numel()]


def reduce_scatter(
    tensor: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None = None
) -> Tensor:
    """The first half of it: this member's chunk of the sum, see `ashl.runtime.sums.chunk`."""
    d = tensor.numel()
    chunk = -(-d // g)
    padded = tensor if d == chunk * g else torch.nn.functional.pad(tensor, (0, chunk * g - d))
    parts = torch.empty_like(padded)
    if wait is None:
        dist.all_to_all_single(as_bytes(parts), as_bytes(padded), group=pg)
    else:
        wait((pg or world()).alltoall_base(as_bytes(parts), as_bytes(padded), [], []))
    return sum_in_rank_order(parts.view(g, chunk).unbind())


def gather_equal(
    mine: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None = None
) -> Tensor:
    """The second half: all members' vectors of one length, in rank order."""
    total = mine.new_empty(g * mine.numel())
    _gather(as_bytes(total), as_bytes(mine), pg, wait)
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """16-bit floats as the bytes that the backend carries."""
    return tensor.view(torch.uint8) if tensor.dtype in HALVES else tensor


def all_gather(
    tensor: Tensor,
    group: tuple[int, ...],
    pg: dist.ProcessGroup | None,
    max_bytes: int,
    wait: Wait | None = None,
) -> tuple[list[Tensor], int]:
    """Every member's bytes, of whatever length each has, and that of the longest, as which all of
    them travel. Raises AshlError where one says that it has more than there can be.
    """
    g = len(group)
    if g == 1:
        return [tensor], tensor.numel()
    size = torch.tensor([tensor.numel()])
    sizes = torch.empty(g, dtype=torch.int64)
    _gather(sizes, size, pg, wait)
    longest = int(sizes.max())
    if not 0 <= int(sizes.min()) <= longest <= max_bytes:
        raise AshlError(
            f"bodies of {sizes.tolist()} bytes were announced, where at most {max_bytes} were"
            " expected"
        )
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.numel()))
    rows = padded.new_empty(g * longest)  # where it lies
    _gather(rows, padded, pg, wait)
    return [row[: int(n)] for row, n in zip(rows.view(g, longest), sizes, strict=True)], longest


# --- over a subset of the ranks, without a process group

BARRIER, CHUNKS, SUMS = range(3)  # planes of a team
MISSING = 255  # all bytes of a sum that lacks a term: a NaN, but not the one that arithmetic makes
FIRST, TEAMS = 16, 2**29  # tags below are the transport's; gloo's end at 2^31

Ways = Mapping[
    int, tuple[dist.ProcessGroup, int]
]  # to ranks that came later, or from one: a group, the place there


def all_reduce_subset_max(
    numbers: Tensor,
    group: tuple[int, ...],
    rank: int,
    team: int,
    ways: Ways,
    lost: Collection[int] = (),
) -> Tensor:
    """The maximum over the group of a few numbers, each by itself; returns once all members have
    come. `team` marks the group's messages. Raises RuntimeError where one is lost, as those are
    that are known to be.
    """
    g, me = len(group), group.index(rank)
    from_all = [numbers if i == me else torch.empty_like(numbers) for i in range(g)]
    if error := _exchange(
        [numbers] * g, from_all, group, rank, subset_tag(team, BARRIER), ways, lost
    ):
        raise error
    return torch.stack(from_all).amax(0)


def all_reduce_subset(
    tensor: Tensor,
    group: tuple[int, ...],
    rank: int,
    team: int,
    ways: Ways,
    lost: Collection[int] = (),
) -> Tensor:
    """A new vector [d] with the sum over the group, of which `rank` is a member. `team` marks the
    group's messages. Raises RuntimeError where a member is lost, as those are that are known to be.
    """
    g, me = len(group), group.index(rank)
    if g == 2:  # as many bytes in one hop
        both = [tensor if i == me else torch.empty_like(tensor) for i in range(2)]
        if error := _exchange(
            [tensor, tensor], both, group, rank, subset_tag(team, CHUNKS), ways, lost
        ):
            raise error
        return sum_in_rank_order(both)
    d = tensor.numel()
    padded = torch.nn.functional.pad(tensor, (0, -d % g))
    mine = list(padded.chunk(g))
    parts = [mine[me] if i == me else torch.empty_like(mine[me]) for i in range(g)]
    error = _exchange(mine, parts, group, rank, subset_tag(team, CHUNKS), ways, lost)
    total = torch.empty_like(padded)
    sums = list(total.chunk(g))
    if error is None:
        sums[me].copy_(sum_in_rank_order(parts))
    else:
        sums[me].view(torch.uint8).fill_(MISSING)
    error = (
        _exchange([sums[me]] * g, sums, group, rank, subset_tag(team, SUMS), ways, lost) or error
    )
    firsts = total[:: len(mine[0])]
    if firsts.isnan().any() and any(
        (first.view(1).view(torch.uint8) == MISSING).all() for first in firsts
    ):
        error = error or RuntimeError("a member of the team is not connected to another")
    if error is not None:
        raise error
    return total[:d]


def subset_tag(team: int, plane: int) -> int:
    return FIRST + 3 * (team % TEAMS) + plane


def _exchange(
    out: Sequence[Tensor],
    into: Sequence[Tensor],
    group: tuple[int, ...],
    rank: int,
    tag: int,
    ways: Ways,
    lost: Collection[int],
) -> RuntimeError | None:
    """To the i-th member `out[i]`, from it `into[i]`; returns why that was not done with one of
    them, if it was not.
    """
    peers = [
        (i, *(ways.get(peer) or (world(), peer)))
        for i, peer in enumerate(group)
        if peer not in (rank, *lost)
    ]
    work, errors = [], [RuntimeError(f"rank {peer} has failed") for peer in group if peer in lost]
    for sends, boxes in ((False, into), (True, out)):
        for i, pg, place in peers:
            try:
                work.append((pg.send if sends else pg.recv)([boxes[i]], place, tag))
            except RuntimeError as error:
                errors.append(error)
    for item in work:
        try:
            item.wait()
        except RuntimeError as error:
            errors.append(error)
    return errors[0] if errors else None


# --- by nodes


class Hierarchy(NamedTuple):
    """The workers of each node, in rank order."""

    nodes: tuple[Group, ...]

    @property
    def leaders(self) -> Group:
        return tuple(node[0] for node in self.nodes)

    @property
    def members(self) -> Group:
        return tuple(sorted(rank for node in self.nodes for rank in node))

    @property
    def teams(self) -> list[Group]:
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


def all_reduce_by_node(
    tensor: Tensor,
    op: str,
    rank: int,
    hierarchy: Hierarchy,
    groups: Mapping[Group, dist.ProcessGroup | None],
    wait: Wait | None,
) -> Tensor:
    """Return a new tensor with the sum or maximum over all workers, the same bits on all
    of them.
    """
    total, kind = tensor.clone(), dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    (own,) = (node for node in hierarchy.nodes if rank in node)

    def finish(work: dist.Work) -> None:
        (wait or dist.Work.wait)(work)

    def process_group(team: Group) -> dist.ProcessGroup:
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
