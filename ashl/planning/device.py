"""Device of the gradients, their precision, and the backend that transfers vectors."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ashl.cluster.spec import RealCluster
from ashl.device import HOST
from ashl.errors import UsageError
from ashl.plan.plan import Plan
from ashl.planning.instantiate import Parts
from ashl.runtime.collectives import nccl_available
from ashl.stage.contract import Topology
from ashl.topology.all_reduce import AllReduce
from ashl.topology.partial_all_reduce import PartialAllReduce


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

    It carries the sums of all workers. If the runtime asks for NCCL, it also carries the sums of
    groups of workers, by a communicator per group. Vectors of other topologies travel as messages,
    in the order in which they are granted (`ashl.runtime.transport`).
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
    elif not (sums_vectors(topology) or isinstance(cluster, RealCluster)):
        why = "messages by NCCL cannot be paced; take cluster=real with it"
    else:
        return asked
    if asked:
        raise UsageError(f"runtime.backend=nccl: {why}; take runtime.backend=auto")
    return False


def sums_vectors(topology: Topology) -> bool:
    """Return True if vectors travel by collectives, and not as messages."""
    return isinstance(topology, AllReduce | PartialAllReduce)


def num_with_vectors(plan: Plan, topology: Topology) -> int:
    """Return the number of ranks that exchange vectors: workers and servers, but no coordinator."""
    return plan.num_ranks if topology.has_server else plan.num_workers


def have_own_gpus(gpus: Sequence[object], plan: Plan, parts: Parts) -> bool:
    """Return True if each rank that exchanges vectors has a GPU of its own, which NCCL needs.

    Args: gpus, by rank; None: the rank has none.
    Raises: UsageError if the runtime asks for NCCL and they have not.
    """
    gpus = gpus[: num_with_vectors(plan, parts.stages[0].topology)]
    apart = None not in gpus and len({*gpus}) == len(gpus)
    if parts.runtime.backend == "nccl" and not apart:
        raise UsageError(
            "runtime.backend=nccl: each worker and server needs a GPU of its own; start fewer, or"
            " take auto"
        )
    return apart
