"""`ashl sweep` end to end: every setting runs once, after any interruption."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from ashl.cli.app import main
from ashl.study.jobs import Job, Pool, run_all

TINY = [
    "runtime=sim",
    "model.hidden=[4]",
    "stop.epochs=1",
    "eval.every_commits=40",
    "run.dir=study",
    "tracking=none",
]
GRID = ["sync=bsp,asp", "seed=0,1", *TINY]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def summaries(study: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in study.glob("*/summary.json")}


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    command = [sys.executable, "-m", "ashl.cli", "sweep", *GRID, "--jobs", "1", "-q"]
    with subprocess.Popen(command, start_new_session=True) as process:
        end = time.monotonic() + 60
        while not (first := summaries(workplace / "study")):
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert 1 <= len(first) < 4
    assert main(["sweep", *GRID]) == 0
    out = capsys.readouterr().out
    whole = summaries(workplace / "study")
    assert len(whole) == 4
    assert {name: whole[name]["host_s"] for name in first} == {
        name: s["host_s"] for name, s in first.items()
    }
    assert f"{len(first)} of them done, {4 - len(first)} to go" in out
    assert all(summary["status"] == "finished" for summary in whole.values())
    assert (workplace / "study/report.html").is_file()
    assert main(["sweep", *GRID, "-q"]) == 0
    assert summaries(workplace / "study") == whole


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_prints_how_to_resume(
    number: int, code: int, workplace: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("ashl.study.sweep.run_settings", interrupted)
    assert main(["sweep", *GRID]) == code
    out, err = capsys.readouterr()
    kept = "what has ended is kept, and the same command runs what is missing"
    assert err == f"ashl: interrupted; {kept}\n"
    assert "interrupted" not in out


def test_a_failed_run_is_recorded_and_the_others_continue(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    grid = ["optimizer.lr=0.1,1e9", "sync=bsp", "optimizer.momentum=0", *TINY]
    assert main(["sweep", *grid]) == 0
    found = sorted(summary["status"] for summary in summaries(workplace / "study").values())
    assert found == ["diverged", "finished"]
    assert "diverged" in capsys.readouterr().out


def test_a_race_drops_who_is_behind_and_never_does_more_than_its_grid(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    """A race does less virtual work than the grid: each run begins at most once and takes at most
    its steps in the grid.

    In the grid all runs take equally many steps. The slow baseline is never dropped; a dropped
    setting has a row of its own.
    """
    begun: list[str] = []

    def counted(pool: Pool, jobs: Iterator[Job], *rest) -> Iterator[Job]:
        wanted = list(jobs)
        begun.extend(job.folder.name for job in wanted)
        assert not any(job.resume for job in wanted)
        return run_all(pool, iter(wanted), *rest)

    grid = [
        "sync=asp",
        "optimizer.lr=0.0001,0.0002,0.0003,0.1",
        "seed=0,1",
        *TINY,
        "model.hidden=[16]",
        "stop.epochs=2",
    ]
    with patch("ashl.study.sweep.run_all", counted):
        assert main(["sweep", *grid, "--race", "--baseline", "lr=0.0001"]) == 0
    record = json.loads((workplace / "study/sweep.json").read_text())
    by_hash = {setting["hash"]: setting["axes"]["optimizer.lr"] for setting in record["settings"]}
    assert sorted(begun) == sorted(by_hash), "each once"
    assert {by_hash[entry["hash"]] for entry in record["dropped"]} == {"0.0002"}
    raced = summaries(workplace / "study")
    finished = [by_hash[name] for name, summary in raced.items() if summary["status"] == "finished"]
    assert (finished.count("0.1"), finished.count("0.0001")) == (2, 2)
    whole = max(summary["steps"] for summary in raced.values())
    assert sum(summary["steps"] for summary in raced.values()) < len(by_hash) * whole
    out = capsys.readouterr().out
    assert "dropped optimizer.lr=0.0002: loss higher by" in out
    winner = next(line for line in out.splitlines() if line.startswith("next: "))
    assert "ashl train sync=asp optimizer.lr=0.1 seed=0 runtime=sim" in winner
    assert "'model.hidden=[16]'" in winner, "it can be pasted"
    assert "lr=0.0002" in (workplace / "study/report.html").read_text()


def test_dry_run_and_cfg_run_nothing(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["sweep", *GRID, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 runs" in out
    assert re.search(r"^predicted total: [\d.]+ s on the runs' own clocks, 4 runs$", out, re.M)
    assert main(["sweep", *GRID, "--cfg"]) == 0
    assert capsys.readouterr().out.count("seed: ") == 4
    assert not (workplace / "study").exists()


def test_two_sweeps_never_share_a_folder(workplace: Path, capsys: pytest.CaptureFixture) -> None:
    import fcntl

    (workplace / "study").mkdir()
    with open(workplace / "study/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["sweep", *GRID]) == 1
    assert "another sweep is running in study" in capsys.readouterr().err


def test_a_grid_with_more_settings_continues_a_sweep(workplace: Path, capsys) -> None:
    line = ["sweep", "-q", "--jobs", "1", "runtime=sim", "tracking=none", "stop.steps=8"]
    assert main([*line, "sync=bsp", "run.dir=grid"]) == 0
    before = {file: file.stat().st_mtime_ns for file in Path("grid").glob("*/summary.json")}
    assert main([*line, "sync=bsp,asp", "run.dir=grid"]) == 0
    assert len(json.loads(Path("grid/sweep.json").read_text())["settings"]) == 2
    assert all(file.stat().st_mtime_ns == at_ns for file, at_ns in before.items())
    assert main([*line, "sync=asp", "run.dir=grid"]) == 2


def test_what_was_killed_from_outside_runs_again(workplace: Path) -> None:
    assert main(["sweep", *GRID, "-q"]) == 0
    first = summaries(workplace / "study")
    reasons = {
        "was killed by SIGKILL": True,
        "worker 1 was killed by SIGTERM; its log is rank1.log": True,
        "the loss became nan": False,
    }
    for name, why in zip(sorted(first), reasons, strict=False):
        record = {"schema": 1, "status": "failed", "exit_reason": why, "seed": 0}
        (workplace / "study" / name / "summary.json").write_text(json.dumps(record))
    assert main(["sweep", *GRID, "-q"]) == 1
    again = summaries(workplace / "study")
    for name, repeated in zip(sorted(first), reasons.values(), strict=False):
        kept = again[name].get("params_sha256") == first[name]["params_sha256"]
        assert kept == repeated, "a failure of its own counts"


def test_runs_that_leave_no_record_fail_the_sweep(monkeypatch, capsys) -> None:
    """A run on a full disk cannot even record that it has failed."""
    monkeypatch.setattr("ashl.study.sweep.run_missing", lambda *_: None)
    assert main(["sweep", "-q", *GRID]) == 1
    assert capsys.readouterr().err == (
        "ashl: 4 runs left no record in study; free some space there, and give the same command"
        " again\n"
    )
