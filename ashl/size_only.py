"""A tensor that is only a size: what travels where a run is timed without gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class SizeOnly(NamedTuple):
    """A tensor that is only a size: what travels when a run is timed without gradients."""

    nbytes: int
    signal: int = 0  # what rides on an all-reduce is there all the same

    def __add__(self, other: object) -> SizeOnly:  # type: ignore[override]
        signal = getattr(other, "signal", 0)
        return SizeOnly(self.nbytes, self.signal + signal) if signal else self

    def __sub__(self, other: object) -> SizeOnly:
        return self

    def norm(self) -> float:
        """No number: so that a loop may measure its updates where there are none."""
        return math.nan

    __radd__ = __add__  # type: ignore[assignment]
    __mul__ = __rmul__ = __sub__  # type: ignore[assignment]


Vector: TypeAlias = Tensor | SizeOnly  # a model, or what a worker computed


def joined(one: Vector, other: Vector) -> Vector:
    """Two vectors of one length in one body."""
    if isinstance(one, SizeOnly) or isinstance(other, SizeOnly):
        return SizeOnly(2 * one.nbytes)
    return torch.cat([one, other])


def halves(body: Any) -> tuple[Any, Any]:
    """... and apart again."""
    if isinstance(body, SizeOnly):
        return SizeOnly(body.nbytes // 2), SizeOnly(body.nbytes // 2)
    one, other = body.chunk(2)
    return one, other
