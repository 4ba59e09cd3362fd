"""Collectives on real processes: by the backend, over a subset of the ranks, and by node.

`all_reduce` and `all_gather` use a process group of the backend. An exact sum has the same bits on
every run. Its g members exchange chunks by an all-to-all, each member sums its own chunk in rank
order, and an all-gather distributes the sums. As in a ring, each member sends and receives
2(g − 1)/g of the vector. `all_reduce` computes every sum of 16-bit floats in this way: it adds them
as float32, so that the sum is rounded once.

A sum of two members is exact in any order, because a + b = b + a. Up to `GATHER_MAX_ELEMENTS`
elements each of them gathers both vectors, which takes one message. Longer vectors use the
all-reduce of the backend, except those of 16-bit floats, which are always gathered.

`Subset` sums over some of the ranks by tagged point-to-point messages, without a process group,
because creating one is a collective of all ranks. Member j receives chunk j of every vector, sums
it in rank order and sends the sum to the others. The sum has the bits of an exact sum, and moves as
many bytes. A subset has one sum at a time, and its messages carry tags of its own. After a failure
the next epoch has connections of its own, so no message of an earlier epoch enters a sum.

`all_reduce_by_node` uses three collectives of the backend: a reduce inside each node, an all-reduce
across the nodes, a broadcast inside each node. The first worker of each node is its leader. The
backend chooses the order of the terms, so exact sums never use it. The backend also adds 16-bit
floats without float32, and rounds after every addition. After a failure the sum uses a flat
algorithm, see `ashl.runtime.communicator`.

Source of the sum by node: Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in
a Flash", 2018. Differs: only the leader of a node sums across the nodes; in the paper every member
sums one chunk.

Argument `wait`: the function that waits for an operation of the backend; a caller can pass one that
stops waiting when a member fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime.rendezvous import world
from ashl.runtime.sums import FLOATS_16_BIT, sum_in_rank_order

Group = tuple[int, ...]
# blocks until an operation of the backend has ended; raises RuntimeError if a member fails
Wait = Callable[[dist.Work], object]
# calls a function that blocks; raises RuntimeError if another epoch begins before it returns
Run = Callable[[Callable[[], None]], None]
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
# elements; up to this length the latency of a message exceeds the transfer time of its bytes
GATHER_MAX_ELEMENTS = 2**15


def nccl_available() -> bool:
    """Return True if this build of torch has NCCL."""
    return dist.is_nccl_available()


def all_reduce(
    tensor: Tensor,
    group: Group,
    op: str,
    pg: dist.ProcessGroup | None,
    exact: bool,
    wait: Wait = dist.Work.wait,
) -> Tensor:
    """Return the sum or the maximum over the group; the input itself if the group has one member.

    Args: op, "sum" or "max"; exact, True for a sum with the same bits on every run.
    """
    g = len(group)
    if g == 1:
        return tensor
    # 16-bit terms are added as float32
    if op == "sum" and (exact or tensor.dtype in FLOATS_16_BIT):
        if g > 2:
            chunk = reduce_scatter(tensor, g, pg, wait)
            return gather_equal(chunk, g, pg, wait)[: tensor.numel()]
        if tensor.numel() <= GATHER_MAX_ELEMENTS or tensor.dtype in FLOATS_16_BIT:
            return sum_in_rank_order(gather_equal(tensor, 2, pg, wait).chunk(2))
    total = tensor.clone()
    wait((pg or world()).allreduce([total], options_of(op)))
    return total


def options_of(op: str) -> dist.AllreduceOptions:
    """Return the options of an all-reduce of the backend, for "sum" or "max"."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(SUM if op == "sum" else MAX)
    return options


def reduce_scatter(
    tensor: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait = dist.Work.wait
) -> Tensor:
    """Return this member's chunk of the sum over `g` members, see `ashl.runtime.sums.chunk`."""
    d = tensor.numel()
    chunk = -(-d // g)
    padded = tensor if d == chunk * g else torch.nn.functional.pad(tensor, (0, chunk * g - d))
    parts = torch.empty_like(padded)
    wait((pg or world()).alltoall_base(as_bytes(parts), as_bytes(padded), [], []))
    return sum_in_rank_order(parts.view(g, chunk).unbind())


def gather_equal(
    mine: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait = dist.Work.wait
) -> Tensor:
    """Return the vectors of all `g` members, concatenated in rank order; all have one length."""
    total = mine.new_empty(g * mine.numel())
    wait((pg or world())._allgather_base(as_bytes(total), as_bytes(mine)))
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of 16-bit floats as bytes, so that every backend can transport them.

    A tensor of another type is returned unchanged.
    """
    return tensor.view(torch.uint8) if tensor.dtype in FLOATS_16_BIT else tensor


def all_gather(
    tensor: Tensor,
    group: Group,
    pg: dist.ProcessGroup | None,
    max_bytes: int,
    wait: Wait = dist.Work.wait,
) -> tuple[list[Tensor], int]:
    """Return (payload of every member in rank order, length of the longest payload in bytes).

    Payloads may differ in length. In transit all are padded to the longest.
    Args: tensor uint8, this member's payload.
    Raises: AshlError if a member announces more than `max_bytes`.
    """
    g = len(group)
    if g == 1:
        return [tensor], tensor.numel()
    sizes = gather_equal(torch.tensor([tensor.numel()]), g, pg, wait)
    longest = int(sizes.max())
    if not 0 <= int(sizes.min()) <= longest <= max_bytes:
        raise AshlError(
            f"members announced payloads of {sizes.tolist()} bytes, but at most {max_bytes} are"
            " expected"
        )
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.numel()))
    rows = gather_equal(padded, g, pg, wait).view(g, longest)
    return [row[: int(n)] for row, n in zip(rows, sizes, strict=True)], longest


# --- over a subset of the ranks, without a process group

BARRIER, CHUNKS, SUMS = range(3)  # purposes of messages; each has its own tag in a group
# The transport uses the tags below FIRST_TAG, and gloo's tags end at 2^31.
FIRST_TAG, MAX_GROUPS = 16, 2**29

# By peer, from the second epoch on: the process group of the epoch, and the peer's rank in it.
Routes = Mapping[int, tuple[dist.ProcessGroup, int]]


class Subset(NamedTuple):
    """A group of ranks that sums by point-to-point messages, without a process group."""

    group: Group
    rank: int  # this rank, a member
    number: int  # of the group, below MAX_GROUPS; the tags of its messages follow from it
    routes: Routes
    # calls the function that waits for messages, None = without a limit: it ends at another epoch,
    # while a receive that times out would close the connections of its process group
    run: Run | None = None

    def maximum(self, numbers: Tensor) -> Tensor:
        """Return the element-wise maximum of short vectors over the group; it is also a barrier.

        Raises: RuntimeError if a member has failed.
        """
        return torch.stack(self._gather(numbers, BARRIER)).amax(0)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return a new vector [d] with the sum over the group. Raises: RuntimeError if a member has
        failed.
        """
        g, me = len(self.group), self.group.index(self.rank)
        if g == 2:  # one message of d elements instead of two messages of d/2
            return sum_in_rank_order(self._gather(tensor, CHUNKS))
        d = tensor.numel()
        padded = torch.nn.functional.pad(tensor, (0, -d % g))
        mine = list(padded.chunk(g))
        parts = [mine[me] if i == me else torch.empty_like(mine[me]) for i in range(g)]
        self._exchange(mine, parts, CHUNKS)
        total = torch.empty_like(padded)
        sums = list(total.chunk(g))
        sums[me].copy_(sum_in_rank_order(parts))
        self._exchange([sums[me]] * g, sums, SUMS)
        return total[:d]

    def _gather(self, tensor: Tensor, purpose: int) -> list[Tensor]:
        """Return the tensors of all members, in rank order."""
        found = [tensor if peer == self.rank else torch.empty_like(tensor) for peer in self.group]
        self._exchange([tensor] * len(found), found, purpose)
        return found

    def _exchange(self, out: Sequence[Tensor], into: Sequence[Tensor], purpose: int) -> None:
        """Send `out[i]` to the i-th member and receive `into[i]` from it, except for this rank."""
        tag = FIRST_TAG + 3 * self.number + purpose
        peers = [
            (i, *(self.routes.get(peer) or (world(), peer)))
            for i, peer in enumerate(self.group)
            if peer != self.rank
        ]
        work = [pg.recv([into[i]], pg_rank, tag) for i, pg, pg_rank in peers]
        work += [pg.send([out[i]], pg_rank, tag) for i, pg, pg_rank in peers]

        def finish() -> None:
            for item in work:
                item.wait()

        if self.run is None:
            finish()
        else:
            self.run(finish)


# --- by node


class Hierarchy(NamedTuple):
    """The workers of each node, in rank order; the first of each is the leader."""

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

    def traffic(self, rank: int, nbytes: int) -> tuple[int, int]:
        """Return (bytes sent, bytes received) by this rank in one sum of `nbytes`.

        A worker that is no leader sends and receives the whole vector once.
        """
        (own,) = (node for node in self.nodes if rank in node)
        if rank != own[0]:
            return nbytes, nbytes
        across = 2 * (len(self.nodes) - 1) * nbytes // len(self.nodes)
        inside = (len(own) - 1) * nbytes
        return across + inside, across + inside


def hierarchy_of(nodes: Sequence[int]) -> Hierarchy:
    """Return the hierarchy of the workers; `nodes[rank]` is the node of a worker."""
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
    wait: Wait,
) -> Tensor:
    """Return a new tensor with the sum or maximum over all workers, with equal bits on all of them.

    The bits of a sum may differ between runs, because the backend orders the terms.
    Args: op, "sum" or "max"; groups, the process groups of `Hierarchy.groups`; a node or the
    leaders without one there are all workers.
    """
    total, across = tensor.clone(), options_of(op)
    (own,) = (node for node in hierarchy.nodes if rank in node)

    def process_group(ranks: Group) -> dist.ProcessGroup:
        return groups.get(ranks) or world()

    if len(own) > 1:
        reduce = dist.ReduceOptions()
        reduce.reduceOp = across.reduceOp
        wait(process_group(own).reduce([total], reduce))
    if rank == own[0] and len(hierarchy.nodes) > 1:
        wait(process_group(hierarchy.leaders).allreduce([total], across))
    if len(own) > 1:
        wait(process_group(own).broadcast([total], dist.BroadcastOptions()))
    return total
