"""Gossip and failed workers: refused when a run is planned, and on processes the run ends at once
in one sentence.
"""

import os
import signal
from pathlib import Path

import pytest
import torch

from ashl.cli.app import main
from ashl.config.catalog import catalog
from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan
from ashl.topology.gossip import GossipRule
from tests.conf_option import conf_option
from tests.disturbed import LONG, check_records, ranks_of
from tests.sim.test_churn import with_events
from tests.support import planned, run

MODES = (
    "d_psgd",
    "sgp",
    "choco",
    "matcha",
    "noloco",
    "relay_sum",
    "gossip_pga",
    "hop",
    "d_admm",
    "ad_psgd",
    "swarm",
)
SIM = (
    "runtime=sim",
    "cluster.compute=[1,1,1]",
    "model.hidden=[4]",
    "topology=gossip",
    "topology.graph=complete",
)
FAILS = "{time_s: 1, worker: 1, fail: true}"
FAILURES = {
    "a failure": (f"cluster.events=[{FAILS}]", "cluster.events (fail): stage"),
    "a rejoin": (
        f"cluster.events=[{FAILS}, {{time_s: 2, worker: 1, rejoin: true}}]",
        "cluster.events (",
    ),
    "churn": ("cluster.churn={mtbf_s: 9, mttr_s: 1}", "cluster.churn (churn): stage"),
    "fewest workers": ("runtime.min_workers=2", "runtime.min_workers=2: a run with"),
    "data of the failed": (
        "runtime.on_worker_failure=reshard",
        "runtime.on_worker_failure=reshard: a run with",
    ),
    "restart": ("runtime.max_restarts=1", "runtime.max_restarts=1: a run with"),
}
pytestmark = pytest.mark.timeout(90)


def refusal(*own: str) -> str:
    """The sentence with which a run is refused when it is planned."""
    with pytest.raises(UsageError) as refused:
        compile_plan(compose([*own], None), None, own)
    return str(refused.value)


def check_refusal(name: str, mode: str) -> None:
    override, begin = FAILURES[name]
    where = ("runtime=local",) if override.startswith("runtime.") else ()
    said = refusal(*SIM, *where, f"sync={mode}", override)
    assert said.startswith(begin)
    assert all(
        instead in said
        for instead in ("all_reduce", "parameter_server", "run.checkpoint_s and --resume")
    )
    assert "\n" not in said


def test_these_are_all_modes_of_gossip() -> None:
    assert {
        mode for mode in catalog()["sync"] if isinstance(conf_option("sync", mode), GossipRule)
    } == {*MODES}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_of_gossip_workers_are_refused_when_a_run_is_planned(name: str) -> None:
    for mode in MODES:
        check_refusal(name, mode)


def test_a_failure_of_a_gossip_process_is_refused_too(workplace: Path, capsys) -> None:
    own = ["topology=gossip", "sync=ad_psgd", "cluster.compute=[1,1]", f"cluster.events=[{FAILS}]"]
    assert main(["train", *LONG, *own]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "topology=gossip, which cannot continue without a failed worker" in err


@pytest.mark.parametrize(
    ("mode", "rank"),
    [("d_psgd", 1)]
    + [pytest.param(mode, rank, marks=pytest.mark.slow) for mode in MODES for rank in (0, 1)],
)
def test_a_killed_worker_ends_a_run_of_gossip(mode: str, rank: int, train, workplace: Path) -> None:
    """The others wait for it in the middle of a round, mostly; `train` checks that no process is
    left.
    """
    own = (
        "topology=gossip",
        "topology.graph=complete",
        "cluster.compute=[1,1.5,1]",
        f"sync={mode}",
    )
    code, err = train(lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL), *own)
    assert code == 1
    assert err == f"ashl: worker {rank} was killed by SIGKILL; its log is run/rank{rank}.log\n"
    summary = check_records(workplace / "run", "failed")
    assert summary["time_s"] < 30


@pytest.mark.slow
def test_nobody_joins_a_run_of_gossip(train, capsys) -> None:
    said = list[str]()

    def join(run: Path) -> None:
        assert main(["join", str(run)]) == 2
        said.append(capsys.readouterr().err)
        os.kill(os.getpid(), signal.SIGINT)

    assert train(join, "topology=gossip", "sync=d_psgd", "cluster.compute=[1,1.5,1]")[0] == 130
    assert (
        "a run with topology=gossip sync=d_psgd admits no joining process; start a new run with"
        " run.checkpoint_s"
    ) in said[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_link_that_is_down_for_a_while_is_no_failure(mode: str) -> None:
    """Messages wait for the link, and nothing else happens."""
    own = (*SIM, "cluster=homogeneous", f"sync={mode}", "dataset.batch_size=16", "stop.steps=45")
    down = {"time_s": 0.1, "worker": 1, "link_down": 0.5}
    whole, held_up = run(planned(*own)), run(with_events(planned(*own), down))
    assert held_up.end["reason"] == "steps"
    assert held_up.time_ns > whole.time_ns + 100_000_000 or mode in ("ad_psgd", "swarm")
    assert all(sum(ledger.values()) == held_up.time_ns for ledger in held_up.ledgers)
    if mode not in ("hop", "d_admm", "ad_psgd", "swarm"):
        assert all(torch.equal(held_up.models[rank], model) for rank, model in whole.models.items())
