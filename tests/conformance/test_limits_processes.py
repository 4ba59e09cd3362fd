"""Methods at their limits on processes: the parameters that the simulator gives the method they
become.
"""

from pathlib import Path

import pytest

from tests.conformance.test_kernels import QUICK, adds_up, real
from tests.support import simulated

TWO = (
    *QUICK[:2],
    "model.hidden=[16]",
    "cluster=homogeneous",
    "cluster.num_workers=2",
    "stop.steps=48",
)
MOVING = "optimizer.momentum=0.9"
LOCAL = "sync=local_sgd sync.local_steps=4"
RING = "topology=all_reduce"
LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=100 cluster.latency_s=0.0005"
THREE = (
    f"{LINKS} cluster.num_workers=3 cluster.node=[0,0,1] cluster.intra_node_bandwidth_mbit_s=1000"
)
LIMITS = {  # (the method at its limit, what it is there); other methods are rows of the golden set
    "HALoS": (
        f"topology=halos topology.regions=[0,0] {LOCAL} outer=nesterov",
        f"{LOCAL} outer=nesterov",
    ),
    "hierarchical": (
        f"sync=bsp {RING} {THREE} topology.algorithm=hierarchical",
        f"sync=bsp {RING} {THREE}",
    ),
    "adapted by sums": (
        f"sync=adacomm sync.local_steps=4 sync.every_s=1e6 {RING}",
        f"{LOCAL} {RING}",
    ),
    "decoupled": (
        "sync=decoupled sync.local_steps=4 sync.min_learners=2 sync.grace_s=5 outer=nesterov",
        f"{LOCAL} outer=nesterov",
    ),
    "EF21": (
        "sync=bsp compression=ef21 compression.ratio=1 optimizer.momentum=0",
        "sync=bsp optimizer.momentum=0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_method_at_its_limit_is_the_other_bit_for_bit(name: str, tmp_path: Path) -> None:
    own, other = (limit.split() for limit in LIMITS[name])
    summary, sim = real(tmp_path / "run", *TWO, MOVING, *own), simulated(*TWO, MOVING, *other)
    assert summary["params_sha256"] == sim.sha256
    assert (summary["steps"], summary["status"]) == (48, "finished")
    assert adds_up(summary)
    assert simulated(*TWO, MOVING, *own).sha256 == sim.sha256
