"""The summary names a worker whose steps take much longer than those of the others."""

from typing import Any

import pytest
from rich.console import Console

import ashl
from ashl.run.summary import find_straggler
from ashl.tracking.console import outcome


def worker(rank: int, step_s: float, wait_s: float = 0.0, steps: int = 10) -> dict[str, Any]:
    return {"rank": rank, "steps": steps, "compute_s": step_s * steps, "wait_s": wait_s}


def test_the_slowest_of_four_is_named_with_its_slowdown() -> None:
    rows = [worker(0, 1.0, 6), worker(1, 1.1, 5), worker(2, 1.7), worker(3, 0.9, 7)]
    found = find_straggler(rows, 20.0)
    assert found == {
        "worker": 2,
        "slowdown": pytest.approx(1.7),
        "others_wait_share": pytest.approx(0.3),
    }


@pytest.mark.parametrize(
    "rows",
    [
        [worker(0, 1.0), worker(1, 1.19)],
        [worker(0, 1.0)],
        [worker(0, 1.0), worker(1, 5.0, steps=0)],
        [worker(0, 0.0), worker(1, 0.0)],
    ],
)
def test_no_worker_is_named_without_a_difference(rows: list[dict[str, Any]]) -> None:
    assert find_straggler(rows, 20.0) is None


@pytest.mark.parametrize("slow", [1, 3])
def test_a_slow_machine_of_the_cluster_is_named(
    slow: int, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = [1, 1, 1, 1]
    compute[slow] = 3
    run = ashl.train(
        "runtime=sim", "runtime.gradients=false", "sync=bsp", "stop.steps=80",
        f"cluster.compute={compute}", "cluster.step_s=0.1", "cluster.exchange_s=0.01",
        "tracking=none", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    found = run.summary["straggler"]
    assert (found["worker"], found["slowdown"]) == (slow, pytest.approx(3))
    assert 0.5 < found["others_wait_share"] < 0.7
    outcome(Console(width=140), run.summary, tmp_path / "run", {})
    printed = capsys.readouterr().out
    assert f"worker {slow} computes 3 times slower than the median" in printed
