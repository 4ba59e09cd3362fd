"""Collectives of real processes: the backend's own, and one that sums in rank order, bit for bit.

`exact` is a reduce-scatter by direct exchange (each member sums its chunk in rank order) and an all-gather: it moves
2(g − 1)/g of the vector each way, as a ring does. The sum of two is the same in either order, so that two members may
use the backend's own; while hops take longer than bytes, they gather both vectors in one hop instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.errors import AshlError
from ashl.runtime.sums import HALVES, sum_in_rank_order

HOPS_COUNT = 2**15  # elements: up to here a hop takes longer than the bytes in it


def nccl_is_there() -> bool:
    """Whether this build of torch has NCCL."""
    return dist.is_nccl_available()


def all_reduce(tensor: Tensor, group: tuple[int, ...], op: str, pg: dist.ProcessGroup | None, exact: bool) -> Tensor:
    """A new tensor with the sum or maximum over the group."""
    g = len(group)
    if g == 1:
        return tensor
    if op == "sum" and (exact or tensor.dtype in HALVES):  # gloo itself knows no bfloat16
        if g > 2:
            return _exact_sum(tensor, g, pg)
        if tensor.numel() <= HOPS_COUNT or tensor.dtype in HALVES:
            return _gathered_sum(tensor, pg)
    total = tensor.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=pg)
    return total


def _gathered_sum(tensor: Tensor, pg: dist.ProcessGroup | None) -> Tensor:
    both = tensor.new_empty(2 * tensor.numel())
    dist.all_gather_into_tensor(raw(both), raw(tensor), group=pg)
    return sum_in_rank_order(both.chunk(2))


def _exact_sum(tensor: Tensor, g: int, pg: dist.ProcessGroup | None) -> Tensor:
    return gathered(scattered(tensor, g, pg), g, pg)[: tensor.numel()]


def scattered(tensor: Tensor, g: int, pg: dist.ProcessGroup | None) -> Tensor:
    """The first half of it: this member's chunk of the sum, see `ashl.runtime.sums.chunk`."""
    d = tensor.numel()
    chunk = -(-d // g)
    padded = tensor if d == chunk * g else torch.nn.functional.pad(tensor, (0, chunk * g - d))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(raw(parts), raw(padded), group=pg)
    return sum_in_rank_order(parts.view(g, chunk).unbind())


def gathered(mine: Tensor, g: int, pg: dist.ProcessGroup | None) -> Tensor:
    """The second half: all members' vectors of one length, in rank order."""
    total = mine.new_empty(g * mine.numel())
    dist.all_gather_into_tensor(raw(total), raw(mine), group=pg)
    return total


def raw(tensor: Tensor) -> Tensor:
    """16-bit floats as the bytes that the backend carries."""
    return tensor.view(torch.uint8) if tensor.dtype in HALVES else tensor


def all_gather(
    tensor: Tensor, group: tuple[int, ...], pg: dist.ProcessGroup | None, max_bytes: int
) -> tuple[list[Tensor], int]:
    """Every member's bytes, of whatever length each has, and that of the longest, as which all of them travel. Raises
    AshlError where one says that it has more than there can be."""
    g = len(group)
    size = torch.tensor([tensor.numel()])
    sizes = torch.empty(g, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, size, group=pg)
    longest = int(sizes.max())
    if not 0 <= int(sizes.min()) <= longest <= max_bytes:
        raise AshlError(f"bodies of {sizes.tolist()} bytes were announced, where at most {max_bytes} were expected")
    padded = torch.nn.functional.pad(tensor, (0, longest - tensor.numel()))
    rows = torch.empty(g * longest, dtype=tensor.dtype)
    dist.all_gather_into_tensor(rows, padded, group=pg)
    return [row[: int(n)] for row, n in zip(rows.view(g, longest), sizes, strict=True)], longest
