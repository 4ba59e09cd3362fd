"""A worker whose steps take much longer than those of the others is named: in the summary, in the
report, and once while the run is going on.
"""

from typing import Any

import pytest
from rich.console import Console

import ashl
from ashl.report.compare import write_report
from ashl.report.leaderboard import rank
from ashl.report.records import read_study
from ashl.tracking.console import print_outcome
from ashl.tracking.straggler import StragglerFinder, find_straggler


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
        "runtime=sim", "sync=bsp", "stop.steps=80", "model.hidden=[4]",
        f"cluster.compute={compute}", "cluster.step_s=0.1", "cluster.exchange_s=0.01",
        "tracking=none", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    found = run.summary["straggler"]
    assert (found["worker"], found["slowdown"]) == (slow, pytest.approx(3))
    assert 0.5 < found["others_wait_share"] < 0.7
    print_outcome(Console(width=140), run.summary, tmp_path / "run", {})
    printed = capsys.readouterr().out
    sentence = f"worker {slow} computes 3 times slower than the median"
    assert sentence in printed
    write_report(rank(read_study([tmp_path / "run"])), out=tmp_path / "report.html")
    assert sentence in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("mode", ["schedule=ashl", "sync=asp", "sync=local_sgd"])
def test_profiling_and_dropped_steps_do_not_change_the_slowdown(mode: str, tmp_path: Any) -> None:
    run = ashl.train(
        "runtime=sim", mode, "stop.steps=200", "model.hidden=[4]", "cluster=one_slow",
        "tracking=none", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    found = run.summary["straggler"]
    assert (found["worker"], found["slowdown"]) == (3, pytest.approx(5, rel=0.1))
    waited = {"schedule=ashl": 0.1, "sync=asp": 0.0, "sync=local_sgd": 0.7}[mode]
    assert found["others_wait_share"] == pytest.approx(waited, abs=0.1)


def rows_at(second: float, step_s: dict[int, float]) -> list[dict[str, Any]]:
    """Rows of workers that have all computed for so many seconds."""
    return [
        {"rank": rank, "steps": int(second / own_s), "compute_s": second, "wait_s": 0.0}
        for rank, own_s in step_s.items()
    ]


def test_a_verdict_during_a_run_comes_once_and_when_it_is_sure() -> None:
    finder = StragglerFinder()
    found = [finder.observe(rows_at(s / 4, {0: 0.1, 1: 0.15, 2: 0.1}), s / 4) for s in range(60)]
    (place,) = [at for at, verdict in enumerate(found) if verdict]
    assert place == 4 * 3  # three windows of a second
    assert found[place]["worker"] == 1
    assert found[place]["slowdown"] == pytest.approx(1.5, rel=0.1)


def test_stragglers_that_take_turns_are_named_once_each() -> None:
    finder, found = StragglerFinder(), []
    rows = [{"rank": rank, "steps": 0, "compute_s": 0.0, "wait_s": 0.0} for rank in range(3)]
    for second in range(40):
        slow = second // 10 % 2
        rows = [
            {**row, "steps": row["steps"] + 5, "compute_s": row["compute_s"] + 1 + (rank == slow)}
            for rank, row in enumerate(rows)
        ]
        found.append(finder.observe(rows, 2.0 * second))
    assert [verdict["worker"] for verdict in found if verdict] == [0, 1]


def test_a_worker_that_is_slow_for_a_moment_is_not_named() -> None:
    finder = StragglerFinder()
    slow_s = [0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0]  # twice two windows
    for second, more_s in enumerate(slow_s):
        rows = rows_at(float(second), {0: 0.1, 1: 0.1})
        rows[1]["compute_s"] += more_s
        assert finder.observe(rows, float(second)) is None


def test_a_run_on_processes_warns_while_it_is_going_on(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ashl.train(
        "sync=bsp", "stop.seconds=5", "cluster.compute=[1,2]", "cluster.step_s=0.02",
        "cluster.exchange_s=0.01", "tracking=none", f"run.dir={tmp_path}/run", quiet=False,
    )  # fmt: skip
    log = (tmp_path / "run/controller.log").read_text()
    for text in (log, capsys.readouterr().out.partition("run finished")[0]):
        assert text.count("worker 1 computes") >= 1
    assert log.count("worker 1 computes") == 1
