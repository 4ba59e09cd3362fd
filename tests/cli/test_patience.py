"""`stop.patience`: a run that finds no new best for so many evaluations ends, on every topology and
both kernels.
"""

import pytest

from ashl.cli.app import main
from ashl.tracking import jsonl
from ashl.tracking.stages import explain_end

STALLED = [
    "-q",
    "tracking=none",
    "optimizer.lr=1e-9",
    "stop.epochs=50",
    "stop.patience=2",
    "eval.every_commits=8",
]
TOPOLOGIES = [
    "sync=bsp",
    "sync=asp",
    "sync=bsp topology=all_reduce",
    "sync=d_psgd topology=gossip",
    "sync=ad_psgd topology=gossip",
    "sync=ripples_random topology=partial_all_reduce",
    (
        "sync=asp topology=sharded_server cluster.exchange_s=null cluster.bandwidth_mbit_s=50"
        " cluster.latency_s=0.001"
    ),
]


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"runtime=sim {text}" for text in TOPOLOGIES),
        pytest.param("cluster.compute=[1,1]", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_learns_nothing_ends_by_patience(overrides: str, workplace) -> None:
    assert main(["train", *STALLED, *overrides.split(), "run.dir=run"]) == 0
    summary = jsonl.read_json(workplace / "run" / "summary.json")
    assert (summary["status"], summary["exit_reason"]) == ("finished", "patience")
    assert (
        explain_end(summary["stages"][-1]) == "there was no new best for stop.patience evaluations"
    )
    rows = list(jsonl.read(workplace / "run" / "metrics.jsonl"))
    best = max(range(len(rows)), key=lambda i: (rows[i]["test/acc"], -rows[i]["test/loss"]))
    assert len(rows) - 1 - best >= 2


@pytest.mark.parametrize(
    ("until", "text"),
    [
        ({"rises": 1}, "the training loss rose in 1 evaluation"),
        ({"rises": 2}, "the training loss rose in 2 evaluations"),
        ({"epochs": 1.0}, "its 1 epoch was over"),
        ({"commits": 0.5}, "its 0.5 commits per worker were over"),
    ],
)
def test_the_end_of_a_stage_is_in_the_singular_for_one(until: dict[str, float], text: str) -> None:
    assert explain_end({"exit_reason": next(iter(until)), "until": until}) == text


def test_without_a_gradient_there_is_nothing_to_wait_for(workplace, capsys) -> None:
    assert (
        main(
            ["train", "-q", "runtime=sim", "runtime.gradients=false", "sync=bsp", "stop.patience=2"]
        )
        == 2
    )
    assert "remove stop.patience" in capsys.readouterr().err
