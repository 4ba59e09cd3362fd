"""Sync modes whose rounds change, by all-reduce: what they are at a server, and their limits, bit
for bit.
"""

import pytest

from tests.support import Ran, simulated

BASE = (
    "cluster=homogeneous",
    "optimizer.lr=0.05",
    "optimizer.momentum=0.9",
    "stop.epochs=2.5",
    "model.hidden=[16]",
)
RING = "topology=all_reduce"
UNEQUAL = "cluster.compute=[1,2,1,3]"
DECAY = "optimizer.schedule=cosine"
RULES = {
    "qsr": f"sync=qsr sync.local_steps=2 sync.alpha=0.1 {DECAY}",
    "qsr-planned": (
        f"sync=qsr sync.local_steps=plan schedule.h_preset=[2] sync.alpha=0.1 {DECAY} {UNEQUAL}"
    ),
    "cr_psgd": "sync=cr_psgd sync.growth=1.3 aggregate=samples",
    "cr_psgd_catalyst": "sync=cr_psgd_catalyst sync.growth=1.3 sync.budget=900 aggregate=samples",
    "lb_bsp": f"sync=lb_bsp {UNEQUAL}",
    "lb_bsp-jitter": f"sync=lb_bsp sync.alpha=0.5 {UNEQUAL} cluster.jitter=0.2 aggregate=samples",
    "adacomm": "sync=adacomm sync.local_steps=4 sync.every_s=1e6",
}


def run(*overrides: str) -> Ran:
    return simulated(*BASE, *(part for override in overrides for part in override.split()))


@pytest.mark.parametrize("name", RULES)
def test_by_all_reduce_it_learns_what_it_does_at_a_server(name: str) -> None:
    server, ring = run(RULES[name]), run(RULES[name], RING)
    assert ring.sha256 == server.sha256
    assert [ring.end[key] for key in ("steps_by", "commits")] == [
        server.end[key] for key in ("steps_by", "commits")
    ]
    assert [r["samples"] for r, _ in ring.snapshots][-1:] == [
        r["samples"] for r, _ in server.snapshots
    ][-1:]


def test_adacomm_adapts_to_the_loss_a_round_after_the_lead_rank_says_so() -> None:
    ran = run("sync=adacomm sync.local_steps=8 sync.every_s=0.05", RING)
    steps = [record["steps"] for record in ran.of("Round") if record["rank"] == 0]
    assert steps[0] == 8
    assert min(steps) < 4
    assert steps[:-1] == sorted(steps[:-1], reverse=True)


def test_the_sum_of_step_times_costs_its_latency() -> None:
    links = "cluster.exchange_s=null cluster.bandwidth_mbit_s=100 cluster.latency_s=0.001"
    balanced, plain = run("sync=lb_bsp", RING, links), run("sync=bsp", RING, links)
    assert balanced.time_ns - plain.time_ns == balanced.end["merges"] * 2 * 3 * 1_000_000


@pytest.mark.parametrize("name", ["qsr", "qsr-planned", "cr_psgd", "lb_bsp"])
def test_a_run_that_is_only_timed_has_the_same_rounds(name: str) -> None:
    """H follows the learning rate, which a run without gradients has, too."""
    ran, timed = (run(RULES[name], RING, f"runtime.gradients={on}") for on in ("true", "false"))
    assert timed.time_ns == ran.time_ns
    assert timed.end["steps_by"] == ran.end["steps_by"]


@pytest.mark.parametrize("name", ["qsr", "cr_psgd", "lb_bsp", "adacomm"])
def test_it_continues_without_a_worker_and_with_a_rejoining_one(name: str) -> None:
    fails = "cluster.events=[{time_s:0.5,worker:2,fail:true},{time_s:2,worker:2,rejoin:true}]"
    ran = run(RULES[name], RING, fails)
    assert ran.end["reason"] == "epochs"
    assert ran.end["commits"][2] < ran.end["commits"][0]


@pytest.mark.parametrize("overlap", ["wfbp", "merged overlap.plan=bytes"])
@pytest.mark.parametrize("name", ["cr_psgd", "lb_bsp"])
def test_a_gradient_in_parts_is_the_same(name: str, overlap: str) -> None:
    assert run(RULES[name], RING, f"overlap={overlap}").sha256 == run(RULES[name], RING).sha256
