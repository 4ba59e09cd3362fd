"""`ashl.ddp_hook` in plain DDP scripts, beside DDP alone and beside torch's own hooks."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as spawning
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ashl
from ashl.errors import UsageError

STEPS = 40
# codecs whose decoded gradient is far too small or too noisy for 40 steps of plain SGD
SLOW = {"block_coordinate", "fetch_sgd"}
REFUSED = {"laq", "variance", "grid"}
Register = Callable[[DistributedDataParallel], object]


def train(register: Register, steps: int = STEPS) -> tuple[list[float], Tensor]:
    """Train a small model by DDP. Return (losses of this worker, final parameters)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    target = torch.randn(32, 8, generator=torch.Generator().manual_seed(9))
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 32, generator=data)
        loss = nn.functional.cross_entropy(ddp(x), (x @ target).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def register_hook(ddp: DistributedDataParallel, state: Any, hook: Any) -> None:
    ddp.register_comm_hook(state, hook)


def with_codec(name: str, **options: Any) -> Register:
    """Return a function that registers the hook with this codec."""
    return lambda ddp: ddp.register_comm_hook(*ashl.ddp_hook(name, **options))


def equal_on_all(x: Tensor) -> bool:
    """Return True if all workers hold the same bits."""
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return all(torch.equal(row, x) for row in rows)


def work(rank: int, size: int, check: Callable[[], None], meeting: str) -> None:
    """Run a check in a process group of gloo."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    check()
    dist.barrier()
    os._exit(0)  # gloo may abort a process whose objects of DDP are deleted at its end


def on_workers(check: Callable[[], None], tmp_path: Path, size: int = 2) -> None:
    spawning.spawn(work, (size, check, f"file://{tmp_path}/meeting"), nprocs=size)


def check_codecs() -> None:
    """Every codec trains, with the same parameters on all workers."""
    names = sorted(
        path.stem for path in (Path(__file__).parents[1] / "conf/compression").glob("[a-z]*.yaml")
    )
    assert len(names) > 30
    for name in names:
        if name in REFUSED:
            continue
        state, hook = ashl.ddp_hook(name, seed=3)
        losses, params = train(partial(register_hook, state=state, hook=hook))
        assert len(state.buckets) > 1, name
        assert equal_on_all(params), name
        assert torch.isfinite(params).all(), name
        first, last = sum(losses[:10]), sum(losses[-10:])
        assert name in SLOW or last < first, (name, first, last)
        assert name in {"none", "demo"} or 0 < state.density < 1, (name, state.density)


def check_like_torch() -> None:
    """Parameters without compression equal those of DDP; with 16 bits those of torch's hook, nearly.

    Torch's bf16 hook needs NCCL, so bf16 is held against the uncompressed parameters alone.
    """
    _, plain = train(lambda ddp: None)
    _, uncompressed = train(with_codec("none"))
    assert torch.equal(plain, uncompressed)
    _, theirs = train(lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))
    _, ours = train(with_codec("cast", dtype="fp16", error_feedback=False))
    _, bf16 = train(with_codec("cast", dtype="bf16", error_feedback=False))
    rounding = (theirs - plain).norm()
    assert 0 < (ours - theirs).norm() <= 3 * rounding
    assert 0 < (bf16 - plain).norm() < 0.02 * plain.norm()


def check_low_rank() -> None:
    """PowerSGD decodes a gradient of rank 1 exactly, as torch's hook does."""
    shape, rank = (40, 30), dist.get_rank()
    torch.manual_seed(1)
    left, right = torch.randn(40, 1), torch.randn(1, 30)
    found = []
    for register in (
        lambda ddp: ddp.register_comm_hook(
            powerSGD_hook.PowerSGDState(
                None, 1, start_powerSGD_iter=2, min_compression_rate=1, warm_start=True
            ),
            powerSGD_hook.powerSGD_hook,
        ),
        with_codec("power_sgd", rank=1),
    ):
        model = nn.Linear(30, 40, bias=False)
        ddp = DistributedDataParallel(model)
        register(ddp)
        for _ in range(4):
            ddp.zero_grad()
            # Σ weight · gradient: the gradient of worker i is (i + 1) · left · right
            (ddp(torch.eye(30)) * ((rank + 1) * left @ right).T).sum().backward()
        found.append(model.weight.grad.clone())
        assert model.weight.grad.shape == shape
    for gradient in found:
        torch.testing.assert_close(gradient, 1.5 * left @ right, rtol=1e-4, atol=1e-4)


def check_not_finite() -> None:
    """An infinite gradient reaches all workers, and the next steps go on with finite residuals."""
    model = nn.Linear(16, 4)
    ddp = DistributedDataParallel(model)
    state, hook = ashl.ddp_hook("topk", ratio=0.25)
    ddp.register_comm_hook(state, hook)
    for step in range(3):
        ddp.zero_grad()
        factor = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
        (ddp(torch.ones(2, 16)).sum() * factor).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.isfinite(gradient).all() == (step != 1)
        assert equal_on_all(gradient.nan_to_num())


def check_script() -> None:
    check_like_torch()
    check_low_rank()
    check_not_finite()


def test_the_hook_in_a_script(tmp_path: Path) -> None:
    on_workers(check_script, tmp_path)


@pytest.mark.slow
def test_every_codec_of_the_catalogue(tmp_path: Path) -> None:
    on_workers(check_codecs, tmp_path)


@pytest.mark.slow
def test_a_protocol_of_three_workers(tmp_path: Path) -> None:
    on_workers(check_codecs, tmp_path, 3)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no process group"):
        ashl.ddp_hook("topk")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="minibatch only"):
            ashl.ddp_hook("variance")
        with pytest.raises(UsageError, match="ratoi"):
            ashl.ddp_hook("topk", ratoi=0.1)
        with pytest.raises(UsageError, match="topq"):
            ashl.ddp_hook("topq")
    finally:
        dist.destroy_process_group()
