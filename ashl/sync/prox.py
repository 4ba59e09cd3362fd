"""Proximal step of the l1 norm, which sets small elements to zero."""

from typing import Any

import torch

from ashl.size_only import SizeOnly


def shrink(x: Any, threshold: float) -> Any:
    """Return argmin_z threshold·‖z‖₁ + ‖z − x‖²/2: each element moved towards zero by the
    threshold, and set to zero if it is smaller.
    """
    if not threshold or isinstance(x, SizeOnly):
        return x
    return torch.sign(x) * (x.abs() - threshold).clamp_(min=0)
