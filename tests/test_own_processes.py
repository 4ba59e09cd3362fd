"""Models as users write them on real processes: one worker is plain torch; two are
DistributedDataParallel over gloo.

Its buffers are not broadcast, since each worker of ashl has its own.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as spawning
from own_models import MODELS, Blobs
from test_own_models import (
    DECAY,
    MOMENTUM,
    RATE,
    STEPS,
    assert_same,
    chosen,
    made,
    options,
    plain_torch,
)
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ashl
from ashl.config.compose import compose
from ashl.data.batches import Batches
from ashl.data.rng import Purpose, torch_seed
from ashl.learn.device import HOST, seeded
from ashl.learn.module_state import beside, mean_of, put_all
from ashl.learn.trainer import Trainer
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import assemble
from ashl.run.monitor import FINAL

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm|spectral_norm:FutureWarning")


@pytest.fixture(autouse=True)
def _options(workplace: Path) -> None:
    options()


def trained(kind: type[nn.Module], workers: int) -> tuple[dict, list[Batches]]:
    """The last weights of a run on processes, and the batches of its workers."""
    ran = ashl.train(*chosen(kind, workers, "runtime=local"), config_dir="options")
    plan = compile_plan(compose(["runtime=sim", *chosen(kind, workers)], Path("options")))
    trainer = assemble(plan, HOST).stages[0].trainer
    assert isinstance(trainer, Trainer)
    return torch.load(ran.folder / FINAL), trainer.batches


def one_of_two(
    rank: int, port: int, kind: type[nn.Module], indices: list[list], folder: str
) -> None:
    """A process of a script that a user of DistributedDataParallel would write."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(indices)
    )
    train, module = Blobs(True), made(kind)
    parallel = DistributedDataParallel(module, broadcast_buffers=False, find_unused_parameters=True)
    learned = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, RATE, MOMENTUM, weight_decay=DECAY)
    held = [part for part in module.modules() if not part.training]
    parallel.train()
    for part in held:
        part.training = False
    for step in range(STEPS):
        x, y = train.x[indices[rank][step]], train.y[indices[rank][step]]
        with seeded(torch_seed(3, Purpose.MODEL, rank, step), HOST):
            functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"state": beside(module), "learned": learned}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process that returns


def distributed_torch(kind: type[nn.Module], batches: list[Batches], folder: Path) -> nn.Module:
    """Train with DistributedDataParallel on these batches; buffers that forward changes are
    averaged at the end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    indices = [[own.indices(step) for step in range(STEPS)] for own in batches]
    spawning.spawn(one_of_two, (port, kind, indices, str(folder)), nprocs=len(batches))
    ends = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(len(batches))]
    module = made(kind)
    with torch.no_grad():
        for p, value in zip(
            (p for p in module.parameters() if p.requires_grad), ends[0]["learned"], strict=True
        ):
            p.copy_(value)
        put_all(module, mean_of([end["state"] for end in ends]))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_process_learns_what_plain_torch_learns(kind: type[nn.Module]) -> None:
    found, batches = trained(kind, 1)
    assert_same(found, plain_torch(kind, batches), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_two_processes_learn_what_distributed_data_parallel_learns(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    found, batches = trained(kind, 2)
    assert_same(found, distributed_torch(kind, batches, tmp_path), kind)
