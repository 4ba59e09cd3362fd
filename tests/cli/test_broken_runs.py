"""Real runs that are killed, stopped, interrupted or run out of disk: what is said, what is kept,
and nothing left.
"""

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ashl.cli.app import main
from ashl.run.authenticated_store import StoreAddress, StoreClient, new_secret
from ashl.runtime.time_accounting import KINDS
from ashl.tracking import jsonl
from tests.disturbed import (
    INTERRUPTED,
    LONG,
    PATIENCE_S,
    check_records,
    ranks_of,
    under_way,
    wait_for,
)


def test_a_killed_server(train, workplace) -> None:
    """No run continues without it; many continue without a worker: see `test_worker_failures.py` and
    `test_member_failures.py`.
    """
    code, err = train(lambda run: os.kill(ranks_of(run)[2], signal.SIGKILL), "sync=ssp")
    assert err == "ashl: the server (rank 2) was killed by SIGKILL; its log is run/rank2.log\n"
    assert code == 1
    summary = check_records(workplace / "run", "failed")
    assert summary["exit_reason"].startswith("the server (rank 2) was killed by SIGKILL")


def ports(pid: int) -> set[int]:
    """Where a process listens."""
    return {
        at.laddr.port
        for at in psutil.Process(pid).net_connections("tcp4")
        if at.status == psutil.CONN_LISTEN
    }


def intrude(run: Path) -> None:
    """Attacks by a client on this machine without the secret: on the store of a run, and on its
    ranks.
    """
    ranks = ranks_of(run)
    mine = ports(os.getpid())
    attacks = [b"", b"hello" * 1000, bytes(64), b"\xff" * 64, os.urandom(96)]
    for port in mine:
        with suppress(OSError):
            StoreClient(StoreAddress("127.0.0.1", port, new_secret()), 0.0)
    for port in (*mine, *(port for pid in ranks.values() for port in ports(pid))):
        for garbage in attacks:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
            ):
                connection.sendall(garbage)
    recorded = (run / "events.jsonl").stat().st_size
    wait_for(lambda: (run / "events.jsonl").stat().st_size > recorded)


def test_untrusted_clients_change_nothing_and_ctrl_c_ends_the_run(train, workplace) -> None:
    def act(run: Path) -> None:
        config = (run / "config.yaml").read_text()
        intrude(run)
        assert (run / "config.yaml").read_text() == config
        os.kill(os.getpid(), signal.SIGINT)

    code, said = train(act)
    assert code == 130
    assert said == INTERRUPTED
    summary = check_records(workplace / "run", "interrupted")
    assert summary["steps"] > 0
    assert summary["params_sha256"], "the model was handed in, as at any other end"
    assert summary["exit_reason"] == "interrupted"
    log = (workplace / "run/controller.log").read_text()
    assert log.count("refuses 127.0.0.1, which does not know the job's secret") == 1


def test_ctrl_c_while_a_worker_hangs(train, workplace) -> None:
    """It cannot leave in order: after a few seconds it is not waited for any longer."""

    def act(run: Path) -> None:
        os.kill(ranks_of(run)[0], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGINT)

    assert train(act) == (130, INTERRUPTED)
    check_records(workplace / "run", "interrupted")


def test_a_full_disk(train, workplace, monkeypatch) -> None:
    def act(run: Path) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(jsonl.Lines, "append", full)

    code, err = train(act)
    reason = "no space left on device"
    assert (
        err
        == f"ashl: Cannot write to the run folder run ({reason}); free some space or choose another"
        " run.dir.\n"
    )
    assert code == 1
    check_records(workplace / "run", "failed")


def test_a_killed_parent_leaves_no_orphans(workplace) -> None:
    """Nor was there anything before that another machine could have spoken to."""
    process = subprocess.Popen([sys.executable, "-m", "ashl.cli", "train", *LONG], cwd=workplace)
    run = workplace / "run"
    try:
        wait_for(lambda: under_way(run) and len(ranks_of(run)) == 3)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        everyone = [psutil.Process(process.pid), *family]
        ports = [port for one in everyone for port in one.net_connections("inet") if not port.raddr]
        assert len([port for port in ports if port.status == psutil.CONN_LISTEN]) >= 4, (
            "of the store, and of each rank"
        )
        assert {port.laddr.ip for port in ports} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    assert list(jsonl.read(run / "events.jsonl")), "what was recorded stays readable"
    assert not (run / "summary.json").exists()
    assert main(["compare", str(run)]) == 2, "no run came to an end"
    summary = jsonl.read_json(run / "summary.json")
    assert summary["status"] == "interrupted"
    assert summary["exit_reason"].startswith("its process was killed")


FRAGILE = """
import multiprocessing as mp
from torch import nn
from ashl.model.linear import Linear
from ashl.option import option

class Breaking(nn.Sequential):
    calls = 0

    def forward(self, x):
        Breaking.calls += 1
        if Breaking.calls > 20 and mp.current_process().name == "rank1":
            raise ValueError("something is wrong with me\\nand more of it")
        return super().forward(x)

@option
class Fragile(Linear):
    def build(self, sample_shape, num_classes):
        return Breaking(super().build(sample_shape, num_classes))
"""


def test_an_error_in_a_worker_is_told_with_its_rank_and_log(workplace, capsys, monkeypatch) -> None:
    (workplace / "fragile_models.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(workplace)
    own = [
        "sync=ssp",
        "model=linear",
        "model._target_=fragile_models.Fragile",
        "allow_targets=[fragile_models]",
    ]
    code = main(["train", *[word for word in LONG if "hidden" not in word], *own])
    said = "ValueError: something is wrong with me"
    where = f"{workplace / 'fragile_models.py'}, line 13"
    why = (
        rf"model fragile_models\.Fragile failed, not ashl, worker 1, step \d+: {said} and more of"
        rf" it \({where}\)"
    )
    assert re.fullmatch(
        rf"ashl: worker 1: {why}; its log is run/rank1\.log\n", capsys.readouterr().err
    )
    assert code == 1
    assert said in (workplace / "run/rank1.log").read_text()
    check_records(workplace / "run", "failed")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGHUP", "SIGINT", "SIGTERM"])
def test_a_signal_to_all_processes_of_a_run(how: str, workplace) -> None:
    """Signals of a terminal, a closing terminal, and a queue: ranks and fork server leave them to
    their parent.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ashl.cli", "train", *LONG], cwd=workplace, start_new_session=True
    )
    run = workplace / "run"
    try:
        wait_for(lambda: under_way(run) and len(ranks_of(run)) == 3)
        os.killpg(process.pid, signal.Signals[how])
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
    summary = check_records(run, "interrupted")
    assert summary["params_sha256"]
    assert [(host["rank"], host["host"]) for host in summary["hosts"]] == [
        (r, platform.node()) for r in range(3)
    ]
    assert {host["device"].partition(":")[0] for host in summary["hosts"]} <= {"cpu", "cuda"}


def test_ctrl_c_at_the_very_start(workplace) -> None:
    """A terminal's signal reaches every process: here as soon as the fork server exists."""
    command = [sys.executable, "-m", "ashl.cli", "train", *LONG]
    process = subprocess.Popen(
        command, cwd=workplace, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def serving() -> bool:
        family = psutil.Process(process.pid).children()
        return any("forkserver" in " ".join(child.cmdline()) for child in family)

    try:
        wait_for(serving)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, INTERRUPTED)
    assert json.loads((workplace / "run/summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_half_of_the_package_in_the_working_directory(
    train_elsewhere: Callable[[Path], int], workplace: Path
) -> None:
    """In a checkout beside an installation, ranks import the package of their parent."""
    (workplace / "ashl").mkdir()
    (workplace / "ashl/__init__.py").write_text("")
    assert train_elsewhere(workplace) == 0


@pytest.fixture
def train_elsewhere() -> Callable[[Path], int]:
    """`ashl train` as a command in this folder: what a script looks in first is its own folder, not
    the current one.
    """

    def run(folder: Path) -> int:
        script = folder / "bin/start.py"
        script.parent.mkdir()
        script.write_text(
            "import sys\nfrom ashl.cli.app import main\n\nif __name__ == '__main__':\n   "
            " sys.exit(main())\n"
        )
        short = [option for option in LONG if not option.startswith("stop.")]
        command = [sys.executable, str(script), "train", *short, "sync=ssp", "stop.steps=20"]
        return subprocess.run(command, cwd=folder, timeout=PATIENCE_S).returncode

    return run


def test_a_run_that_ends_within_a_stage_lasts_until_then(workplace: Path) -> None:
    """Its time is not the end of the stage before, and the failure that ends it is in the record."""
    fails = "cluster.events=[{time_s: 2, worker: 1, fail: true}]"
    typed = ("runtime=sim", "cluster=one_slow", "schedule=sync_first", "runtime.min_workers=4")
    assert main(["train", "-q", *typed, fails, "run.dir=run", "tracking=none"]) == 1
    summary = jsonl.read_json(Path("run/summary.json"))
    (profiled,) = summary["stages"]
    assert profiled["end_s"] < 2 < summary["time_s"]
    assert [failed["worker"] for failed in summary["failed_workers"]] == [1]
    for worker in summary["workers"]:
        seconds = sum(worker[f"{kind}_s"] for kind in KINDS)
        assert seconds == pytest.approx(summary["time_s"])
