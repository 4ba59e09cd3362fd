"""Where gradients are computed, and how precisely."""

from __future__ import annotations

from typing import Any

import torch

from ashl.errors import UsageError
from ashl.learn.device import HOST


def device_of(runtime: Any) -> str:
    """Raises UsageError where CUDA is asked for, or arithmetic that only CUDA has, and is not there."""
    there = torch.cuda.is_available()
    if runtime.device == "cuda" and not there:
        raise UsageError("runtime.device=cuda, but torch sees no CUDA device here; take runtime.device=cpu")
    device = ("cuda" if there else HOST) if runtime.device == "auto" else runtime.device
    if runtime.precision == "tf32" and device == HOST:
        raise UsageError("runtime.precision=tf32 is arithmetic of CUDA devices; on a CPU take fp32, or bf16")
    return device
