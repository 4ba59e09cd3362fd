"""Sums of compressed updates on three gloo processes, each by its own way: the simulator's
parameters, bit for bit.
"""

import pytest

from tests.conformance.test_kernels import adds_up, real
from tests.support import simulated

QUICK = (
    "cluster.compute=[1,1,2]",
    "cluster.link=null",
    "cluster.step_s=0.004",
    "cluster.exchange_s=0.004",
    "stop.steps=24",
    "model.hidden=[16]",
    "optimizer.momentum=0",
    "topology=all_reduce",
    "sync=bsp",
)
WAYS = [  # summed on the way, gathered, and protocols of their own
    ["compression=random_mask"],
    ["compression=threshold"],  # payloads of many lengths
    ["compression=power_sgd"],
    ["compression=gtopk"],
    ["compression=sketch_sgd"],
    pytest.param(["compression=fetch_sgd"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].partition("=")[2])
def test_processes_come_to_the_simulators_parameters(way, tmp_path):
    summary, sim = real(tmp_path / "run", *QUICK, *way), simulated(*QUICK, *way)
    assert summary["params_sha256"] == sim.sha256
    assert summary["steps"] == sim.end["steps"] == 24
    assert (
        summary["bytes_up"]
        == summary["bytes_down"]
        == sum(r["bytes_up"] for r in sim.of("TimeTotals"))
    )
    assert adds_up(summary)


@pytest.mark.parametrize(
    "codec",
    [
        "topk",
        pytest.param("random_mask", marks=pytest.mark.slow),
    ],  # gathered, and summed on their way
)
def test_messages_that_are_compressed_during_the_backward_pass(codec, tmp_path):
    """Two unequal processes, with residuals and the optimizer's momentum, equal virtual time.

    Selection takes its declared time, and that time counts as compressing.
    """
    quick = (
        "cluster.compute=[1,2]",
        "cluster.compress_s=0.002",
        "optimizer.momentum=0.9",
        "model.hidden=[16,16]",
    )
    asked = (*QUICK, *quick, f"compression={codec}", "overlap=layerwise")
    summary, sim = real(tmp_path / "run", *asked), simulated(*asked)
    assert summary["params_sha256"] == sim.sha256
    assert (
        summary["bytes_up"]
        == summary["bytes_down"]
        == sum(r["bytes_up"] for r in sim.of("TimeTotals"))
    )
    assert adds_up(summary)
    for worker, virtual in zip(summary["workers"], sim.ledgers, strict=True):
        assert virtual["compress"] == 12 * 2_000_000
        assert worker["compress_s"] >= 12 * 0.002
        assert worker["compute_s"] >= virtual["compute"] / 1e9
