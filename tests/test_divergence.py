"""A run that ends with a model of noise has the status `diverged`, on every topology and both
kernels.
"""

import json
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch

import ashl
from ashl.errors import AshlError
from ashl.run.evaluation import Evaluation, find_divergence
from ashl.run.summary import zero_counts
from tests.support import simulated

PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=100 cluster.latency_s=0.001"
TOPOLOGIES = {
    "parameter_server": "topology=parameter_server sync=asp",
    "barrier": "topology=parameter_server sync=bsp",
    "all_reduce": "topology=all_reduce sync=local_sgd",
    "gossip": "topology=gossip sync=d_psgd",
    "pairs": "topology=gossip sync=swarm",
    "partial_all_reduce": "topology=partial_all_reduce sync=ripples_static",
    "sharded_server": f"topology=sharded_server sync=bsp {PORTS}",
    "halos": (
        f"topology=halos sync=async_local_sgd cluster.node=[0,0,1,1] {PORTS} "
        "cluster.intra_node_bandwidth_mbit_s=1000"
    ),
}
EPOCHS = ("tracking=none", "stop.epochs=2")


def status(folder: Path, *overrides: str) -> str:
    with suppress(AshlError):
        ashl.train(*EPOCHS, *overrides, f"run.dir={folder}")
    return json.loads((folder / "summary.json").read_text())["status"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_noise_is_not_finished(topology: str, tmp_path) -> None:
    for lr, expected in (("0.05", "finished"), ("30", "diverged")):
        assert (
            status(
                tmp_path / lr, "runtime=sim", f"optimizer.lr={lr}", *TOPOLOGIES[topology].split()
            )
            == expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_noise_is_not_finished_on_processes(topology: str, tmp_path) -> None:
    costs = (
        "runtime=local cluster.step_s=0.001 cluster.exchange_s=0.001 cluster.compute=[1,1,1,1]"
        " cluster.link=null"
    )
    given = (*costs.split(), *TOPOLOGIES[topology].split(), "optimizer.lr=30")
    assert status(tmp_path / "run", *given) == "diverged"


def test_a_swarm_of_few_bits_does_not_diverge(tmp_path) -> None:
    """Each meeting rounds by at most a quarter of the distance of the models, for any number of
    bits.
    """
    for bits, workers in product((2, 3, 4, 5), (4, 8)):
        ran = simulated(
            "topology=gossip",
            "sync=swarm",
            f"sync.bits={bits}",
            f"cluster.num_workers={workers}",
            "stop.epochs=5",
        )
        assert ran.learner is not None
        assert ran.learner.evaluate(ran.params)["test_accuracy"] > 0.85


def test_each_reason_is_named() -> None:
    ran = simulated("topology=gossip", "sync=d_psgd", "stop.epochs=1")
    learner, good = ran.learner, ran.params
    assert learner is not None
    counts = zero_counts(4)._replace(steps=50, samples=learner.epoch_samples)

    def why(params, *, distance=0.0, loss=0.1, diverged=None):
        found = learner.evaluate(params)
        evaluation = Evaluation(time_s=1.0, merges=1, **found, consensus_distance=distance)
        return find_divergence(
            counts._replace(loss=loss, diverged=diverged), evaluation, params, learner, 4
        )

    assert why(good) is None
    assert why(learner.init_untrained()) is None
    assert why(good, loss=float("nan")) is None
    assert why(good, diverged="as a worker saw") == "as a worker saw"
    assert why(torch.full_like(good, float("nan"))).startswith("the model's loss is nan")
    huge = good.clone()
    huge[0] = 1e20
    assert why(huge).startswith("a parameter of the model is 1e+20")
    assert why(good, distance=1e6).startswith("the workers' models are unrelated")
    assert why(good, loss=1e3).startswith("the workers' training loss is 1e+03")
    noise = torch.randn(good.shape, generator=torch.Generator().manual_seed(0))
    assert why(noise).startswith("the model's training loss is")
    assert learner.train_loss(confident := good * 20) > 2 * learner.train_loss(
        learner.init_untrained()
    )
    assert why(confident) is None, "a model that is right mostly and far too sure has learned"
