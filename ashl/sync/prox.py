"""The proximal step of λ‖·‖₁, which makes small elements zero."""

from typing import Any

import torch

from ashl.size_only import SizeOnly


def shrink(x: Any, threshold: float) -> Any:
    """argmin_z threshold·‖z‖₁ + ‖z − x‖²/2: every element moved towards zero by the threshold, and
    no farther.
    """
    if not threshold or isinstance(x, SizeOnly):
        return x
    return torch.sign(x) * (x.abs() - threshold).clamp_(min=0)
