"""A plain program for torch's DistributedDataParallel: samples a second, over gloo on CPUs and NCCL
on GPUs.
"""

import json
import multiprocessing as mp
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ashl.config.construct import construct

WORKERS, WARM_UP = 2, 20


def samples_per_s(
    config: dict, steps: int, port: int, workers: int = WORKERS, device: str = "cpu"
) -> float:
    """Train the model of a composed configuration for `steps` per worker, after a warm-up; start-up
    does not count.
    """
    context = mp.get_context("forkserver")
    answers = context.SimpleQueue()
    args = (port, config, steps, answers, workers, device)
    ranks = [context.Process(target=rank_main, args=(r, *args)) for r in range(workers)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks), "a rank of DDP failed"
    return answers.get()


def rank_main(
    rank: int,
    port: int,
    config: dict,
    steps: int,
    answers: "mp.SimpleQueue",
    workers: int,
    device: str,
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers
    )
    rate = trained(config, steps, device=device)
    if rank == 0:
        answers.put(rate)


def trained(config: dict, steps: int, cap_mb: float | None = None, device: str = "cpu") -> float:
    """Samples a second of all ranks of the process group, which ends; buckets of so many MiB, or
    torch's default.
    """
    torch.set_num_threads(1)
    rank, workers = dist.get_rank(), dist.get_world_size()
    dataset, sgd = construct(config["dataset"], "dataset"), config["optimizer"]
    data = dataset.load()
    torch.manual_seed(config["seed"])
    module = (
        construct(config["model"], "model").build(data.sample_shape, data.num_classes).to(device)
    )
    images = any(isinstance(layer, torch.nn.Conv2d) for layer in module.modules())
    if images:
        module = module.to(memory_format=torch.channels_last)
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # broadcast_buffers has another name in the newest torch only
    model = DistributedDataParallel(
        module,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        static_graph=True,
        bucket_cap_mb=cap_mb,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), sgd["lr"], sgd["momentum"], weight_decay=sgd["weight_decay"], fused=True
    )
    inputs, targets = (
        data.train.inputs[rank::workers].to(device),
        data.train.targets[rank::workers].to(device),
    )
    if images:
        inputs = inputs.contiguous(memory_format=torch.channels_last)

    def train(steps: int) -> None:
        order = iter(())
        for _ in range(steps):
            batch = next(order, None)
            if batch is None:
                order = epoch(len(targets), dataset.batch_size)
                batch = next(order)
            batch = batch.to(device)
            loss = functional.cross_entropy(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train(WARM_UP)
    dist.barrier()
    start = time.perf_counter()
    train(steps)
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    rate = workers * steps * dataset.batch_size / (time.perf_counter() - start)
    dist.destroy_process_group()
    return rate


def epoch(samples: int, batch: int) -> "iter[Tensor]":
    """The full batches of one pass, in random order."""
    return iter(torch.randperm(samples)[: samples // batch * batch].split(batch))


if __name__ == "__main__":
    path, steps, cap_mb = sys.argv[1:]
    dist.init_process_group("gloo")
    print(
        trained(json.loads(Path(path).read_text()), int(steps), float(cap_mb) or None), flush=True
    )
    os._exit(0)  # gloo's threads may abort a process that leaves in order
