"""`ashl watch` with a plain DDP script on two processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ashl.watch.records import Records
from tests.engines import free_port

SCRIPT = Path(__file__).with_name("watched_ddp.py")


def job(*words: object) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    return [*torchrun, f"--master-port={free_port()}", str(SCRIPT), *map(str, words)]


def watched(folder: Path, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ashl.cli", "watch", "--folder", str(folder), "--", *command]
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | env, timeout=120)


@pytest.mark.slow  # it trains until the slow rank is sure
def test_a_rank_that_is_slower_by_half_is_named_while_the_job_runs(tmp_path: Path) -> None:
    """The environment has a sitecustomize of its own, which is run, too."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'run'\n")
    words = [sys.executable, "-m", "ashl.cli", "watch", "--folder", str(tmp_path / "run"), "--"]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "own")}
    command = [*words, *job(6, 1, 1.5)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        named_s = None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if named_s is None and line.startswith("ashl: rank 1 computes"):
                assert process.poll() is None
                named_s = time.monotonic()
        assert process.stdout.read() == "final run\n"
    assert named_s is not None, lines
    assert process.returncode == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["straggler"]["worker"] == 1
    assert summary["straggler"]["slowdown"] == pytest.approx(1.5, rel=0.1)
    fast, slow = summary["ranks"]
    assert fast["steps"] == slow["steps"] > 30
    assert fast["wait_s"] / summary["time_s"] == pytest.approx(1 / 3, abs=0.08)
    assert slow["wait_s"] < 0.05 * summary["time_s"]


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    ended = watched(tmp_path / "run", [sys.executable, "-c", "print('hi'); raise SystemExit(7)"])
    assert (ended.returncode, ended.stdout) == (7, "hi\n")
    assert "no process of the command has trained" in ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == 7
    again = watched(tmp_path / "run", ["true"])
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    missing = watched(tmp_path / "other", ["no-such-program"])
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)


def write(folder: Path, rank: int, *records: Any) -> None:
    start = {"rank": rank, "world_size": 2, "host": "here", "device": "cpu"}
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in (start, *records))


def test_the_rank_that_arrives_last_does_not_wait(tmp_path: Path) -> None:
    """A common step counts for the larger stride; a new process begins again at step 1."""
    write(tmp_path, 0, [4, 2, 1.0, 0.6], [6, 2, 9.0, 0.0], [8, 4, 1.0, 0.6])
    write(tmp_path, 1, [4, 4, 1.0, 0.1], [8, 4, 1.0, 0.2])
    write(tmp_path, 0, [4, 1, 2.0, 0.5])
    write(tmp_path, 1, [4, 1, 2.0, 1.5])
    with (tmp_path / "rank1.jsonl").open("a") as file:
        file.write("[8, 1, 2.0")  # not written completely yet
    records = Records(tmp_path)
    records.read()
    records.read()
    first, second = records.rows()
    assert first["steps"] == second["steps"] == 4 + 4 + 1
    assert first["communication_s"] == second["communication_s"] == pytest.approx(1.2 + 0.5)
    assert first["wait_s"] == pytest.approx(4 * 0.5 + 4 * 0.4)
    assert second["wait_s"] == pytest.approx(1.0)
    assert records.time_s == pytest.approx(8 + 2)
