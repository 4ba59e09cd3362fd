"""Sum in rank order, so that a sum has the same bits in any order of arrival."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ashl.size_only import SizeOnly

HALVES = (torch.float16, torch.bfloat16)
HALVES_OF_A_SUM = ("scatter", "gather")


def sum_in_rank_order(tensors: Sequence[Any], op: str = "sum") -> Any:
    """Return ((x_0 + x_1) + x_2) + … or the running maximum; the terms are never changed. 16-bit
    floats are added as float32, so that the sum is rounded once.
    """
    total = tensors[0]
    if len(tensors) == 1:
        return total
    if isinstance(total, SizeOnly):
        return SizeOnly(total.nbytes, sum(t.signal for t in tensors))
    if total.dtype in HALVES:
        return sum_in_rank_order([t.float() for t in tensors], op).to(total.dtype)
    for i, tensor in enumerate(tensors[1:]):
        if op == "max":
            total = torch.maximum(total, tensor)
        elif i == 0:
            total = total + tensor  # a new tensor, to which the next terms are added in place
        else:
            total += tensor
    return total


def chunk(total: Any, members: int, place: int) -> Any:
    """Return the part of a vector that belongs to member `place`; all parts have equal length,
    padded with zeros.
    """
    if isinstance(total, SizeOnly):
        return SizeOnly(-(-total.nbytes // (4 * members)) * 4)
    length = -(-total.numel() // members)
    mine = total[place * length : (place + 1) * length]
    return functional.pad(mine, (0, length - mine.numel()))


def slice_vector(x: Any, start: int, stop: int) -> Any:
    """Return the elements [start, stop) of a vector."""
    return SizeOnly(4 * (stop - start)) if isinstance(x, SizeOnly) else x[start:stop]


def concatenate(parts: Sequence[Any]) -> Any:
    """Return one vector of several."""
    if isinstance(parts[0], SizeOnly):
        return SizeOnly(sum(part.nbytes for part in parts), sum(part.signal for part in parts))
    return torch.cat(list(parts))
