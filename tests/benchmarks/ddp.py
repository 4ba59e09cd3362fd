"""All-reduce by ashl beside torch's own DistributedDataParallel: `python -m tests.benchmarks.ddp`.

Two processes over gloo, the same model, batch, momentum and data, one thread each; neither side's start-up counts.
"""

import io
import json
import os
import socket
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from ashl.config.compose import compose
from ashl.run.train import train
from tests.benchmarks import torch_ddp
from tests.benchmarks.table import alternate, ratio, show, thousands

TURNS = 9
IMAGES = ("dataset=synthetic", "dataset.num_train=640", "dataset.num_test=10")
CASES = {  # (overrides, steps of each worker: most of a second)
    "mlp/digits": (("model=mlp", "dataset=digits"), 1000),
    "lenet 32x32": (("model=lenet", *IMAGES), 160),
    "resnet8 32x32": (("model=resnet8", *IMAGES), 20),
}
BASE = (
    "topology=all_reduce",
    "sync=bsp",
    "runtime=local",
    "cluster=real",
    f"cluster.num_workers={torch_ddp.WORKERS}",
    "tracking=none",
    "tracking.events=none",
    "eval.every_s=null",
    "eval.every_commits=1000000000",
    "optimizer.lr=0.01",
)


def ours(*overrides: str) -> float:
    """Samples a second of a whole `ashl train`, as its summary has them."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # what a run says at its end
        config = compose([*overrides, f"run.dir={folder}/run"], None)
        train(config, list(overrides), quiet=True)
        return json.loads((Path(folder) / "run/summary.json").read_text())["samples_per_s"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    rows = []
    for case, (overrides, steps) in CASES.items():
        chosen = (*BASE, *overrides, f"stop.steps={torch_ddp.WORKERS * steps}")
        config = compose(chosen, None)
        found = alternate(
            {
                "exact": partial(ours, *chosen, "runtime.sums=exact"),
                "native": partial(ours, *chosen, "runtime.sums=native"),
                "DDP": lambda config=config, steps=steps: torch_ddp.samples_per_s(config, steps, free_port()),
            },
            TURNS,
        )
        against = [
            cell for sums in ("exact", "native") for cell in (thousands(found[sums]), ratio(found[sums], found["DDP"]))
        ]
        rows.append([case, thousands(found["DDP"]), *against])
    show(
        "Samples/s of two workers: torch's DDP, and ashl's all-reduce with sums=exact and sums=native",
        ["", "DDP", "exact", "/ DDP", "native", "/ DDP"],
        rows,
        f"medians of {TURNS} turns; ratios are taken within a turn: median (quartiles)",
    )


if __name__ == "__main__":
    main()
