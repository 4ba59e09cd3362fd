"""Records of a run's stages: their times, their end conditions, and the reasons of dropped
steps.
"""

import json
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.tracking.stages import REASONS

FEW = ["runtime=sim", "tracking=none", "model.hidden=[8]", "-q"]


def trained(*args: str, folder: str = "out") -> dict:
    assert main(["train", *FEW, f"run.dir={folder}", *args]) == 0
    return json.loads(Path(folder, "summary.json").read_text())


def test_waiting_of_stages_adds_up_to_that_of_workers(workplace: Path) -> None:
    summary = trained("cluster=one_slow", "stop.epochs=20", "schedule.loss_switch=1.5")
    assert [stage["profiling"] for stage in summary["stages"]] == [True, False, False]
    waited_s = sum(sum(stage["wait_s"]) for stage in summary["stages"])
    assert waited_s == pytest.approx(
        sum(worker["wait_s"] for worker in summary["workers"]), abs=1e-6
    )


DROPPING = {
    "in flight at the end": ["sync=asp", "stop.epochs=3"],
    "backups": ["sync=backup", "stop.epochs=3"],
    "too stale": ["sync=asp", "aggregate.max_staleness=1", "stop.epochs=3"],
    "a failure": [
        "sync=asp",
        "stop.epochs=3",
        "cluster.events=[{time_s: 0.4, worker: 1, fail: true}]",
    ],
    "a failure in a round": ["topology=all_reduce", "sync=bsp", "stop.epochs=3", "stop.seconds=2"],
    "pairs": ["topology=gossip", "sync=ad_psgd", "topology.graph=complete", "stop.epochs=3"],
    "groups": ["topology=partial_all_reduce", "sync=ripples_smart", "stop.epochs=3"],
    "a budget": ["topology=gossip", "sync=d_psgd", "stop.seconds=1"],
}


@pytest.mark.parametrize("case", DROPPING)
def test_each_dropped_step_has_a_reason(
    case: str, workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    summary = trained("cluster=one_slow", *DROPPING[case])
    out = capsys.readouterr().out
    assert summary["dropped_steps"] > 0 or case not in (
        "in flight at the end",
        "backups",
        "too stale",
    )
    assert ("dropped   " in out) == bool(summary["dropped_steps"])
    assert sum(summary["dropped_for"].values()) == summary["dropped_steps"]
    assert summary["dropped_for"].keys() <= REASONS.keys()
