"""Where a run happens, as a user chooses it: virtual time, local processes or the processes of a
job.

Each class is an option of the group `runtime`; its fields are the keys. conf/runtime/ has their
defaults and says what they mean.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ashl.option import Count, Natural, Span, option

# upper bound, because torch starts every thread that it is asked for
Threads = Annotated[Count, Field(le=1024)]
Device = Literal["auto", "cpu", "cuda"]
# what the survivors take over of a failed worker: nothing, its data, or its share of the batch
OnWorkerFailure = Literal["skip", "reshard", "keep_batch"]
# CUDA graphs of steps, see ashl.learn.graphs; auto = off until they have run on a device
Graphs = Literal["auto", "off", "on"]
# precision of matrix products and convolutions; vectors are float32
Precision = Literal["fp32", "tf32", "bf16"]


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
    """The settings of runtimes whose ranks are processes."""

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
    wait_timeout_s: Span | None = None
    min_workers: Count
    on_worker_failure: OnWorkerFailure = "skip"
    max_restarts: Natural


@option
class LocalRuntime(Processes):
    """Real processes on this machine, one per rank, paced to the declared costs."""

    name: ClassVar[str] = "local"


@option
class TorchrunRuntime(Processes):
    """The processes of a job that torchrun, mpirun, srun or another launcher that sets RANK and
    WORLD_SIZE has started.
    """

    name: ClassVar[str] = "torchrun"


def wait_limit_s(runtime: Mapping[str, Any]) -> float:
    """Return the limit of waiting for processes of the job, for its store, and of all ranks for
    each other, by the runtime of a plan.
    """
    own = runtime.get("wait_timeout_s")  # absent in the plan of an older run
    return runtime["heartbeat_timeout_s"] if own is None else own
