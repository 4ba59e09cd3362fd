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
PLAN = "sync=local_sgd sync.local_steps=plan schedule.h_preset=[1] planner.h_max=1"
LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=100 cluster.latency_s=0.0005"
THREE = (
    f"{LINKS} cluster.num_workers=3 cluster.node=[0,0,1] cluster.intra_node_bandwidth_mbit_s=1000"
)
LIMITS = {  # (the method at its limit, what it is there)
    "DiLoCo": (f"{LOCAL} outer=nesterov outer.lr=1 outer.momentum=0", LOCAL),
    "SlowMo": (f"{LOCAL} {RING} outer=slowmo outer.alpha=1 outer.beta=0", f"{LOCAL} {RING}"),
    "HALoS": (
        f"topology=halos topology.regions=[0,0] {LOCAL} outer=nesterov",
        f"{LOCAL} outer=nesterov",
    ),
    "hierarchical": (
        f"sync=bsp {RING} {THREE} topology.algorithm=hierarchical",
        f"sync=bsp {RING} {THREE}",
    ),
    "growing by sums": (
        f"sync=cr_psgd sync.growth=1 aggregate=samples {RING}",
        "sync=bsp aggregate=samples",
    ),
    "rarer by sums": (f"sync=qsr sync.local_steps=4 sync.h_max=4 {RING}", f"{LOCAL} {RING}"),
    "adapted by sums": (
        f"sync=adacomm sync.local_steps=4 sync.every_s=1e6 {RING}",
        f"{LOCAL} {RING}",
    ),
    "growing": ("sync=cr_psgd sync.growth=1 aggregate=samples", "sync=bsp aggregate=samples"),
    "streaming": (
        (
            f"{LOCAL} {RING} outer=nesterov overlap=streaming overlap.fragments=1 overlap.delay=0"
            " overlap.alpha=0"
        ),
        f"{LOCAL} {RING} outer=nesterov",
    ),
    "decoupled": (
        "sync=decoupled sync.local_steps=4 sync.min_learners=2 sync.grace_s=5 outer=nesterov",
        f"{LOCAL} outer=nesterov",
    ),
    "EF21": (
        "sync=bsp compression=ef21 compression.ratio=1 optimizer.momentum=0",
        "sync=bsp optimizer.momentum=0",
    ),
    "servers": (f"sync=bsp topology=sharded_server {LINKS}", f"sync=bsp {LINKS}"),
    "goodput": (f"{PLAN} planner=goodput", f"{PLAN} planner=online"),
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


@pytest.mark.slow
def test_averaged_momentum_of_one_step_is_bsp_on_processes_to_rounding(tmp_path: Path) -> None:
    """The optimizer steps before the average instead of after it: not to the bit, but the
    simulator's bits.
    """
    own = ("sync=pr_sgd_momentum", "sync.local_steps=1", RING)
    summary, sim = real(tmp_path / "run", *TWO, MOVING, *own), simulated(*TWO, MOVING, *own)
    assert summary["params_sha256"] == sim.sha256
    bsp = simulated(*TWO, MOVING, "sync=bsp", RING)
    assert float((sim.params - bsp.params).abs().max()) < 1e-5
