"""Where gradients are computed, how precisely, and what carries them from there."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ashl.cluster.spec import RealCluster
from ashl.errors import UsageError
from ashl.learn.device import HOST
from ashl.runtime.collectives import nccl_available
from ashl.stage.stage import Topology
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer


def device_of(runtime: Any, local_rank: int = 0) -> str:
    """The device of a process that is the `local_rank`-th of its machine: GPUs are dealt in that
    order.

    Raises UsageError where CUDA is asked for, or arithmetic that only CUDA has, and is not there.
    """
    there = torch.cuda.is_available()
    if runtime.device == "cuda" and not there:
        raise UsageError(
            "runtime.device=cuda, but torch sees no CUDA device here; take runtime.device=cpu"
        )
    kind = ("cuda" if there else HOST) if runtime.device == "auto" else runtime.device
    if runtime.precision == "tf32" and kind == HOST:
        raise UsageError(
            "runtime.precision=tf32 is arithmetic of CUDA devices; on a CPU take fp32, or bf16"
        )
    if runtime.graphs == "on" and kind == HOST:
        raise UsageError(
            "runtime.graphs=on captures steps of CUDA devices, and this run is on a CPU; take off,"
            " or auto"
        )
    return kind if kind == HOST else f"{kind}:{local_rank % torch.cuda.device_count()}"


def gpu_index(device: str) -> str | None:
    """Which of the machine's GPUs that is, whatever this process sees of them; None = none."""
    if device == HOST:
        return None
    index, visible = device.partition(":")[2], os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[int(index)].strip() if visible[0] else index


def use_device(device: str) -> str:
    """Make it this process's own; returns what it is called."""
    if device == HOST:
        return device
    torch.cuda.set_device(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def uses_nccl(runtime: Any, topology: Topology, cluster: Any) -> bool:
    """Whether NCCL carries vectors from device to device: sums, in one group, whose operations all
    ranks begin in one order; where it is asked for, a server's messages, too, as the server grants
    them (`ashl.runtime.transport`).

    Raises UsageError where it is asked for and cannot.
    """
    asked, device = runtime.backend == "nccl", device_of(runtime)
    if runtime.backend == "gloo" or (device == HOST and not asked):
        return False
    if device == HOST:
        raise UsageError(
            "runtime.backend=nccl carries vectors between GPUs, and this run is on CPUs; take auto"
        )
    if not nccl_available():
        why = "this build of torch has no NCCL"
    elif topology.algorithm is not None:
        why = (
            f"topology.algorithm={topology.algorithm} sums in collectives of gloo; NCCL chooses"
            " alone"
        )
    elif isinstance(topology, AllReduce):
        return True
    elif not isinstance(topology, ParameterServer):
        why = (
            "NCCL carries the sums of topology=all_reduce and what a server grants; other messages"
            " go by gloo"
        )
    elif not isinstance(cluster, RealCluster):
        why = "what NCCL carries keeps no declared pace; take cluster=real with it"
    else:
        return asked
    if asked:
        raise UsageError(f"runtime.backend=nccl: {why}; take runtime.backend=auto")
    return False


def have_own_gpus(gpus: Sequence[object], runtime: Any) -> bool:
    """Whether each of these ranks has a GPU of its own (None: it has none): NCCL takes no others.

    Raises UsageError where NCCL is asked for.
    """
    apart = None not in gpus and len({*gpus}) == len(gpus)
    if runtime.backend == "nccl" and not apart:
        raise UsageError(
            "runtime.backend=nccl needs a GPU of its own for each rank; start no more, or take auto"
        )
    return apart
