"""Record the time of each step of `DistributedDataParallel`, in the processes of `ashl watch`.

Python imports a module of this name at its start, if its folder is in PYTHONPATH. It works in any
environment with torch, and imports nothing of ashl. It changes nothing that the job computes.

A step lasts from one forward pass to the next. A rank is blocked from the end of its backward pass
to the end of the exchange, as DDP itself measures them, and in blocking collectives. Each line of
`rank<N>.jsonl` is [iteration, stride, seconds, blocked seconds]: a step that stands for `stride`
steps. The first line of a process is a record of its rank. Strides are powers of two, so that all
ranks record common steps.

Limits: the first DDP module of a process alone; DDP of the CPU's and of the devices' reducer.
"""

import atexit
import importlib.util
import json
import os
import sys
import time
from functools import wraps
from importlib.machinery import PathFinder

FOLDER = "ASHL_WATCH"  # environment variable with the folder of the records
DDP = "torch.nn.parallel.distributed"
WARM_UP = 3  # iterations before the first record
APART_S = 0.02  # seconds between two records, at least
FLUSH_S = 0.5
BLOCKING = (
    "barrier",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
)


class Recorder:
    """Measures the steps of the first DDP module of this process."""

    def __init__(self, folder, torch):
        self.folder, self.torch = folder, torch
        self.module_id = None  # of the module that is recorded
        self.pid = os.getpid()
        self.file = None
        self.lines = []
        self.iteration, self.stride = 0, 1
        self.started_s = self.flushed_s = 0.0
        self.blocked_s = 0.0  # in collectives of the current step, outside of backward
        self.depth = 0  # of nested collectives
        self.failed = False  # True after an error

    def begin_step_safely(self, module):
        """Record the last step; after an error nothing more is recorded, and the job continues."""
        try:
            self.begin_step(module)
        except Exception as error:
            self.failed = True
            sys.stderr.write(f"ashl watch: stops recording ({error!r})\n")

    def begin_step(self, module):
        """Record the last step, at the begin of a forward pass that will be synchronized."""
        if self.module_id is None:
            self.module_id = id(module)
            self.open(module)
        if id(module) != self.module_id or os.getpid() != self.pid:
            return
        now_s = time.perf_counter()
        step_s = now_s - self.started_s
        self.started_s = now_s
        blocked_s = self.blocked_s
        self.blocked_s = 0.0
        last = self.iteration
        self.iteration += 1
        if last >= WARM_UP and last % self.stride == 0:
            times = module.logger._get_ddp_logging_data().ints_map
            if times["iteration"] == last:
                exposed_ns = times["backward_comm_time"]
                exposed_ns -= times["backward_compute_comm_overlap_time"]
                blocked_s += max(0, exposed_ns) / 1e9
                self.lines.append(json.dumps([last, self.stride, step_s, min(blocked_s, step_s)]))
            while self.stride * step_s < APART_S:
                self.stride *= 2
                module._set_ddp_runtime_logging_sample_rate(self.stride)
            if now_s - self.flushed_s > FLUSH_S:
                self.flush()

    def open(self, module):
        """Begin the records of this process."""
        distributed = self.torch.distributed
        rank = distributed.get_rank()
        module._set_ddp_runtime_logging_sample_rate(self.stride)
        self.file = open(os.path.join(self.folder, f"rank{rank}.jsonl"), "a")  # noqa: SIM115
        start = {"rank": rank, "world_size": distributed.get_world_size()}
        start.update(host=os.uname().nodename, pid=self.pid, device=module.device_type)
        self.lines.append(json.dumps(start))
        self.flush()
        atexit.register(self.flush)

    def flush(self):
        if self.file and self.lines and os.getpid() == self.pid:
            self.file.write("\n".join(self.lines) + "\n")
            self.file.flush()
            self.lines = []
            self.flushed_s = time.perf_counter()

    def count_as_blocked(self, call):
        """Count the time of a function as blocked: return one that does the same."""

        @wraps(call)
        def run(*args, **kwargs):
            begin_s = time.perf_counter()
            self.depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.blocked_s += time.perf_counter() - begin_s

        return run


def observe(module):
    """Put a recorder behind DDP and the collectives of torch.distributed."""
    torch = sys.modules["torch"]
    recorder = Recorder(os.environ[FOLDER], torch)
    kind = module.DistributedDataParallel
    pre_forward = kind._pre_forward

    def begin(self, *args, **kwargs):
        if (
            torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and self.logger is not None
            and not torch.compiler.is_compiling()
        ):
            prepared = pre_forward(self, *args, **kwargs)
            if not recorder.failed:
                recorder.begin_step_safely(self)
            return prepared
        return pre_forward(self, *args, **kwargs)

    kind._pre_forward = wraps(pre_forward)(begin)
    kind._sync_buffers = recorder.count_as_blocked(kind._sync_buffers)
    distributed = sys.modules["torch.distributed"]
    for name in BLOCKING:
        call = recorder.count_as_blocked(getattr(distributed, name))
        for place in (distributed, distributed.distributed_c10d):
            setattr(place, name, call)


class Finder:
    """Calls `observe` once Python has imported DDP."""

    def find_spec(self, name, path=None, target=None):
        if name != DDP:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_observe(module):
                execute(module)
                try:
                    observe(module)
                except Exception as error:
                    sys.stderr.write(f"ashl watch: this torch cannot be watched ({error!r})\n")

            setattr(loader, "exec_module", execute_and_observe)  # noqa: B010
        return spec


def run_next():
    """Run the module of this name that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(FOLDER):
    sys.meta_path.insert(0, Finder())
run_next()
