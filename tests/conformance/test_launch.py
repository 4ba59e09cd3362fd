"""`ashl launch`: on this machine as two hosts, and over real ssh between network namespaces behind
unequal links.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ashl.cli.app import main
from tests.namespaces import address, inside, machines, missing, no_sshd, ssh_between
from tests.test_ssh import SSH

SHORT = [
    "model.hidden=[8]",
    "tracking=none",
    "run.dir=run",
    "stop.steps=60",
    "eval.every_commits=20",
    "run.save_weights=false",
]
MODES = {"server": ["schedule=ashl"], "all_reduce": ["topology=all_reduce", "sync=bsp"]}


@pytest.fixture
def two_hosts(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set-up that makes this machine two hosts with one slot each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("ssh").write_text(SSH)
    Path("ssh").chmod(0o755)
    Path("hosts").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3 # for nobody\n")
    return ["launch", "--hosts", "hosts", "--ssh", str(workplace / "ssh")]


def test_a_run_and_what_is_said_of_it(
    two_hosts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    mode = ["topology=all_reduce", "sync=bsp", "cluster.num_workers=2"]
    assert main([*two_hosts, "--", "train", *mode, *SHORT]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["runtime"], summary["status"], summary["num_workers"]) == (
        "torchrun",
        "finished",
        2,
    )
    assert "run folder  run" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["train", "profile", "sweep"])
def test_a_dry_run_may_be_asked_for_on_both_sides(name: str, two_hosts: list[str], capfd) -> None:
    command = [name, "sync=bsp", "cluster.num_workers=1", "stop.steps=4", "tracking=none"]
    said = []
    for before, behind in ((["--dry-run"], []), ([], ["--dry-run"])):
        assert main([*two_hosts, *before, "--", *command, *behind]) == 0
        said.append(capfd.readouterr().out.splitlines()[:1])
    assert said[0] == said[1]
    assert said[0]
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_sweep_brings_its_real_runs_there(
    two_hosts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The virtual one stays here; where the records end elsewhere they are brought here; a second
    time nothing runs.
    """
    Path("there").mkdir()
    grid = [
        "sync=bsp,ssp",
        "cluster.num_workers=2",
        "tracking=none",
        "model.hidden=[8]",
        "stop.steps=60",
        "run.dir=grid",
    ]
    command = [*two_hosts, "--folder", str(Path("there").absolute()), "--", "sweep", *grid]
    assert main(command) == 0
    found = [json.loads(file.read_text()) for file in Path("grid").glob("*/summary.json")]
    assert [(run["runtime"], run["status"]) for run in found] == [("torchrun", "finished")] * 2
    assert len(list(Path("there/grid").glob("*/summary.json"))) == 2
    capfd.readouterr()
    assert main(command) == 0
    assert "2 of them done, 0 to go" in capfd.readouterr().out


def left_running(folder: Path) -> list[str]:
    """Processes that work in a folder of this test."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if str(process.info["cwd"] or "").startswith(str(folder)):
            found.append(" ".join(process.info["cmdline"] or ()))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_machines_behind_unequal_links(tmp_path: Path) -> None:
    """A whole session, as root, with sshd; otherwise it is skipped with the reason. Each machine
    has its own folder.
    """
    if why := missing() or no_sshd():
        pytest.skip(why)
    with machines(1000, 200, 50) as names, ssh_between(names, tmp_path) as ssh:
        addresses = [address(name) for name in names]
        (tmp_path / "hosts").write_text(f"{addresses[0]} slots=2\n{addresses[1]}\n{addresses[2]}\n")
        (tmp_path / "work").mkdir()
        launch = [
            *inside(names[0]),
            sys.executable,
            "-m",
            "ashl.cli",
            "launch",
            "--hosts",
            "../hosts",
            "--ssh",
            ssh,
            "--",
        ]

        def started(*words: str) -> subprocess.Popen[str]:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            return subprocess.Popen([*launch, *words], cwd=tmp_path / "work", **pipes)

        profiling = started(
            "profile", "run.dir=profile", "cluster.num_workers=3", "model.hidden=[512]"
        )
        said = profiling.communicate(timeout=200)[0]
        assert profiling.returncode == 0, said
        workers = json.loads((tmp_path / "work/profile/profile.json").read_text())["workers"]
        assert workers[2]["push_s"] > workers[1]["push_s"]
        for mode, overrides in MODES.items():
            job = started(
                "train", "cluster.num_workers=3", *overrides, *SHORT, f"run.dir=run-{mode}"
            )
            said = job.communicate(timeout=200)[0]
            assert job.returncode == 0, said
            summary = json.loads((tmp_path / "work" / f"run-{mode}" / "summary.json").read_text())
            assert summary["status"] == "finished", mode
        for end in ("interrupt", "kill"):
            job = started(
                "train",
                "cluster.num_workers=3",
                "sync=ssp",
                *SHORT,
                "stop.steps=10000000",
                f"run.dir={end}",
            )
            while (
                not (events := tmp_path / "work" / end / "events.jsonl").exists()
                or not events.stat().st_size
            ):
                assert job.poll() is None, job.communicate()[0]
                time.sleep(0.1)
            job.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
            job.communicate(timeout=60)
            limit = time.monotonic() + 30
            while left_running(tmp_path) and time.monotonic() < limit:
                time.sleep(0.2)
            assert not left_running(tmp_path)
            summary = json.loads((tmp_path / "work" / end / "summary.json").read_text())
            assert summary["status"] == "interrupted"
