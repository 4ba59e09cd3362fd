"""Where a command runs: closed streams, terminals that show ASCII only or close, long TMPDIR, no
loopback, daemons.
"""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ashl.cli.app import main
from ashl.config.catalog import catalog
from ashl.config.signals import handle_signals
from ashl.launch.environment import ENGINES, clear_launcher_env
from ashl.report.records import is_summary
from ashl.run import process_setup
from ashl.run.monitor import Monitor
from ashl.tracking import jsonl, ui
from ashl.tracking.console import Progress
from ashl.tracking.killed import close_killed
from tests.disturbed import LONG, PATIENCE_S, check_records, ranks_of, under_way, wait_for
from tests.support import slow_unless

ROOT = Path(__file__).resolve().parents[2]
REAL = [
    "cluster=homogeneous",
    "cluster.compute=[1,1]",
    "sync=bsp",
    "stop.steps=6",
    "model.hidden=[8]",
    "tracking=none",
]
ASHL = [sys.executable, "-P", "-m", "ashl.cli"]


# --- terminals


def in_ascii(monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    """Output of a command on a terminal that shows ASCII only."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(args) == 0, args
    out.flush()
    return out.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize(
    "options", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["one of each group", "all"]
)
def test_pages_of_list_in_ascii(options: int | None, monkeypatch) -> None:
    known = catalog()
    named = [
        [group, option]
        for group in known
        for option in sorted(known[group], key=lambda name: name == "none")[:options]
    ]
    pages = [[], *([group] for group in known), *named]
    assert len(pages) > (25 if options else 150)
    for page in pages:
        assert in_ascii(monkeypatch, "list", *page).strip()


def test_a_terminal_that_closes_is_written_to_in_vain() -> None:
    """Where it is not the one that sends SIGHUP, as after `disown`."""
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        usable = process_setup.replace_stream(stream)
        usable.write("seen\n")
        usable.flush()
        assert os.read(ours, 100) == b"seen\r\n"
        os.close(ours)
        usable.write("unseen\n")
        usable.flush()
        usable.detach()


SIM = ["train", *REAL, "runtime=sim", "run.dir=run"]


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        (["list"], "1"),
        (SIM, ""),
        pytest.param(["list"], "", marks=pytest.mark.slow),
        pytest.param(SIM, "1", marks=pytest.mark.slow),
        pytest.param([*SIM, "runtime=local"], "", marks=pytest.mark.slow),
    ],
)
def test_a_command_ends_in_order_when_its_reader_has_closed(command, unbuffered, tmp_path) -> None:
    """The reader closes the pipe early, like `ashl train | head -1`."""
    ours, theirs = os.pipe()
    os.close(ours)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [*ASHL, *command],
        cwd=tmp_path,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=env,
        timeout=PATIENCE_S,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [jsonl.read_json(file)["status"] for file in tmp_path.glob("run/summary.json")] == [
        "finished"
    ] * (command[0] == "train")


# --- real processes


@pytest.mark.parametrize("sink", slow_unless(["none"], ["none", "mlflow"]))
def test_a_real_run_without_streams_in_a_folder_with_an_apostrophe_and_a_long_tmpdir(
    sink, tmp_path
) -> None:
    place, long = tmp_path / "o'brien's \"runs\"", tmp_path / ("x" * 90)
    place.mkdir()
    long.mkdir()
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    command = [
        *closed,
        *ASHL,
        "train",
        "-q",
        *REAL,
        f"tracking={sink}",
        "runtime.heartbeat_timeout_s=30",
    ]
    assert (
        subprocess.run(
            command, cwd=place, timeout=PATIENCE_S, env=os.environ | {"TMPDIR": str(long)}
        ).returncode
        == 0
    )
    (summary,) = place.glob("runs/*/*/summary.json")
    assert jsonl.read_json(summary)["status"] == "finished"
    assert (place / "runs/mlflow.db").exists() == (sink == "mlflow")
    assert not list(long.iterdir())


DAEMON = f"""
import multiprocessing as mp, sys
import ashl

def train(name):
    run = ashl.train("run.dir=" + name, *{REAL!r})
    sys.exit(0 if run.summary["status"] == "finished" else 1)

if __name__ == "__main__":
    ashl.train("run.dir=first", *{REAL!r}, *sys.argv[1:])
    child = mp.get_context("fork").Process(target=train, args=("second",), daemon=True)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["sim", "local"])
def test_a_daemonic_process_forked_from_one_that_has_trained(runtime, tmp_path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    done = subprocess.run(
        [sys.executable, "daemon.py", f"runtime={runtime}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "first/summary.json").exists()
    assert (tmp_path / "second/summary.json").exists()


JOB = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    "job", [{}, pytest.param(JOB, marks=pytest.mark.slow)], ids=["alone", "job"]
)
def test_without_loopback(job, tmp_path) -> None:
    apart = ["unshare", "-n" if os.geteuid() == 0 else "-rn"]
    probe = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"NOT TRIED: no network namespace can be made here: {probe.stderr.strip()}")
    command = [*apart, *ASHL, "train", "-q", *REAL, "runtime.heartbeat_timeout_s=10"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=30, env=os.environ | job
    )
    by = "MASTER_ADDR=localhost" if job else "runtime=local"
    assert done.stderr == (
        f"ashl: {by}: processes on this machine do not reach each other over loopback, 127.0.0.1 "
        "(Network is unreachable); bring it up with `ip link set lo up`, or take runtime=sim\n"
    )
    assert done.returncode == 2


def test_what_is_left_over_of_a_job(monkeypatch) -> None:
    """A run of a sweep belongs to no job, with any variables of one in the shell."""
    for engine in ENGINES:
        for name in (engine.rank, *engine.sizes):
            monkeypatch.setenv(name, "1")
    clear_launcher_env()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK"} & os.environ.keys()


# --- runs that are killed or interrupted


@pytest.mark.parametrize(
    "topology", slow_unless(["all_reduce"], ["parameter_server", "all_reduce"])
)
def test_a_killed_run_is_closed_from_its_records_once_nobody_writes_them(
    topology: str, workplace, capsys
) -> None:
    """The summary from the records has the values of the run's own, also in its `commits`."""
    sim = [
        "runtime=sim",
        "sync=bsp",
        f"topology={topology}",
        "stop.steps=80",
        "tracking=none",
        "eval.every_commits=5",
        "run.dir=run",
    ]
    assert main(["train", "-q", *sim]) == 0
    run = workplace / "run"
    whole = jsonl.read_json(run / "summary.json")
    assert whole["commits"] == (80 if topology == "parameter_server" else 20)
    assert [stage["commits"] for stage in whole["stages"]] == [whole["commits"]]
    assert [worker["commits"] for worker in whole["workers"]] == [20] * 4
    (run / "summary.json").unlink()
    with open(run / "metrics.jsonl", "rb") as file:
        jsonl.lock(file)
        assert not close_killed(run), "it goes on"
    assert main(["train", "--resume", "run"]) == 2, "there is no checkpoint"
    closed = jsonl.read_json(run / "summary.json")
    assert is_summary(closed)
    same = [key for key in closed if closed[key] == whole.get(key)]
    assert {
        "name",
        "seed",
        "time_s",
        "time_kind",
        "num_workers",
        "steps",
        "commits",
        "samples",
        "wait_share",
    } <= {*same}
    assert closed["status"] == "interrupted"
    assert closed["best"]["test_accuracy"] == whole["best"]["test_accuracy"]
    (run / "summary.json").unlink()
    assert "/runs/" in ui.link_of(workplace, "http://here", run), "its copy in MLflow ends"
    assert jsonl.read_json(run / "summary.json") == closed
    jsonl.write_json(run / "summary.json", whole)
    assert main(["compare", "run", "--out", "/proc/report.html"]) == 2
    assert "name another place with --out FILE" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoints", [True, False])
def test_an_interrupted_run_with_checkpoints_prints_how_to_resume(
    checkpoints, workplace, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("ashl.run.train.run_status", lambda *_: ("interrupted", "interrupted"))
    every = ["run.checkpoint_s=0.1"] if checkpoints else []
    overrides = [
        "runtime=sim",
        "sync=bsp",
        "stop.steps=40",
        "tracking=none",
        "run.dir=it's",
        *every,
    ]
    assert main(["train", "-q", *overrides]) == 130
    out = capsys.readouterr().out
    assert jsonl.read_json(workplace / "it's/summary.json")["status"] == "interrupted"
    assert ("resume with `ashl train --resume 'it'\"'\"'s'`" in out) == checkpoints


def test_a_failure_is_a_line_when_it_happens_in_a_pipe_too() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out), name="run")
    told = SimpleNamespace(read_heartbeats=None, progress=progress)
    Monitor.show_line(
        told, "worker 1 failed at 3 s (was killed by SIGKILL); the run continues without it"
    )
    Monitor.show_line(SimpleNamespace(read_heartbeats=list, progress=progress), "in virtual time")
    assert (
        out.getvalue()
        == "worker 1 failed at 3 s (was killed by SIGKILL); the run continues without it\n"
    )


# --- signals, and jobs that are stopped


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_is_handled_unless_it_is_ignored_as_under_nohup(ignored, monkeypatch) -> None:
    heard = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with handle_signals(lambda number, frame: heard.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == ([signal.SIGTERM] if ignored else [signal.SIGHUP, signal.SIGTERM])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "sync=ssp",
        "sync=bsp run.checkpoint_s=2",
        "sync=bsp topology=all_reduce",
        "sync=ad_psgd topology=gossip",
        "topology=partial_all_reduce sync=ripples_smart sync.group_size=2",
    ],
)
def test_a_job_that_is_stopped_and_continues(mode: str, workplace) -> None:
    """All processes are paused, as by Ctrl-Z and `fg`, for longer than runtime.heartbeat_timeout_s."""
    command = [*ASHL, "train", *LONG, *mode.split(), "runtime.heartbeat_timeout_s=2"]
    process = subprocess.Popen(command, cwd=workplace, start_new_session=True)
    run = workplace / "run"
    try:
        wait_for(lambda: under_way(run) and len(ranks_of(run)) >= 2)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(3)
            os.killpg(process.pid, signal.SIGCONT)
            time.sleep(2.5)
        recorded = (run / "events.jsonl").stat().st_size
        wait_for(lambda: (run / "events.jsonl").stat().st_size > recorded)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
    assert check_records(run, "interrupted")["failed_workers"] == []
