"""Unequal machines at fixed H: `python -m tests.benchmarks.unequal`.

Two workers, the second one four times slower, H = 100, 52 ms round trip. Time to a training loss of
0.2 on digits. The modes of `ashl` run in virtual time, with three seeds. torchft's LocalSGD runs on
two real processes with the same paced steps and without the round trip, with `min_replica_size` 1
and 2; it needs `pip install torchft==0.2.0`. `--torchft-s S` ends each of its runs after S seconds.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ashl.tracking import jsonl
from tests.benchmarks.table import show, write_csv
from tests.engines import free_port

STEP_S, SLOWER, LOCAL_STEPS, TARGET, LR = 0.025, 4, 100, 0.2, 0.01
WORKLOAD = (
    "model.hidden=[128]",
    f"optimizer.lr={LR}",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
)
CLUSTER = (
    "runtime=sim",
    "tracking=none",
    "cluster=homogeneous",
    f"cluster.compute=[1,{SLOWER}]",
    f"cluster.step_s={STEP_S}",
    "cluster.exchange_s=null",
    "cluster.latency_s=0.026",
    "cluster.bandwidth_mbit_s=100",
    f"stop.target_loss={TARGET}",
    "stop.seconds=2000",
    "eval.every_s=0.5",
)
FIXED = ("schedule=single", f"sync.local_steps={LOCAL_STEPS}")
PLANNED = (
    "schedule=single",
    f"schedule.h_preset=[{LOCAL_STEPS}]",
    "planner=dylu",
    "sync.local_steps=plan",
)
MODES = {
    "local SGD by all-reduce": (*FIXED, "topology=all_reduce", "sync=local_sgd"),
    "DiLoCo by all-reduce": (*FIXED, "topology=all_reduce", "sync=local_sgd", "outer=nesterov"),
    "local SGD, H by dylu": (*PLANNED, "topology=all_reduce", "sync=local_sgd"),
    "DiLoCo, H by dylu": (*PLANNED, "topology=all_reduce", "sync=local_sgd", "outer=nesterov"),
    "asp": (*FIXED, "sync=asp"),
    "asp, H by dylu": (*PLANNED, "sync=asp"),
    "decoupled, 1 of 2": (*FIXED, "sync=decoupled", "sync.min_learners=1"),
    "decoupled, 1 of 2, Nesterov": (
        *(*FIXED, "sync=decoupled", "sync.min_learners=1"),
        "outer=nesterov",
    ),
    "HALoS, a region each": (
        *(*FIXED, "sync=asp", "topology=halos", "topology.regions=[0,1]"),
        "topology.updates=1",
    ),
    "ashl, H from 100": ("schedule=ashl", f"schedule.h_preset=[{LOCAL_STEPS},2]"),
}


def in_virtual_time(mode: tuple[str, ...], seed: int, folder: Path) -> float | None:
    """Return the virtual seconds to the target, None if the run ends before."""
    given = [*CLUSTER, *WORKLOAD, *mode, f"seed={seed}", f"run.dir={folder}", "--json", "-q"]
    command = [sys.executable, "-m", "ashl.cli", "train", *given]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stderr)
    summary = json.loads(ran.stdout)
    loss = summary["final"]["train_loss"]
    return summary["time_s"] if loss is not None and loss <= TARGET else None


def on_torchft(min_replicas: int, seconds: float, folder: Path) -> list[str]:
    """Return the row of torchft's LocalSGD: time to the target at any replica, and commits alone."""
    port, began_s = free_port(), time.monotonic()
    own = [sys.executable, "-m", "tests.benchmarks.storm_torchft"]
    least = f"--min-replicas={min_replicas}"
    processes = []
    try:
        with (folder / "log").open("w") as log:

            def start(*command: str) -> None:
                processes.append(subprocess.Popen([*own, *command], stdout=log, stderr=log))

            start("lighthouse", f"--port={port}", least)
            for replica in (0, 1):
                start(
                    *("replica", f"--lighthouse=http://127.0.0.1:{port}", "--host=127.0.0.1"),
                    *(least, f"--replica={replica}", f"--local-steps={LOCAL_STEPS}"),
                    *(f"--step-s={STEP_S * SLOWER**replica}", f"--lr={LR}", "--losses"),
                    *(f"--folder={folder}", "--setting", *WORKLOAD),
                )
            reached = None
            lines: list[dict] = []
            while reached is None and time.monotonic() < began_s + seconds:
                time.sleep(0.2)
                lines, _ = jsonl.tail(folder / "commits.jsonl", 0)
                reached = next((line for line in lines if line["loss"] <= TARGET), None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    alone = sum(line["participants"] == 1 for line in lines)
    # the first round of the slow worker ends with the first commit of both
    first_s = LOCAL_STEPS * STEP_S * SLOWER
    zero_s = min((line["time_s"] for line in lines if line["participants"] == 2), default=began_s)
    taken = "-" if reached is None else f"{reached['time_s'] - zero_s + first_s:.1f}"
    name = f"torchft LocalSGD, min_replica_size={min_replicas}"
    return [name, taken, "", f"{len(lines)} commits, {alone} by one replica"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="modes with this in their name")
    parser.add_argument("--torchft-s", type=float, default=300, help="0 = without torchft")
    parser.add_argument("--csv", type=Path, help="file to write the table to")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for number, (name, mode) in enumerate(MODES.items()):
            if asked.only not in name:
                continue
            found = [
                in_virtual_time(mode, seed, Path(place, f"{number}-{seed}")) for seed in asked.seeds
            ]
            times = [time_s for time_s in found if time_s is not None]
            if len(times) < len(found):
                rows.append([name, "-", "", f"{len(times)} of {len(found)} runs reached it"])
            else:
                span = f"{min(times):.1f} to {max(times):.1f}"
                rows.append([name, f"{statistics.median(times):.1f}", span, "virtual time"])
            print(*rows[-1], sep=", ", flush=True)
        if asked.torchft_s and importlib.util.find_spec("torchft") is None:
            print("NOT RUN: torchft is missing (pip install torchft==0.2.0)", file=sys.stderr)
        elif asked.torchft_s:
            for least in (1, 2):
                folder = Path(place, f"torchft-{least}")
                folder.mkdir()
                rows.append(on_torchft(least, asked.torchft_s, folder))
                print(*rows[-1], sep=", ", flush=True)
    columns = ["method", f"seconds to loss {TARGET}", "range of seeds", "note"]
    show("one of two workers four times slower", columns, rows, f"H = {LOCAL_STEPS}")
    if asked.csv:
        write_csv(asked.csv, columns, rows)


if __name__ == "__main__":
    main()
