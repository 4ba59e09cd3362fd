"""Provide a tensor that is only a size: the payload of a run that is timed without gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class SizeOnly(NamedTuple):
    """A tensor that is only a size, for runs that are timed without gradients."""

    nbytes: int
    signal: int = 0  # the control signal that is piggybacked on an all-reduce

    def __add__(self, other: object) -> SizeOnly:  # type: ignore[override]
        signal = getattr(other, "signal", 0)
        return SizeOnly(self.nbytes, self.signal + signal) if signal else self

    def __sub__(self, other: object) -> SizeOnly:
        return self

    def norm(self) -> float:
        """Return NaN, so that loops may measure updates that do not exist."""
        return math.nan

    __radd__ = __add__  # type: ignore[assignment]
    __mul__ = __rmul__ = __sub__  # type: ignore[assignment]


Vector: TypeAlias = Tensor | SizeOnly  # a model, a gradient or an update


def join_vectors(one: Vector, other: Vector) -> Vector:
    """Return two vectors of one length as one payload."""
    if isinstance(one, SizeOnly) or isinstance(other, SizeOnly):
        return SizeOnly(2 * one.nbytes)
    return torch.cat([one, other])


def split_vectors(body: Any) -> tuple[Any, Any]:
    """Return the two vectors of a payload of `join_vectors`."""
    if isinstance(body, SizeOnly):
        return SizeOnly(body.nbytes // 2), SizeOnly(body.nbytes // 2)
    one, other = body.chunk(2)
    return one, other
