"""Runs on a CUDA device: the same clock and bytes as on the host, the same bits twice, and losses that are alike."""

import pytest
import torch

from tests.support import planned, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

TASK = ("model=mlp", "dataset=digits", "stop.steps=240", "eval.every_commits=1000000", "cluster.compute=[1,1,2,3]")
RUNS = {
    "bsp": ("sync=bsp",),
    "ssp, Top-K both ways": ("sync=ssp", "compression=topk", "compression.ratio=0.1", "topology.pull_ratio=0.1"),
    "local steps": ("sync=local_sgd", "sync.local_steps=8", "outer=nesterov"),
    "all-reduce, QSGD": ("topology=all_reduce", "sync=bsp", "compression=qsgd"),
    "gossip": ("topology=gossip", "sync=d_psgd", "topology.graph=ring"),
    "convolutions": ("model=resnet8", "dataset=synthetic", "dataset.num_train=256", "stop.steps=24", "sync=bsp"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device(name: str) -> None:
    plan = planned(*TASK, *RUNS[name])
    expected, found, again = run(plan), run(plan, device="cuda"), run(plan, device="cuda")
    assert found.time_ns == expected.time_ns
    assert found.sha256 == again.sha256 or name == "convolutions"  # whose backward pass adds in no fixed order
    losses = [ran.learner.evaluate(ran.params)["test_loss"] for ran in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_memory_does_not_grow() -> None:
    plan = planned(*TASK, "sync=ssp", "stop.steps=400")
    run(plan, device="cuda")
    before = torch.cuda.memory_allocated()
    run(plan, device="cuda")
    assert torch.cuda.memory_allocated() <= before + 2**20
