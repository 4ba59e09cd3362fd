"""Declared costs beside what is known of links, of the model and of this machine."""

import re
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.config.catalog import catalog, values
from tests.support import planned


def test_links_that_nobody_has_are_noted() -> None:
    """A declared exchange does not know the model: 5.5 MB in a millisecond are 44 Gbit/s."""
    large = ("sync=bsp", "model.hidden=[18000]", "cluster.exchange_s=0.001")
    assert not planned("sync=bsp").notes
    assert (
        "5.4 MB each way in 1 ms are 43.2 Gbit/s, and few links have more than 10"
        in planned(*large).notes[0]
    )
    by_bandwidth = (
        "cluster.exchange_s=null",
        "cluster.bandwidth_mbit_s=1000",
        "cluster.latency_s=0.001",
    )
    assert not planned(*large, *by_bandwidth).notes
    assert not planned(*large, "cluster.exchange_s=0").notes, "that is declared to be free"


def test_beside_the_declared_step_stands_that_of_this_machine(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "runtime=sim", "sync=bsp", "run.dir=out"]) == 0
    found = re.search(
        r"takes 20 ms as declared, ([\d.e-]+) ms on this machine", capsys.readouterr().out
    )
    assert found is not None
    assert 0 < float(found[1]) < 1000
    assert (
        main(["profile", "runtime=sim", "sync=bsp", "run.dir=timed", "runtime.gradients=false"])
        == 0
    )
    assert "on this machine" not in capsys.readouterr().out


IMAGES_S = {  # of ResNet-50 in training, by GPU, as the heads of the files say
    "a100_v100_10g": [938] * 4 + [367] * 4,
    "h100_a100_a10": [1753] * 2 + [1066] * 2 + [349] * 4,
    "two_regions_100m": [938] * 8,
}


@pytest.mark.parametrize("name", IMAGES_S)
def test_a_cluster_of_gpus_is_as_fast_as_published(name: str) -> None:
    """A step is of 64 images; what a large model takes to cross a border is what the border's
    bandwidth says.
    """
    found, rates = values(catalog()["cluster"][name]), IMAGES_S[name]
    steps = [found["step_s"] * factor for factor in found["compute"]]
    assert steps == pytest.approx([64 / rate for rate in rates], rel=0.005)
    costs = (
        "runtime=sim",
        "sync=bsp",
        "topology=all_reduce",
        f"cluster={name}",
        "model.hidden=[20000]",
        "stop.steps=8",
    )
    plan = planned(*costs)
    ring_s = 2 * 7 / 8 * 32 * plan.num_params / (1e6 * found["bandwidth_mbit_s"])
    cycle_s = plan.stages[0].workers[-1].predicted_cycle_s
    assert cycle_s == pytest.approx(max(steps) + ring_s + found["latency_s"], rel=1e-3)
