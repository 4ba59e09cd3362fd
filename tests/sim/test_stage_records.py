"""Records of a run's stages: their times, their end conditions, stages that never began, reasons of
dropped steps.
"""

import json
import re
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.tracking.stages import REASONS

FEW = ["runtime=sim", "tracking=none", "model.hidden=[8]", "-q"]


def trained(*args: str, folder: str = "out") -> dict:
    assert main(["train", *FEW, f"run.dir={folder}", *args]) == 0
    return json.loads(Path(folder, "summary.json").read_text())


def test_a_line_per_stage(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    summary = trained("cluster=one_slow", "stop.epochs=20", "schedule.loss_switch=1.5")
    out = capsys.readouterr().out
    assert re.search(r"profile +0 s +\S+ s +0 +6\d\.\d % +everything was measured", out)
    assert re.search(r"ahl +\S+ s +\S+ s +[0-9,]+ +\S+ % +the loss fell to 1.5", out)
    assert re.search(r"shl +\S+ s +\S+ s +[0-9,]+ +\S+ % +the run's epochs were over", out)
    assert "never began" not in out
    assert summary["stages_not_begun"] == []
    profiled, *others = summary["stages"]
    assert profiled["profiling"]
    assert not any(stage["profiling"] for stage in others)
    waited_s = sum(sum(stage["wait_s"]) for stage in summary["stages"])
    assert waited_s == pytest.approx(
        sum(worker["wait_s"] for worker in summary["workers"]), abs=1e-6
    )
    share = float(re.search(r"without profiling (\S+) %", out)[1])
    training_s = summary["time_s"] - profiled["end_s"]
    wait_s = waited_s - sum(profiled["wait_s"])
    assert share == pytest.approx(100 * wait_s / (4 * training_s), abs=0.06)


def test_a_stage_that_never_began(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    summary = trained("cluster=one_slow", "stop.epochs=5", "schedule.loss_switch=0.001")
    assert (
        "stage shl never began: the loss did not fall to 0.001 (best evaluation: "
        in capsys.readouterr().out
    )
    (idle,) = summary["stages_not_begun"]
    assert (idle["name"], idle["until"]) == ("shl", {"evaluated_loss": 0.001})
    trained("cluster=one_slow", "stop.seconds=0.5", folder="other")
    assert "stages ahl, shl never began: the run ended before" in capsys.readouterr().out


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
