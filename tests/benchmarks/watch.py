"""Time a step of a plain DDP script with the hook of `ashl watch` and without it.

Two processes over gloo train a network of 1.9 million parameters. In one run, blocks of steps with
the hook and blocks without it take turns. Printed: milliseconds a step of both, and the overhead.
Each is the lower decile of all steps, which other programs of the machine delay least. Then: after
how many seconds `ashl watch` names a rank that is slower by half.

    python -m tests.benchmarks.watch --runs 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ashl.watch.watch import FOLDER, HOOK
from tests.benchmarks.ddp_hook import on_loopback
from tests.benchmarks.table import show, write_csv
from tests.engines import free_port

COLUMNS = ("run", "a step without", "with", "overhead", "the slower rank is named after")
TURNS, STEPS = 60, 20  # a turn has two blocks, of so many steps each


def run_rank() -> None:
    """Train with and without the hook in turn; rank 0 prints the medians as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x, y = torch.randn(32, 784), torch.randint(10, (32,))
    hooked = DistributedDataParallel._pre_forward
    forms = {"without": hooked.__wrapped__, "with": hooked}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    rates = {"without": 1 << 30, "with": 1}  # DDP itself measures every step with the hook
    for turn in range(TURNS):
        for name in sorted(forms, reverse=turn % 2 == 0):
            DistributedDataParallel._pre_forward = forms[name]
            ddp._set_ddp_runtime_logging_sample_rate(rates[name])
            times = []
            for _ in range(STEPS):
                loss = nn.functional.cross_entropy(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                times.append(time.perf_counter())
            seconds[name] += [after - before for before, after in pairwise(times)]
    found = {name: statistics.quantiles(own, n=10)[0] for name, own in seconds.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort while it is destroyed


def time_to_verdict() -> float:
    """Return the seconds from the first record to the verdict on a rank slower by half."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "run"
        command = [sys.executable, "-m", "ashl.cli", "watch", "--folder", str(own), "--"]
        command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += [f"--master-port={free_port()}", "tests/watched_ddp.py", "20", "1", "1.5"]
        printed = Path(folder) / "printed"
        with (
            printed.open("w") as file,
            subprocess.Popen(command, stdout=file, stderr=file) as process,
        ):
            begin_s = None
            while process.poll() is None:
                if begin_s is None and (own / "rank1.jsonl").exists():
                    begin_s = time.monotonic()
                if "rank 1 computes" in printed.read_text() and begin_s is not None:
                    passed_s = time.monotonic() - begin_s
                    process.wait()
                    return passed_s
                time.sleep(0.05)
    return float("inf")


def overhead() -> tuple[float, float]:
    """Return the milliseconds of a step (without the hook, with it)."""
    command = [sys.executable, "-m", "tests.benchmarks.watch", "rank"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PYTHONPATH": f"{HOOK}{os.pathsep}{os.getcwd()}", FOLDER: folder}
        found = json.loads(on_loopback(command).splitlines()[-1])
        del os.environ[FOLDER]
    return 1e3 * found["without"], 1e3 * found["with"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for watch.csv")
    asked = parser.parse_args()
    rows = []
    for run in range(1, asked.runs + 1):
        without, hooked = overhead()
        named_s = time_to_verdict()
        ms = f"{without:.2f} ms", f"{hooked:.2f} ms"
        rows.append((str(run), *ms, f"{100 * (hooked / without - 1):.2f} %", f"{named_s:.1f} s"))
    show("A DDP script with the hook of `ashl watch`", COLUMNS, rows, "two ranks over gloo")
    if asked.save is not None:
        write_csv(asked.save / "watch.csv", COLUMNS, rows)


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else main()
