"""Declared costs beside what is known of links, of the model and of this machine."""

import pytest

from ashl.config.catalog import catalog, values
from tests.support import planned

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
