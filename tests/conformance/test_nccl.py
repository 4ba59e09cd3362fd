"""NCCL: runs on several GPUs end like those by gloo, and payloads between two ranks arrive bit for
bit.
"""

import json
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ashl.config.compose import compose
from ashl.run.train import run
from ashl.runtime.rendezvous import world
from ashl.runtime.transport import PairwiseGroups
from tests.kernels import say, started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LINE = ("runtime=local", "cluster=real", "schedule=single", "model=mlp", "dataset=digits")
SUMS = ("topology=all_reduce", "sync=bsp")
OTHERS = {  # by name: options, and GPUs for two workers
    "server": (("topology=parameter_server", "sync=bsp"), 3),
    "gossip": (("topology=gossip", "sync=d_psgd"), 2),
    "groups": (("topology=partial_all_reduce", "sync=ripples_random", "sync.group_size=2"), 2),
}
SHARED = {  # two ranks on one GPU
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "Ring",
    "NCCL_MAX_CTAS": "1",
}
BODIES = 20


def loss(folder: Path, workers: int, backend: str, chosen: Sequence[str]) -> float:
    where = (f"cluster.num_workers={workers}", "runtime.device=cuda", f"runtime.backend={backend}")
    overrides = [
        *LINE,
        *chosen,
        *where,
        f"stop.steps={workers * 40}",
        "tracking=none",
        f"run.dir={folder}/{backend}",
    ]
    assert run(compose(overrides, None), overrides, quiet=True).code == 0
    return json.loads((folder / backend / "summary.json").read_text())["final"]["test_loss"]


@pytest.mark.parametrize("workers", [1, 2])
def test_sums_end_as_those_of_gloo(workers: int, tmp_path: Path) -> None:
    if workers > torch.cuda.device_count():
        pytest.skip("each rank needs a GPU of its own")
    by_gloo = loss(tmp_path, workers, "gloo", SUMS)
    assert loss(tmp_path, workers, "nccl", SUMS) == pytest.approx(by_gloo, rel=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_topologies_end_as_by_gloo(name: str, tmp_path: Path) -> None:
    chosen, gpus = OTHERS[name]
    if gpus > torch.cuda.device_count():
        pytest.skip(f"it needs {gpus} GPUs")
    by_gloo = loss(tmp_path, 2, "gloo", chosen)
    assert loss(tmp_path, 2, "nccl", chosen) == pytest.approx(by_gloo, rel=1e-3)


def echo(end: Connection, port: int, rank: int, ranks: int) -> None:
    os.environ.update(SHARED, NCCL_HOSTID=f"ashl-{rank}")
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    carrier = PairwiseGroups({1 - rank: (world(), 1 - rank)}, "cuda:0")

    def echoed() -> tuple[bool, None, dict[str, float]]:
        same = True
        for size in range(1, BODIES + 1):
            body = (torch.arange(size * 1000, device="cuda") % 251).to(torch.uint8)
            came = torch.empty_like(body)
            if rank == 0:
                carrier.send(1, body)
                carrier.recv(1, came)
            else:
                carrier.recv(0, came)
                carrier.send(0, came)
            same = same and torch.equal(came, body)
        return same, None, {}

    say(end, store, rank, ranks, echoed)


def test_bodies_between_two_ranks_on_one_gpu() -> None:
    ended = started(echo, 2, 60)
    assert [one.error for one in ended] == [None, None]
    assert [one.result for one in ended] == [True, True]
