"""Runs on a CUDA device: the same clock and bytes as on the host, the same bits twice, and similar
losses.
"""

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.errors import UsageError
from ashl.learn.graphs import OFTEN
from ashl.learn.learner import Learner
from tests.conf_option import conf_option
from tests.support import planned, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

TASK = (
    "model=mlp",
    "dataset=digits",
    "stop.steps=240",
    "eval.every_commits=1000000",
    "cluster.compute=[1,1,2,3]",
)
RUNS = {
    "bsp": ("sync=bsp",),
    "ssp, Top-K both ways": (
        "sync=ssp",
        "compression=topk",
        "compression.ratio=0.1",
        "topology.pull_ratio=0.1",
    ),
    "local steps": ("sync=local_sgd", "sync.local_steps=8", "outer=nesterov"),
    "all-reduce, QSGD": ("topology=all_reduce", "sync=bsp", "compression=qsgd"),
    "gossip": ("topology=gossip", "sync=d_psgd", "topology.graph=ring"),
    "convolutions": (
        "model=resnet8",
        "dataset=synthetic",
        "dataset.num_train=256",
        "stop.steps=24",
        "sync=bsp",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device(name: str) -> None:
    plan = planned(*TASK, *RUNS[name])
    expected, found, again = run(plan), run(plan, device="cuda"), run(plan, device="cuda")
    assert found.time_ns == expected.time_ns
    assert (
        found.sha256 == again.sha256 or name == "convolutions"
    )  # its backward pass adds in no fixed order
    losses = [ran.learner.evaluate(ran.params)["test_loss"] for ran in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_memory_does_not_grow() -> None:
    plan = planned(*TASK, "sync=ssp", "stop.steps=400")
    run(plan, device="cuda")
    before = torch.cuda.memory_allocated()
    run(plan, device="cuda")
    assert torch.cuda.memory_allocated() <= before + 2**20


def twenty_steps(model: str, graphs: bool) -> Tensor:
    """The parameters after twenty steps of plain SGD."""
    data = conf_option("dataset", "synthetic", num_train=256, num_test=10).load()
    args = (conf_option("model", model), data, conf_option("task", "classification"))
    learner = Learner(*args, seed=0, device="cuda", graphs=graphs)
    params = learner.init()
    for step in range(20):
        batch = np.random.default_rng(step).integers(0, 256, 31 if step == 15 else 32)
        params = params - 0.01 * learner.gradient(params, batch, step % 4, step)[1]
    return params.cpu()


@pytest.mark.parametrize("model", ["mlp", "lenet", "resnet8"])
def test_a_step_by_a_graph_is_the_step(model: str) -> None:
    eager, graphed = twenty_steps(model, graphs=False), twenty_steps(model, graphs=True)
    torch.testing.assert_close(graphed, eager, rtol=1e-4, atol=1e-6 if model == "mlp" else 1e-4)


def test_steps_by_graphs_have_the_same_bits_twice() -> None:
    hashes = {
        hashlib.sha256(twenty_steps("mlp", graphs=True).numpy().tobytes()).hexdigest()
        for _ in range(2)
    }
    assert len(hashes) == 1


def test_a_model_whose_path_hangs_on_its_numbers_is_refused() -> None:
    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3072, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(1) * (2.0 if float(x.sum()) > 0 else 1.0))

    class Option:
        def build(self, sample_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
            return Looks()

    data = conf_option("dataset", "synthetic", num_train=64, num_test=10).load()
    learner = Learner(
        Option(), data, conf_option("task", "classification"), seed=0, device="cuda", graphs=True
    )
    for step in range(OFTEN - 1):
        learner.gradient(learner.init(), np.arange(32), 0, step)
    with pytest.raises(UsageError, match="cannot be captured"):
        learner.gradient(learner.init(), np.arange(32), 0, OFTEN)
