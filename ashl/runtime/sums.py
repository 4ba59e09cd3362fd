"""Sums that come out the same, bit for bit, wherever and in whatever order their terms arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ashl.size_only import SizeOnly

HALVES = (torch.float16, torch.bfloat16)


def sum_in_rank_order(tensors: Sequence[Any], op: str = "sum") -> Any:
    """((x_0 + x_1) + x_2) + ... or the running maximum; the terms themselves are never changed. 16-bit floats are added
    up as float32, so that the sum is rounded once."""
    total = tensors[0]
    if len(tensors) == 1:
        return total
    if isinstance(total, SizeOnly):
        return SizeOnly(total.nbytes, sum(t.word for t in tensors))
    if total.dtype in HALVES:
        return sum_in_rank_order([t.float() for t in tensors], op).to(total.dtype)
    for i, tensor in enumerate(tensors[1:]):
        if op == "max":
            total = torch.maximum(total, tensor)
        elif i == 0:
            total = total + tensor  # a new tensor, which the following terms may be added into
        else:
            total += tensor
    return total
