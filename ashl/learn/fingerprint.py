"""Compute fingerprints of tensors, which processes compare before a run to check their model and
data.

Whole numbers are hashed. Of floating-point numbers a few sums are compared up to rounding, because
processors of different kinds draw normal numbers that differ in the last bit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ashl.data.dataset import Data, Split

ROUNDING = 1e-5  # relative to the sum of magnitudes
READ = 256  # most inputs of a half that are read, if they are in memory

Fingerprint = Mapping[str, Sequence[Any]]  # by name: the shape, and a hash or three sums


def fingerprint(x: Tensor) -> list[Any]:
    """Return [shape, hash] of whole numbers, or [shape, Σ|x|, Σx, Σ w·x] of floating-point numbers.

    The weights w = cos(i) of the third sum distinguish orders of the elements.
    """
    x = x.detach().cpu()
    shape = "x".join(map(str, x.shape))
    if not x.is_floating_point():
        content = torch.view_as_real(x) if x.is_complex() else x
        return [shape, hashlib.sha256(content.contiguous().numpy().tobytes()).hexdigest()[:16]]
    values = x.flatten().double()
    weights = torch.arange(len(values), dtype=torch.float64).cos()
    return [shape, values.abs().sum().item(), values.sum().item(), values.dot(weights).item()]


def fingerprint_of_data(data: Data) -> dict[str, list[Any]]:
    """Return the fingerprints of both halves' targets and, if they are in memory, of some
    inputs.
    """
    found = {}
    for name, half in (("training", data.train), ("test", data.test)):
        found[f"the number of {name} samples"] = [str(len(half))]
        found[f"the {name} targets"] = fingerprint(half.targets)
        if isinstance(half.inputs, Tensor):
            found[f"the {name} inputs"] = fingerprint(sample_inputs(half))
    return found


def sample_inputs(half: Split) -> Tensor:
    """Return inputs at equal distances."""
    assert isinstance(half.inputs, Tensor)
    return half.inputs[:: max(1, len(half) // READ)]


def first_difference(own: Fingerprint, other: Fingerprint) -> str | None:
    """Return the name of the first part that differs; None if all are equal up to rounding."""
    names = (*own, *(name for name in other if name not in own))
    return next(
        (name for name in names if not is_equal(own.get(name, ()), other.get(name, ()))), None
    )


def is_equal(own: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True if two fingerprints agree, sums up to rounding."""
    if len(own) != 4 or len(other) != 4 or own[0] != other[0]:
        return list(own) == list(other)
    bound = ROUNDING * own[1]
    return all(
        abs(a - b) <= bound or repr(a) == repr(b) for a, b in zip(own[1:], other[1:], strict=True)
    )
