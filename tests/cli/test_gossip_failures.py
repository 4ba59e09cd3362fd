"""Workers of gossip that fail and rejoin: in virtual time by mode, and on processes.

Graphs of one size alone are refused when a run is planned.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from ashl.config.catalog import catalog
from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan
from ashl.topology.gossip import GossipRule
from tests.conf_option import conf_option
from tests.disturbed import check_records, ranks_of
from tests.sim.test_churn import back, lost, with_events
from tests.support import planned, run

ROUNDS = ("d_psgd", "sgp", "choco", "matcha", "noloco", "relay_sum", "gossip_pga")
ROAMING = ("hop", "d_admm", "ad_psgd", "swarm")
MODES = (*ROUNDS, *ROAMING)
SIM = (
    "runtime=sim",
    "cluster.compute=[1,1,1]",
    "model.hidden=[4]",
    "topology=gossip",
    "topology.graph=complete",
)
FAILS = "{time_s: 1, worker: 1, fail: true}"
FAILURES = {
    "a failure": (
        f"cluster.events=[{FAILS}]",
        "cluster.events (fail): not supported in stage d_psgd, the graph of",
    ),
    "a rejoin": (
        f"cluster.events=[{FAILS}, {{time_s: 2, worker: 1, rejoin: true}}]",
        "cluster.events (",
    ),
    "churn": (
        "cluster.churn={mtbf_s: 9, mttr_s: 1}",
        "cluster.churn (churn): not supported in stage d_psgd, the graph of",
    ),
    "fewest workers": ("runtime.min_workers=2", "runtime.min_workers=2: a run with"),
    "data of the failed": (
        "runtime.on_worker_failure=reshard",
        "runtime.on_worker_failure=reshard: a run with",
    ),
    "restart": ("runtime.max_restarts=1", "runtime.max_restarts=1: a run with"),
}
pytestmark = pytest.mark.timeout(90)


def test_these_are_all_modes_of_gossip() -> None:
    assert {
        mode for mode in catalog()["sync"] if isinstance(conf_option("sync", mode), GossipRule)
    } == {*MODES}


@pytest.mark.parametrize("name", FAILURES)
def test_a_graph_of_one_size_is_refused_with_failures(name: str) -> None:
    override, begin = FAILURES[name]
    where = ("runtime=local",) if override.startswith("runtime.") else ()
    graph = ("topology.graph=random_regular", "topology.degree=2")
    own = (*SIM, *where, *graph, "sync=d_psgd", override)
    with pytest.raises(UsageError) as refused:
        compile_plan(compose([*own], None), None, own)
    assert str(refused.value).startswith(begin)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("mode", MODES)
def test_failures_and_rejoins_in_every_mode(mode: str) -> None:
    """All graphs, with one worker remaining for a while; every step is in the counts."""
    twice = (lost(1, 0.512), back(1, 0.52), lost(0, 0.9), lost(2, 0.95), lost(3, 0.96))
    for graph in ("ring", "complete", "exponential"):
        if mode in ("ad_psgd", "choco") and graph == "complete":
            continue
        own = ("cluster=homogeneous", "cluster.compute=[1,2,4,1]", "sync.local_steps=1")
        kind = (f"sync={mode}", f"topology.graph={graph}", "dataset.batch_size=16")
        plan = planned(*SIM, *own, *kind, "stop.steps=120", "runtime.gradients=false")
        for events in ((lost(0, 0.51),), (lost(0, 0.51), back(0, 0.93)), (*twice, back(0, 1.2))):
            ran = run(with_events(plan, *events))
            assert ran.end["reason"] == "steps"
            assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 120
            assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
            for rank in (1, 3) if mode in ROUNDS and len(events) < 3 else ():
                own_rounds = [r for r in ran.of("Round") if r["rank"] == rank]
                assert ran.end["commits"][rank] == len(own_rounds) <= ran.end["merges"]


@pytest.mark.parametrize(
    ("mode", "rank"),
    [("d_psgd", 1)]
    + [pytest.param(mode, rank, marks=pytest.mark.slow) for mode in MODES for rank in (0, 1)],
)
def test_the_survivors_of_a_killed_worker_continue(
    mode: str, rank: int, train, workplace: Path
) -> None:
    """They leave the round in which they wait for it, mostly."""
    own = (
        "topology=gossip",
        "topology.graph=complete",
        "cluster.compute=[1,1.5,1]",
        f"sync={mode}",
        "stop.seconds=3",
    )
    code, err = train(lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL), *own)
    assert (code, err) == (0, "")
    summary = check_records(workplace / "run", "finished")
    assert [of["worker"] for of in summary["failed_workers"]] == [rank]
    commits = [worker["commits"] for worker in summary["workers"]]
    assert min(commits[:rank] + commits[rank + 1 :]) > commits[rank]


@pytest.mark.parametrize("mode", MODES)
def test_a_link_that_is_down_for_a_while_is_no_failure(mode: str) -> None:
    """Messages wait for the link, and nothing else happens."""
    own = (*SIM, "cluster=homogeneous", f"sync={mode}", "dataset.batch_size=16", "stop.steps=45")
    down = {"time_s": 0.1, "worker": 1, "link_down": 0.5}
    whole, held_up = run(planned(*own)), run(with_events(planned(*own), down))
    assert held_up.end["reason"] == "steps"
    assert held_up.time_ns > whole.time_ns + 100_000_000 or mode in ("ad_psgd", "swarm")
    assert all(sum(ledger.values()) == held_up.time_ns for ledger in held_up.ledgers)
    if mode not in ROAMING:
        assert all(torch.equal(held_up.models[rank], model) for rank, model in whole.models.items())
