"""Device of the gradients, their precision, and the backend that transfers vectors."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ashl.cluster.spec import RealCluster
from ashl.device import HOST
from ashl.errors import UsageError
from ashl.runtime.collectives import nccl_available
from ashl.stage.contract import Topology
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer


def device_of(runtime: Any, local_rank: int = 0) -> str:
    """Return the device of the process with this local rank; GPUs are assigned in the order of
    local ranks.

    Raises: UsageError if the runtime asks for CUDA, or for CUDA arithmetic, and there is no CUDA
    device.
    """
    available = torch.cuda.is_available()
    if runtime.device == "cuda" and not available:
        raise UsageError(
            "runtime.device=cuda: torch finds no CUDA device here; take runtime.device=cpu"
        )
    kind = ("cuda" if available else HOST) if runtime.device == "auto" else runtime.device
    if runtime.precision == "tf32" and kind == HOST:
        raise UsageError(
            "runtime.precision=tf32: needs a CUDA device; take runtime.precision=fp32 or bf16"
        )
    if runtime.graphs == "on" and kind == HOST:
        raise UsageError(
            "runtime.graphs=on: captures steps of CUDA devices, and this run is on a CPU; take off,"
            " or auto"
        )
    return kind if kind == HOST else f"{kind}:{local_rank % torch.cuda.device_count()}"


def gpu_index(device: str) -> str | None:
    """Return the node-wide index of a GPU, also if this process sees only some GPUs; None for the
    CPU.
    """
    if device == HOST:
        return None
    index, visible = device.partition(":")[2], os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[int(index)].strip() if visible[0] else index


def use_device(device: str) -> str:
    """Select the device for this process, and return its name."""
    if device == HOST:
        return device
    torch.cuda.set_device(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def uses_nccl(runtime: Any, topology: Topology, cluster: Any) -> bool:
    """Return True if NCCL transfers vectors between devices.

    It carries all-reduces of one group whose operations all ranks begin in the same order. If the
    runtime asks for NCCL, it also carries a server's messages, as the server grants them
    (`ashl.runtime.transport`).
    Raises: UsageError if the runtime asks for NCCL and the run does not support it.
    """
    asked, device = runtime.backend == "nccl", device_of(runtime)
    if runtime.backend == "gloo" or (device == HOST and not asked):
        return False
    if device == HOST:
        raise UsageError(
            "runtime.backend=nccl: carries vectors between GPUs, and this run is on CPUs; take auto"
        )
    if not nccl_available():
        why = "this build of torch has no NCCL"
    elif topology.algorithm is not None:
        why = (
            f"topology.algorithm={topology.algorithm} needs gloo, as NCCL chooses its own algorithm"
        )
    elif isinstance(topology, AllReduce):
        return True
    elif not isinstance(topology, ParameterServer):
        why = "NCCL carries only topology=all_reduce and the messages of topology=parameter_server"
    elif not isinstance(cluster, RealCluster):
        why = "transfers by NCCL cannot be paced; take cluster=real with it"
    else:
        return asked
    if asked:
        raise UsageError(f"runtime.backend=nccl: {why}; take runtime.backend=auto")
    return False


def have_own_gpus(gpus: Sequence[object], runtime: Any) -> bool:
    """Return True if each of these ranks has a GPU of its own (None: the rank has none), which NCCL
    needs.

    Raises: UsageError if the runtime asks for NCCL and they have not.
    """
    apart = None not in gpus and len({*gpus}) == len(gpus)
    if runtime.backend == "nccl" and not apart:
        raise UsageError(
            "runtime.backend=nccl: each rank needs a GPU of its own; start fewer ranks, or take"
            " auto"
        )
    return apart
