"""Where gradients are computed."""

from __future__ import annotations

from typing import Any

import torch

from ashl.errors import UsageError


def device_of(runtime: Any) -> str:
    """Raises UsageError where CUDA is asked for and is not there."""
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("runtime.device=cuda, but torch sees no CUDA device here; take runtime.device=cpu")
    if runtime.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return runtime.device
