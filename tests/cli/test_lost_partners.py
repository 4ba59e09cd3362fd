"""Workers of real gossip that are killed: the others go on, and who comes back takes part again."""

import os
import signal

import pytest

from tests.cli.test_lost_workers import check_return
from tests.disturbed import check_records, ranks_of

MODES = ("sync=ad_psgd", "sync=swarm sync.overlap=false")

IN_ROUNDS = ("d_psgd", "choco", "matcha", "noloco", "relay_sum", "sgp")


def kill(rank: int):
    return lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "mode"),
    [(0, MODES[1]), *(pytest.param(r, m, marks=pytest.mark.slow) for r, m in ((1, MODES[1]), (0, MODES[0])))],
)
def test_gossip_goes_on_without_a_killed_worker(rank: int, mode: str, train, workplace) -> None:
    assert train(kill(rank), "topology=gossip", *mode.split(), "stop.seconds=3") == (0, "")
    summary = check_records(workplace / "run", "finished")
    (lost,) = summary["lost_workers"]
    assert (lost["worker"], lost["why"], lost["back_s"]) == (rank, "was killed by SIGKILL", None)
    assert summary["workers"][1 - rank]["commits"] > summary["workers"][rank]["commits"]
    assert summary["final"]["consensus_distance"] == 0, "the model is that of the one who is left"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_worker_meets_others_again(mode: str, train, workplace) -> None:
    own = ["topology=gossip", "stop.seconds=6", "runtime.respawn=1"]
    assert train(kill(1), *mode.split(), *own) == (0, "")
    check_return(workplace / "run", 1, "was killed by SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "mode"), [(0, "d_psgd"), *((1, mode) for mode in IN_ROUNDS)])
def test_a_killed_worker_is_in_rounds_again(rank: int, mode: str, train, workplace) -> None:
    own = ["topology=gossip", "topology.graph=complete", "cluster.compute=[1,1.5,1]"]
    assert train(kill(rank), *own, f"sync={mode}", "stop.seconds=8", "runtime.respawn=1") == (0, "")
    check_return(workplace / "run", rank, "was killed by SIGKILL")
