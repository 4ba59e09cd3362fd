"""Where a run happens, as a user chooses it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ashl.option import Count, Natural, Span, option

Threads = Annotated[
    Count, Field(le=1024)
]  # torch starts as many as it is asked for, until the machine gives up
Device = Literal["auto", "cpu", "cuda"]
OnWorkerFailure = Literal["skip", "reshard"]  # what becomes of a lost worker's data
Graphs = Literal[
    "auto", "off", "on"
]  # of steps, see ashl.learn.graphs; auto is off until they have run on a device
Precision = Literal["fp32", "tf32", "bf16"]  # of products and convolutions; vectors are float32


@option
class SimRuntime:
    """Exact virtual time in one process: the same result, bit for bit, on every run."""

    name: ClassVar[str] = "sim"
    gradients: bool
    threads: Threads
    cores: Threads | Literal["auto"] = "auto"
    device: Device
    precision: Precision
    graphs: Graphs = "auto"
    min_workers: Count
    on_worker_failure: OnWorkerFailure = "skip"


@option
class Processes:
    """What both have whose ranks are processes."""

    gradients: ClassVar[bool] = True
    backend: Literal["auto", "gloo", "nccl"]
    reduction: Literal["deterministic", "backend"]
    threads: Threads
    device: Device
    precision: Precision
    graphs: Graphs = "auto"
    share_gpu: bool | None
    interface: str | None
    heartbeat_timeout_s: Span
    min_workers: Count
    on_worker_failure: OnWorkerFailure = "skip"
    max_restarts: Natural


@option
class LocalRuntime(Processes):
    """Real processes on this machine, one per rank, paced to the declared costs."""

    name: ClassVar[str] = "local"


@option
class TorchrunRuntime(Processes):
    """The processes of a job that torchrun, mpirun or srun has started, or whoever sets RANK and
    WORLD_SIZE.
    """

    name: ClassVar[str] = "torchrun"
