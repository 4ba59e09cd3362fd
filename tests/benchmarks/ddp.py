"""All-reduce by ashl beside torch's own DistributedDataParallel: `python -m tests.benchmarks.ddp`.

Two processes over gloo, the same model, batch, momentum and data, one thread each; turn about in one run. Neither
side's start-up counts.
"""

import json
import os
import socket
import tempfile
from pathlib import Path

from ashl.cli.compose import compose
from ashl.run import train
from tests.benchmarks import torch_ddp
from tests.benchmarks.table import ratio, show, thousands

TURNS = 5
CASES = [  # model, data, steps of each worker: about a second
    ("mlp", ["dataset=digits"], 1500),
    ("lenet", ["dataset=synthetic"], 400),
    ("resnet8", ["dataset=synthetic"], 60),
]
BASE = (
    "topology=all_reduce",
    "sync=bsp",
    "runtime=local",
    "cluster=real",
    "cluster.num_workers=2",
    "tracking=none",
    "tracking.events=none",
    "eval.every_s=null",
    "eval.every_commits=1000000000",
    "optimizer.lr=0.01",
)


def samples_per_s(config: dict, overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train({**config, "run": {"dir": str(run)}}, overrides, quiet=True)
        return json.loads((run / "summary.json").read_text())["samples_per_s"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    rows = []
    for model, data, steps in CASES:
        overrides = [*BASE, f"model={model}", *data, f"stop.steps={2 * steps}"]
        kinds = {sums: compose([*overrides, f"runtime.sums={sums}"], None) for sums in ("exact", "native")}
        ours: dict[str, list[float]] = {sums: [] for sums in kinds}
        theirs: list[float] = []
        for _ in range(TURNS):
            for sums, config in kinds.items():
                ours[sums].append(samples_per_s(config, overrides))
            theirs.append(torch_ddp.samples_per_s(kinds["exact"], steps, free_port()))
        name = f"{model}/{data[0].partition('=')[2]}"
        rows.append(
            [
                name,
                thousands(theirs),
                *(f(*a) for s in ours for f, a in ((thousands, [ours[s]]), (ratio, [ours[s], theirs]))),
            ]
        )
    show(
        "samples/s of two workers, torch's DDP and ashl",
        ["", "DDP", "exact", "ratio", "native", "ratio"],
        rows,
        f"median of {TURNS} turns; ratio: ashl / DDP within a turn, median (range)",
    )


if __name__ == "__main__":
    main()
