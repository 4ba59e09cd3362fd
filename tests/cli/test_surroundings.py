"""Where a command runs: closed streams, terminals that close or show ASCII only; killed, interrupted
and stopped runs.
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

from ashl.cli.app import main
from ashl.config.catalog import catalog
from ashl.config.signals import handle_signals
from ashl.errors import AshlError
from ashl.launch.environment import ENGINES, clear_launcher_env
from ashl.run import launch, process_setup
from ashl.tracking import jsonl
from tests.disturbed import LONG, PATIENCE_S, check_records, ranks_of, under_way, wait_for

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


@pytest.mark.parametrize("sink", ["none", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_a_real_run_without_streams_in_a_folder_with_an_apostrophe(sink, tmp_path) -> None:
    place = tmp_path / "o'brien's \"runs\""
    place.mkdir()
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
    assert subprocess.run(command, cwd=place, timeout=PATIENCE_S).returncode == 0
    (summary,) = place.glob("runs/*/*/summary.json")
    assert jsonl.read_json(summary)["status"] == "finished"
    assert (place / "runs/mlflow.db").exists() == (sink == "mlflow")


def test_a_daemonic_process_starts_no_ranks(monkeypatch) -> None:
    monkeypatch.setattr(launch.mp, "current_process", lambda: SimpleNamespace(daemon=True))
    with pytest.raises(AshlError, match="make it with daemon=False"):
        launch.start_fork_server()


def test_what_is_left_over_of_a_job(monkeypatch) -> None:
    """A run of a sweep belongs to no job, with any variables of one in the shell."""
    for engine in ENGINES:
        for name in (engine.rank, *engine.sizes):
            monkeypatch.setenv(name, "1")
    clear_launcher_env()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK"} & os.environ.keys()


# --- runs that are killed or interrupted


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
