"""Elements without a gradient: −0.0 in a vector of gradients; the optimizer's step leaves them
unchanged.

Rule: a parameter that takes no part in the loss of a step has no gradient there. torch.optim then
leaves the parameter, its moments and its count of steps unchanged. A gradient that is zero is
different: weight decay and momentum still move the parameter. In a vector of gradients, +0.0 is a
zero gradient and −0.0 an absent one. In IEEE 754, −0.0 is the identity of addition, and −0.0 times
a positive weight is −0.0. A weighted sum over workers is therefore −0.0 exactly where no worker has
a gradient. Where some workers have one, the others add nothing.

Limits: a lossy codec does not carry the sign of zero.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ashl.size_only import SizeOnly

ABSENT = -(2**31)  # the bits of −0.0 as an int32, below those of all other numbers
HOST = torch.device("cpu")


def flatten_gradients(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], marked: bool = True
) -> tuple[Tensor, bool]:
    """Return the gradients of these parameters as one new vector, float32 [d], and True if some are
    absent.

    Sparse gradients become dense. Zeros of a complete gradient become +0.0 only if it is to be
    `marked`: a step of one worker alone does not look for absent ones.
    """
    lacks = False
    try:
        vector = _flatten_dense_tensors(gradients)
    # For an absent and for a sparse gradient; checking each one would take time at every step.
    except (TypeError, RuntimeError):
        lacks = any(gradient is None for gradient in gradients)
        vector = torch.cat([to_vector(*both) for both in zip(gradients, parameters, strict=True)])
    if lacks or not marked:
        return vector, lacks
    if len(gradients) == 1 or vector.device != HOST:
        return vector + 0.0, False
    values = vector.numpy()
    np.add(values, 0.0, out=values)  # −0.0 + 0.0 = +0.0; half the time that torch takes
    return vector, False


def to_vector(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a gradient as a vector without −0.0; a vector of −0.0 if it is absent."""
    if gradient is None:
        return torch.full_like(
            parameter, -0.0, requires_grad=False, memory_format=torch.contiguous_format
        ).flatten()
    return (gradient.to_dense() if gradient.layout != torch.strided else gradient).flatten() + 0.0


def is_absent(gradient: Tensor) -> Tensor:
    """Return True for each element of this vector without a gradient, bool [d]."""
    return gradient.view(torch.int32) == ABSENT


def has_absent(gradient: Tensor, starts: np.ndarray | None) -> bool:
    """Return True if an element of this vector, which is in host memory, has no gradient.

    Args: starts is the first index of each tensor in the vector: its element shows if the tensor
    has a gradient. None = look at all elements.
    """
    bits = gradient.numpy().view(np.int32)
    return bits.min() == ABSENT if starts is None else ABSENT in bits[starts].tolist()


def find_absent(gradient: Tensor, starts: np.ndarray | None) -> Tensor:
    """Return which elements have no gradient, bool [d]: those of tensors that are −0.0 throughout.

    In a tensor with a gradient, the product of a tiny negative element and a weight may round to
    −0.0.
    """
    absent = is_absent(gradient)
    if starts is None:
        return absent
    whole = np.logical_and.reduceat(absent.cpu().numpy(), starts)
    lengths = np.diff(starts, append=len(absent))
    return torch.from_numpy(np.repeat(whole, lengths)).to(gradient.device)


def restore_absent(
    gradient: Tensor, starts: np.ndarray | None, before: Sequence[Tensor], after: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return `after`, with `before` in the elements without a gradient.

    A scalar becomes a vector of scalars.
    """
    absent = find_absent(gradient, starts)
    return tuple(torch.where(absent, old, new) for old, new in zip(before, after, strict=True))


def add_gradients(gradient: Any, more: Any) -> Any:
    """Return gradient + more.

    An element without a gradient has none in the sum either, if `more` is zero there.
    """
    if isinstance(gradient, SizeOnly) or isinstance(more, SizeOnly):
        return gradient
    return torch.where(is_absent(gradient) & (more == 0), gradient, gradient + more)
