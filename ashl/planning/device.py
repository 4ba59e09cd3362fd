"""Where gradients are computed, how precisely, and what carries them from there."""

from __future__ import annotations

from typing import Any

import torch

from ashl.errors import UsageError
from ashl.learn.device import HOST
from ashl.runtime.collectives import nccl_is_there
from ashl.stage.rule import Topology
from ashl.topology.all_reduce import AllReduce


def device_of(runtime: Any) -> str:
    """Raises UsageError where CUDA is asked for, or arithmetic that only CUDA has, and is not there."""
    there = torch.cuda.is_available()
    if runtime.device == "cuda" and not there:
        raise UsageError("runtime.device=cuda, but torch sees no CUDA device here; take runtime.device=cpu")
    device = ("cuda" if there else HOST) if runtime.device == "auto" else runtime.device
    if runtime.precision == "tf32" and device == HOST:
        raise UsageError("runtime.precision=tf32 is arithmetic of CUDA devices; on a CPU take fp32, or bf16")
    return device


def by_nccl(runtime: Any, topology: Topology) -> bool:
    """Whether NCCL carries sums from device to device: one group, whose operations all ranks begin in one order.

    Raises UsageError where it is asked for and cannot.
    """
    asked, device = runtime.backend == "nccl", device_of(runtime)
    if runtime.backend == "gloo" or (device == HOST and not asked):
        return False
    if device == HOST:
        raise UsageError("runtime.backend=nccl carries vectors between GPUs, and this run is on CPUs; take auto")
    if not nccl_is_there():
        why = "this build of torch has no NCCL"
    elif not isinstance(topology, AllReduce):
        why = "NCCL carries the sums of topology=all_reduce alone; others exchange messages, which go by gloo"
    else:
        return True
    if asked:
        raise UsageError(f"runtime.backend=nccl: {why}; take runtime.backend=auto")
    return False
