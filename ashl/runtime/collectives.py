"""Collectives on real processes: by the backend, over a subset of the ranks, and by nodes.

`all_reduce` and `all_gather` use a process group of the backend. With `exact` a sum has the same
bits on every run: a reduce-scatter by direct exchange, in which each member sums its chunk in rank
order, and an all-gather; it moves 2(g − 1)/g of the vector in each direction, as a ring does. The
sum of two vectors is the same in either order, so two members may use the backend's own; up to
`HOPS_COUNT` elements they gather both vectors in one hop instead.

`all_reduce_subset` sums over some of the ranks without a process group of their own, by tagged
messages. Making a process group takes all ranks, and on demand it hangs if members have made a
different number of groups before. Member j receives chunk j of every vector, sums it in rank order
and sends the sum to the others. Bits and bytes are those of an exact sum. A subset has one sum at a
time, and a number of its own marks its messages. A failed member breaks only the connections to it,
so survivors send everything that they can. In place of a sum that lacks a term a survivor sends a
NaN that no arithmetic makes, and the receiver of it raises RuntimeError. A rejoined worker is
reached by a group of two with each peer, so no message of an earlier incarnation enters a sum.

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
Wait = Callable[[Any], None]  # blocks until an operation of the backend has ended
# name in older versions of torch
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
HOPS_COUNT = 2**15  # elements: up to this length a hop takes longer than its bytes


def nccl_available() -> bool:
    """Return True if this build of torch has NCCL."""
    return dist.is_nccl_available()


def all_reduce(
    tensor: Tensor,
    group: tuple[int, ...],
    op: str,
    pg: dist.ProcessGroup | None,
    exact: bool,
    wait: Wait | None = None,
) -> Tensor:
    """Return a tensor with the sum or maximum over the group."""
    g = len(group)
    if g == 1:
        return tensor
    if op == "sum" and (exact or tensor.dtype in HALVES):  # gloo cannot add bfloat16
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
    """Gather all members' vectors of one length into `total`, in rank order."""
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
    """Return this member's chunk of the sum, see `ashl.runtime.sums.chunk`."""
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
    """Return all members' vectors of one length, in rank order."""
    total = mine.new_empty(g * mine.numel())
    _gather(as_bytes(total), as_bytes(mine), pg, wait)
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """Return 16-bit floats as bytes, because the backend cannot transport their type."""
    return tensor.view(torch.uint8) if tensor.dtype in HALVES else tensor


def all_gather(
    tensor: Tensor,
    group: tuple[int, ...],
    pg: dist.ProcessGroup | None,
    max_bytes: int,
    wait: Wait | None = None,
) -> tuple[list[Tensor], int]:
    """Return every member's bytes, of any length each, and the length of the longest, to which all
    are padded in transit. Raises AshlError if a member announces more than `max_bytes`.
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
            f"members announced payloads of {sizes.tolist()} bytes, but at most {max_bytes} are"
            " expected"
        )
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.numel()))
    rows = padded.new_empty(g * longest)  # on the same device as the bytes
    _gather(rows, padded, pg, wait)
    return [row[: int(n)] for row, n in zip(rows.view(g, longest), sizes, strict=True)], longest


# --- over a subset of the ranks, without a process group

BARRIER, CHUNKS, SUMS = range(3)  # message tags of one group, by purpose
MISSING = 255  # value of every byte of a sum that lacks a term: a NaN that no arithmetic makes
# first tag, because lower ones belong to the transport; gloo's tags end at 2^31
FIRST, MAX_GROUPS = 16, 2**29

# by rank that joined later, or by peer of such a rank: a process group, and the rank's place in it
Routes = Mapping[int, tuple[dist.ProcessGroup, int]]


def all_reduce_subset_max(
    numbers: Tensor,
    group: tuple[int, ...],
    rank: int,
    group_tag: int,
    routes: Routes,
    failed: Collection[int] = (),
) -> Tensor:
    """Return the maximum over the group of each of a few numbers, once all members have posted
    theirs.

    `group_tag` marks the group's messages. Raises RuntimeError if a member has failed, for example
    one of `failed`.
    """
    g, me = len(group), group.index(rank)
    from_all = [numbers if i == me else torch.empty_like(numbers) for i in range(g)]
    if error := _exchange(
        [numbers] * g, from_all, group, rank, subset_tag(group_tag, BARRIER), routes, failed
    ):
        raise error
    return torch.stack(from_all).amax(0)


def all_reduce_subset(
    tensor: Tensor,
    group: tuple[int, ...],
    rank: int,
    group_tag: int,
    routes: Routes,
    failed: Collection[int] = (),
) -> Tensor:
    """Return a new vector [d] with the sum over the group, of which `rank` is a member.

    `group_tag` marks the group's messages. Raises RuntimeError if a member has failed, for example
    one of `failed`.
    """
    g, me = len(group), group.index(rank)
    if g == 2:  # one hop moves as many bytes as two
        both = [tensor if i == me else torch.empty_like(tensor) for i in range(2)]
        if error := _exchange(
            [tensor, tensor], both, group, rank, subset_tag(group_tag, CHUNKS), routes, failed
        ):
            raise error
        return sum_in_rank_order(both)
    d = tensor.numel()
    padded = torch.nn.functional.pad(tensor, (0, -d % g))
    mine = list(padded.chunk(g))
    parts = [mine[me] if i == me else torch.empty_like(mine[me]) for i in range(g)]
    error = _exchange(mine, parts, group, rank, subset_tag(group_tag, CHUNKS), routes, failed)
    total = torch.empty_like(padded)
    sums = list(total.chunk(g))
    if error is None:
        sums[me].copy_(sum_in_rank_order(parts))
    else:
        sums[me].view(torch.uint8).fill_(MISSING)
    error = (
        _exchange([sums[me]] * g, sums, group, rank, subset_tag(group_tag, SUMS), routes, failed)
        or error
    )
    firsts = total[:: len(mine[0])]
    if firsts.isnan().any() and any(
        (first.view(1).view(torch.uint8) == MISSING).all() for first in firsts
    ):
        error = error or RuntimeError("a member of the group is not connected to another")
    if error is not None:
        raise error
    return total[:d]


def subset_tag(group_tag: int, plane: int) -> int:
    return FIRST + 3 * (group_tag % MAX_GROUPS) + plane


def _exchange(
    out: Sequence[Tensor],
    into: Sequence[Tensor],
    group: tuple[int, ...],
    rank: int,
    tag: int,
    routes: Routes,
    failed: Collection[int],
) -> RuntimeError | None:
    """Send `out[i]` to the i-th member and receive `into[i]` from it; return the first error, or
    None.
    """
    peers = [
        (i, *(routes.get(peer) or (world(), peer)))
        for i, peer in enumerate(group)
        if peer not in (rank, *failed)
    ]
    work, errors = [], [RuntimeError(f"rank {peer} has failed") for peer in group if peer in failed]
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
    def groups(self) -> list[Group]:
        """Return the groups of ranks that need a process group of their own."""
        return [
            group for group in (*self.nodes, self.leaders) if 1 < len(group) < len(self.members)
        ]

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

    def process_group(ranks: Group) -> dist.ProcessGroup:
        return groups.get(ranks) or world()

    if len(own) > 1:
        reduce = dist.ReduceOptions()
        reduce.reduceOp = dist.ReduceOp(kind)
        reduce.rootRank = 0
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
