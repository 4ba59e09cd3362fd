"""Time a step of DDP with the hooks of `ashl.ddp_hook`, beside torch's hooks and beside no hook.

Two processes over gloo train a network of 1.9 million parameters: on loopback and, with root,
between two network namespaces behind links of 1000 and 100 Mbit/s. All hooks take turns in one run.
Printed: milliseconds a step (median), the ratio to no hook, and sent bytes over dense bytes.

    python -m tests.benchmarks.ddp_hook
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ashl
from tests import namespaces
from tests.engines import free_port

RATES = (1000, 100)  # Mbit/s
TURNS, STEPS = 3, 6  # steps of each hook in a turn; the first one is a warm-up
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "ashl fp16": ("cast", {"dtype": "fp16", "error_feedback": False}),
    "ashl power_sgd, rank 2": ("power_sgd", {"rank": 2}),
    "ashl topk, 1 %": ("topk", {"ratio": 0.01}),
    "ashl qsgd": ("qsgd", {}),
    "ashl terngrad": ("terngrad", {}),
    "ashl sign": ("sign", {}),
}
Model = tuple[DistributedDataParallel, torch.optim.Optimizer]


def no_hook(ddp: DistributedDataParallel) -> None:
    return None


def torch_fp16(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def torch_power_sgd(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def make_model(register: Callable[[DistributedDataParallel], Any]) -> tuple[Model, Any]:
    """Return a model with this hook, and the state of the hook.

    torch's PowerSGD has one bucket: over gloo its chained collectives of several buckets may reach
    the workers in different orders, which ends the processes.
    """
    bucket_mb = 25 if register is torch_power_sgd else 2
    torch.manual_seed(0)
    layers = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    ddp = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(1024, 10)), bucket_cap_mb=bucket_mb
    )
    state = register(ddp)
    return (ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)), state


def with_codec(name: str, options: dict[str, Any]) -> Callable[[DistributedDataParallel], Any]:
    def register(ddp: DistributedDataParallel) -> Any:
        state, hook = ashl.ddp_hook(name, **options)
        ddp.register_comm_hook(state, hook)
        return state

    return register


def time_steps(model: Model) -> list[float]:
    """Return the seconds of each step after a warm-up."""
    ddp, optimizer = model
    x, y = torch.randn(32, 784), torch.randint(10, (32,))
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def run_rank() -> None:
    """Train with all hooks in turn; rank 0 prints the results as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hooks: dict[str, Callable[[DistributedDataParallel], Any]] = {
        "no hook": no_hook,
        "torch fp16": torch_fp16,
        "torch PowerSGD, rank 2": torch_power_sgd,
        **{name: with_codec(*codec) for name, codec in OURS.items()},
    }
    made = {name: make_model(register) for name, register in hooks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(TURNS):
        for name, (model, _) in made.items():
            seconds[name] += time_steps(model)
    found = {
        name: (statistics.median(seconds[name]), state.density if state else None)
        for name, (_, state) in made.items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort while it is destroyed


def on_loopback(command: list[str]) -> str:
    """Run two ranks on this machine; return what rank 0 printed."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            command, env=os.environ | world | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    return next(rank.communicate(timeout=600)[0] for rank in ranks)


def show(title: str, printed: str) -> None:
    found = json.loads(printed.splitlines()[-1])
    base = found["no hook"][0]
    print(f"\n{title}\n{'hook':26}{'ms a step':>10}{'/ no hook':>11}{'bytes':>8}")
    for name, (seconds, density) in found.items():
        sent = "" if density is None else f"{density:.3f}"
        print(f"{name:26}{1e3 * seconds:10.1f}{seconds / base:11.2f}{sent:>8}")


def main() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.ddp_hook", "rank"]
    show("loopback", on_loopback(command))
    if reason := namespaces.missing():
        print(f"\nnot run on shaped links: {reason}")
        return
    for rate in RATES:
        with namespaces.machines(rate, rate) as names, tempfile.TemporaryDirectory() as folder:
            printed = namespaces.job(names, 29555, command, Path(folder), 600)
        show(f"links of {rate} Mbit/s", printed[0])


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else main()
