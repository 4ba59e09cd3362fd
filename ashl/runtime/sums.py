"""Sum vectors in rank order, so that a sum has the same bits in any order of arrival.

In virtual time a vector may be a size only (`ashl.size_only`). Then a sum has the size of its first
term, and adds up the control signals that the terms carry.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from ashl.size_only import SizeOnly

FLOATS_16_BIT = (torch.float16, torch.bfloat16)
# values of `AllReduce.op`: a reduce-scatter and then an all-gather are an all-reduce
PHASES_OF_A_SUM = ("scatter", "gather")


def sum_in_rank_order(tensors: Sequence[Any], op: str = "sum") -> Any:
    """Return ((x_0 + x_1) + x_2) + …, or with `op="max"` the elementwise maximum.

    Args: tensors: [d] each, in rank order; they are not changed.
    Returns: a new tensor, or the input itself if it is the only one. 16-bit floats are added as
    float32, so that their sum is rounded once.
    """
    total = tensors[0]
    if len(tensors) == 1:
        return total
    if isinstance(total, SizeOnly):
        return SizeOnly(total.nbytes, sum(t.signal for t in tensors))
    if total.dtype in FLOATS_16_BIT:
        return sum_in_rank_order([t.float() for t in tensors], op).to(total.dtype)
    for i, tensor in enumerate(tensors[1:]):
        if op == "max":
            total = torch.maximum(total, tensor)
        elif i == 0:
            total = total + tensor  # a new tensor; the next terms are added to it in place
        else:
            total += tensor
    return total


def chunk(total: Any, members: int, index: int) -> Any:
    """Return the part of a vector [d] that belongs to the member with this index in the group.

    All parts have ⌈d / members⌉ elements. Parts that reach beyond d are padded with zeros.
    """
    if isinstance(total, SizeOnly):
        return SizeOnly(-(-total.nbytes // (4 * members)) * 4)
    length = -(-total.numel() // members)
    mine = total[index * length : (index + 1) * length]
    return functional.pad(mine, (0, length - mine.numel()))


def slice_vector(x: Any, start: int, stop: int) -> Any:
    """Return the elements from `start` to before `stop` of a vector, without a control signal."""
    return SizeOnly(4 * (stop - start)) if isinstance(x, SizeOnly) else x[start:stop]


def concatenate(parts: Sequence[Any]) -> Any:
    """Return the concatenation of vectors, in the given order."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], SizeOnly):
        return SizeOnly(sum(part.nbytes for part in parts), sum(part.signal for part in parts))
    return torch.cat(list(parts))
