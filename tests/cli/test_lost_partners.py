"""Workers of real gossip that are killed: the others go on, and who comes back takes part again."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ashl.tracking import jsonl
from tests.cli.test_lost_workers import check_return
from tests.disturbed import LONG, check_records, ranks_of
from tests.support import planned

MODES = ("sync=ad_psgd", "sync=swarm sync.overlap=false", "sync=hop", "sync=d_admm")

IN_ROUNDS = ("d_psgd", "choco", "matcha", "noloco", "relay_sum", "sgp")


def kill(rank: int):
    return lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL)


@pytest.mark.parametrize(
    ("rank", "mode"),
    [(0, MODES[1]), *(pytest.param(int(m == MODES[1]), m, marks=pytest.mark.slow) for m in MODES)],
)
def test_gossip_goes_on_without_a_killed_worker(rank: int, mode: str, train, workplace) -> None:
    assert train(kill(rank), "topology=gossip", *mode.split(), "stop.seconds=3") == (0, "")
    summary = check_records(workplace / "run", "finished")
    (lost,) = summary["lost_workers"]
    assert (lost["worker"], lost["why"], lost["back_s"]) == (rank, "was killed by SIGKILL", None)
    assert summary["workers"][1 - rank]["commits"] > summary["workers"][rank]["commits"]
    assert summary["final"]["consensus_distance"] == 0, "the model is that of the one who is left"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[:2])
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


@pytest.mark.slow
@pytest.mark.parametrize("border_s", [0.4, 2.0])
@pytest.mark.parametrize("mode", ["d_psgd", "sgp"])
def test_a_killed_worker_is_in_rounds_again_in_either_of_two_stages(
    mode: str, border_s: float, train, workplace: Path
) -> None:
    """It takes about half a second to come back."""
    own = ["topology=gossip", "topology.graph=complete", "cluster.compute=[1,1.5,1]", f"sync={mode}", "stop.seconds=6"]
    plan = planned(*(word for word in LONG if word != "-q"), *own, "runtime=local")
    first = replace(plan.stages[0], until={"seconds": border_s})
    Path("plan.json").write_text(replace(plan, stages=(first, replace(first, name="second", until={}))).to_json())
    assert train(kill(0), *own, "plan=plan.json", "runtime.respawn=1") == (0, "")
    summary = check_return(workplace / "run", 0, "was killed by SIGKILL")
    (lost,), (stage, _) = summary["lost_workers"], summary["stages"]
    rounds = [e for e in jsonl.read(Path("run/events.jsonl")) if e["kind"] == "round" and e["rank"] == 0]
    later = [e["stage"] for e in rounds if e["start_s"] >= lost["back_s"] - 0.01]
    assert later[0] == (lost["back_s"] > stage["end_s"])
    assert later[-1] == 1
