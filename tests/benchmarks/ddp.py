"""All-reduce by ashl beside torch's own DistributedDataParallel: `python -m tests.benchmarks.ddp`.

Two processes over gloo, the same model, batch, momentum and data, one thread each; neither side's
start-up counts. With `--device cuda` one process, and two where there are two GPUs, over NCCL.
"""

import argparse
import io
import json
import os
import tempfile
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch

from ashl.config.compose import compose
from ashl.run.train import run
from tests.benchmarks import torch_ddp
from tests.benchmarks.table import alternate, ratio, show, thousands
from tests.engines import free_port

TURNS = 7
IMAGES = ("dataset=synthetic", "dataset.num_train=640", "dataset.num_test=10")
CASES = {  # (overrides, steps of each worker: some four seconds, of which a beginning is little)
    "mlp/digits": (("model=mlp", "dataset=digits"), 5000),
    "lenet 32x32": (("model=lenet", *IMAGES), 800),
    "resnet8 32x32": (("model=resnet8", *IMAGES), 100),
}
PIXELS = (
    "dataset=synthetic",
    "dataset.num_train=8192",
    "dataset.num_test=10",
    "dataset.batch_size=128",
)
ON_GPUS = {
    "LeNet": (("model=lenet", *PIXELS), 2000),
    "ResNet-18": (("model=resnet18_small", *PIXELS), 400),
    "VGG16-BN": (("model=vgg16_bn", *PIXELS), 400),
}
BASE = (
    "topology=all_reduce",
    "sync=bsp",
    "runtime=local",
    "cluster=real",
    "tracking=none",
    "tracking.events=none",
    "eval.every_s=null",
    "eval.every_commits=1000000000",
    "optimizer.lr=0.01",
)


def ours(*overrides: str) -> float:
    """Samples a second of a whole `ashl train`, as its summary has them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
    ):  # what a run says at its end
        config = compose([*overrides, f"run.dir={folder}/run"], None)
        run(config, list(overrides), quiet=True)
        return json.loads((Path(folder) / "run/summary.json").read_text())["samples_per_s"]


def compared(device: str, workers: int) -> list[list[str]]:
    rows = []
    for case, (overrides, steps) in (CASES if device == "cpu" else ON_GPUS).items():
        where = (f"cluster.num_workers={workers}", f"runtime.device={device}")
        by = ("runtime.backend=nccl",) if device == "cuda" else ()
        chosen = (*BASE, *overrides, *where, *by, f"stop.steps={workers * steps}")
        ddp = partial(
            torch_ddp.samples_per_s, compose(chosen, None), steps, workers=workers, device=device
        )
        found = alternate(
            {
                "exact": partial(ours, *chosen, "runtime.reduction=deterministic"),
                "native": partial(ours, *chosen, "runtime.reduction=backend"),
                "DDP": lambda ddp=ddp: ddp(port=free_port()),
            },
            TURNS,
        )
        against = [
            cell
            for sums in ("exact", "native")
            for cell in (thousands(found[sums]), ratio(found[sums], found["DDP"]))
        ]
        rows.append([f"{case}, {workers} workers", thousands(found["DDP"]), *against])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ddp")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="two CPU processes, or GPUs"
    )
    device = parser.parse_args().device
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise SystemExit(
            "there is no CUDA device on this machine; without --device the comparison is of two"
            " processes"
        )
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    sizes = range(1, min(gpus, 2) + 1) if device == "cuda" else [torch_ddp.WORKERS]
    rows = [row for workers in sizes for row in compared(device, workers)]
    show(
        f"Samples/s on {device}: torch's DDP, and ashl's all-reduce with sums=exact and"
        " sums=native",
        ["", "DDP", "exact", "/ DDP", "native", "/ DDP"],
        rows,
        f"medians of {TURNS} turns; ratios are taken within a turn: median (quartiles)",
    )


if __name__ == "__main__":
    main()
