"""Collectives of real processes: the backend's own, and one that sums in rank order, bit for bit.

With `wait` somebody else waits for the backend, which is asked in the way that a group of any making answers.

`exact` is a reduce-scatter by direct exchange (each member sums its chunk in rank order) and an all-gather: it moves
2(g − 1)/g of the vector each way, as a ring does. The sum of two is the same in either order, so that two members may
use the backend's own; while hops take longer than bytes, they gather both vectors in one hop instead.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime.rendezvous import world
from ashl.runtime.sums import HALVES, sum_in_rank_order

Wait = Callable[[Any], None]  # until what the backend was asked for has been done
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of older ones
HOPS_COUNT = 2**15  # elements: up to here a hop takes longer than the bytes in it


def nccl_is_there() -> bool:
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
            return _gathered_sum(tensor, pg, wait)
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


def _gathered_sum(tensor: Tensor, pg: dist.ProcessGroup | None, wait: Wait | None) -> Tensor:
    return sum_in_rank_order(gathered(tensor, 2, pg, wait).chunk(2))


def _exact_sum(tensor: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None) -> Tensor:
    return gathered(scattered(tensor, g, pg, wait), g, pg, wait)[: tensor.numel()]


def scattered(tensor: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None = None) -> Tensor:
    """The first half of it: this member's chunk of the sum, see `ashl.runtime.sums.chunk`."""
    d = tensor.numel()
    chunk = -(-d // g)
    padded = tensor if d == chunk * g else torch.nn.functional.pad(tensor, (0, chunk * g - d))
    parts = torch.empty_like(padded)
    if wait is None:
        dist.all_to_all_single(raw(parts), raw(padded), group=pg)
    else:
        wait((pg or world()).alltoall_base(raw(parts), raw(padded), [], []))
    return sum_in_rank_order(parts.view(g, chunk).unbind())


def gathered(mine: Tensor, g: int, pg: dist.ProcessGroup | None, wait: Wait | None = None) -> Tensor:
    """The second half: all members' vectors of one length, in rank order."""
    total = mine.new_empty(g * mine.numel())
    _gather(raw(total), raw(mine), pg, wait)
    return total


def raw(tensor: Tensor) -> Tensor:
    """16-bit floats as the bytes that the backend carries."""
    return tensor.view(torch.uint8) if tensor.dtype in HALVES else tensor


def all_gather(
    tensor: Tensor, group: tuple[int, ...], pg: dist.ProcessGroup | None, max_bytes: int, wait: Wait | None = None
) -> tuple[list[Tensor], int]:
    """Every member's bytes, of whatever length each has, and that of the longest, as which all of them travel. Raises
    AshlError where one says that it has more than there can be."""
    g = len(group)
    if g == 1:
        return [tensor], tensor.numel()
    size = torch.tensor([tensor.numel()])
    sizes = torch.empty(g, dtype=torch.int64)
    _gather(sizes, size, pg, wait)
    longest = int(sizes.max())
    if not 0 <= int(sizes.min()) <= longest <= max_bytes:
        raise AshlError(f"bodies of {sizes.tolist()} bytes were announced, where at most {max_bytes} were expected")
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.numel()))
    rows = padded.new_empty(g * longest)  # where it lies
    _gather(rows, padded, pg, wait)
    return [row[: int(n)] for row, n in zip(rows.view(g, longest), sizes, strict=True)], longest
