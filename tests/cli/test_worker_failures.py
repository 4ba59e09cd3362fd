"""Workers of a real run are killed or hang: the survivors continue, and a worker rejoins."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ashl.cli.app import main
from ashl.run.monitor import Monitor
from ashl.runtime.process import FAILURE_WAIT_S
from ashl.tracking import jsonl
from tests.disturbed import INTERRUPTED, LONG, PATIENCE_S, check_records, ranks_of, wait_for

OWN = (  # with messages of their own
    "sync=easgd",
    "sync=pr_sgd_momentum sync.local_steps=4",
    "sync=ringleader",
    "sync=asylpg compression=grid optimizer.momentum=0 sync.epoch_steps=20",
)
LATE = (
    "sync=asp overlap=delayed",
    "sync=local_sgd sync.local_steps=4 outer=nesterov overlap=eager optimizer.lr=0.005",
    "sync=local_sgd sync.local_steps=4 compression=topk overlap=overlap_local_sgd",
)
NICS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=50 cluster.latency_s=0.0005"
IN_PARTS = (
    f"sync=bsp overlap=wfbp {NICS}",
    f"sync=rennala overlap=tictac overlap.plan=layers {NICS}",
    f"sync=bsp overlap=slices overlap.slice=100 {NICS}",
    f"sync=bsp overlap=priority overlap.plan=layers overlap.slice=100 overlap.credit=2 {NICS}",
    f"sync=local_sgd sync.local_steps=4 overlap=streaming overlap.delay=2 optimizer.lr=0.005 {NICS}",
    f"sync=bsp topology=sharded_server topology.servers=2 {NICS}",
    f"sync=ssp topology=sharded_server topology.servers=3 {NICS}",
    "sync=spy optimizer.momentum=0 optimizer.weight_decay=0",
)
FAILS = "cluster.events=[{time_s: 1.5, worker: 1, fail: true}]"


@pytest.mark.slow
def test_a_worker_that_fails_as_its_cluster_says(workplace, capsys) -> None:
    assert main(["train", *LONG, "sync=bsp", "stop.seconds=3", FAILS]) == 0
    (lost,) = check_records(workplace / "run", "finished")["failed_workers"]
    assert (lost["worker"], lost["reason"]) == (1, "declared")
    assert lost["time_s"] == 1.5, "as it was declared"
    assert main(["train", *LONG, "sync=bsp", "runtime.min_workers=2", "run.dir=few", FAILS]) == 1
    assert "1 of 2 workers are running, fewer than runtime.min_workers=2" in capsys.readouterr().err
    assert main(["train", *LONG, "schedule.profile_steps=1000", "run.dir=early", FAILS]) == 1
    said = "ashl: worker 1 failed, as cluster.events says; its log is early/rank1.log\n"
    assert capsys.readouterr().err == said, "a stage that profiles cannot do without it"


def check_return(run: Path, rank: int, why: str, status: str = "finished") -> dict:
    """A worker failed and rejoined: steps of both incarnations count, and between them it was down."""
    summary = check_records(run, status)
    (lost,) = summary["failed_workers"]
    assert (lost["worker"], lost["reason"]) == (rank, why)
    assert 0 < lost["time_s"] < lost["rejoined_s"] < summary["time_s"]
    assert summary["workers"][rank]["down_s"] >= lost["rejoined_s"] - lost["time_s"]
    rounds = [
        e for e in jsonl.read(run / "events.jsonl") if e["kind"] == "round" and e["rank"] == rank
    ]
    later = [
        event
        for event in rounds
        if event["start_s"] >= lost["rejoined_s"] - 0.01 and not event["dropped"]
    ]
    assert later, "it works"
    assert summary["workers"][rank]["steps"] > len(later), "and what it did before counts, too"
    kinds = [
        event["kind"]
        for event in jsonl.read(run / "events.jsonl")
        if event["kind"] in ("worker_failed", "worker_rejoined")
    ]
    assert kinds == ["worker_failed", "worker_rejoined"]
    return summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "sync=bsp",
        "sync=ssp",
        "sync=asp",
        "sync=local_sgd sync.local_steps=4",
        "sync=fedbuff",
        "schedule=ashl",
        *OWN,
        *LATE,
        *IN_PARTS,
        "topology=gossip sync=d_psgd cluster.compute=[1,1.5,1]",
        "topology=gossip sync=choco cluster.compute=[1,1.5,1]",
        "topology=gossip sync=ad_psgd cluster.compute=[1,1.5,1]",
        "topology=gossip sync=hop cluster.compute=[1,1.5,1]",
    ],
)
def test_a_killed_worker_is_restarted(mode: str, train, workplace) -> None:
    def kill(run: Path) -> None:
        """Kill worker 1, and end the run once its next incarnation works."""
        lose(run)
        wait_for(lambda: works_again(run))
        os.kill(os.getpid(), signal.SIGINT)

    assert train(kill, *mode.split(), "runtime.max_restarts=1") == (130, INTERRUPTED)
    check_return(workplace / "run", 1, "was killed by SIGKILL", "interrupted")


@pytest.mark.slow
def test_a_worker_with_a_long_pause_is_evicted_and_rejoins(train, workplace) -> None:
    def stop_for_a_while(run: Path) -> None:
        os.kill(stopped := ranks_of(run)[1], signal.SIGSTOP)
        wait_for(lambda: '"worker_failed"' in (run / "events.jsonl").read_text())
        os.kill(stopped, signal.SIGCONT)

    assert train(stop_for_a_while, "runtime.heartbeat_timeout_s=4", "stop.seconds=9") == (0, "")
    check_return(workplace / "run", 1, "sent no heartbeat for 4 s")
    said = (workplace / "run/rank1.log").read_text()
    line = (
        "ashl: worker 1 sent no heartbeat for 4 s (runtime.heartbeat_timeout_s); the run continues"
        " without it"
    )
    assert line in said.splitlines()


@pytest.mark.slow
def test_a_worker_is_killed_while_the_controller_evaluates(train, workplace, monkeypatch) -> None:
    """The survivors wait until the controller looks for failures again."""
    may_begin, has_begun = threading.Event(), threading.Event()
    score = Monitor.score

    def score_slowly(*given: Any) -> Any:
        if may_begin.is_set() and not has_begun.is_set():
            has_begun.set()
            time.sleep(FAILURE_WAIT_S + 3)
        return score(*given)

    def kill(run: Path) -> None:
        may_begin.set()
        wait_for(has_begun.is_set)
        lose(run)
        wait_for(lambda: goes_on(run))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Monitor, "score", score_slowly)
    mode = "topology=all_reduce", "sync=bsp", "cluster.compute=[1,1.5,1]"
    assert train(kill, *mode) == (130, INTERRUPTED)


JOIN = [sys.executable, "-m", "ashl.cli", "join"]


def check_titles(run: Path) -> None:
    """Lists of processes show what each process of a run is."""
    assert {rank: title_of(pid) for rank, pid in ranks_of(run).items()} == {
        0: b"ashl worker 0",
        1: b"ashl worker 1",
        2: b"ashl server",
    }


def title_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")


def check_logs(run: Path) -> None:
    """The logs name the failed worker with the reason, the rejoin, the decisions, and the reason
    for the end.
    """
    lines = (run / "controller.log").read_text().splitlines()
    expected = [
        r"INFO controller: starts a run of 2 workers and 3 ranks, 3 of them on node ",
        r"INFO controller: started rank 1, incarnation 0, as process \d+",
        r"INFO controller: rank 1 reports Placed: host=",
        r"INFO controller: a process on .* asks to join: no worker of this run has failed",
        (
            r"WARNING controller: worker 1, incarnation 0, failed: was killed by SIGKILL; the run"
            r" continues without it"
        ),
        r"INFO controller: a process on .* asks to join: it becomes worker 1",
        r"INFO controller: rank 1 reports WorkerRejoined: time_ns=\d+",
        r"INFO controller: asks all ranks to stop: interrupted",
        r"INFO controller: the run ends: interrupted",
    ]
    for pattern in expected:  # in this order
        while not re.search(pattern, lines.pop(0)):
            assert lines, pattern
    server = (run / "rank2.log").read_text()
    assert "INFO rank 2: starts as the server (rank 2), incarnation 0, process " in server
    assert "WARNING rank 2: worker 1, incarnation 0, failed; continues without it" in server
    assert "INFO rank 2: worker 1 rejoined as incarnation 1; is connected to it" in server
    assert "INFO rank 2: is asked to stop: interrupted" in server
    assert "DEBUG" not in server


def lose(run: Path) -> None:
    """Worker 1, as the run knows by then."""
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    wait_for(lambda: '"worker_failed"' in (run / "events.jsonl").read_text())


def works_again(run: Path) -> bool:
    """Return True if worker 1 has ended a round that began after its rejoin."""
    events = list(jsonl.read(run / "events.jsonl"))
    rejoined_s = [event["time_s"] for event in events if event["kind"] == "worker_rejoined"]
    return any(
        event["start_s"] >= rejoined_s[0] and not event["dropped"]
        for event in events
        if rejoined_s and event["kind"] == "round" and event["rank"] == 1
    )


def goes_on(run: Path) -> bool:
    """Return True if worker 0 has begun a round since the last failure."""
    events = list(jsonl.read(run / "events.jsonl"))
    failed_s = max(event["time_s"] for event in events if event["kind"] == "worker_failed")
    return any(
        event["start_s"] > failed_s
        for event in events
        if event["kind"] == "round" and event["rank"] == 0
    )


@contextmanager
def joined(run: Path) -> Generator[subprocess.Popen[str]]:
    """Somebody on another terminal who has come to take part."""
    with subprocess.Popen(
        [*JOIN, run], cwd=run.parent, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert (
                process.stdout.readline()
                == f"joins {run} as worker 1, which was killed by SIGKILL\n"
            )
            assert process.stdout.readline().startswith("takes part from ")
            size = (run / "events.jsonl").stat().st_size
            wait_for(lambda: '"rank":1' in (run / "events.jsonl").read_text()[size:])
            yield process
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "mode",
    [
        ["sync=bsp"],
        pytest.param(
            ["topology=all_reduce", "sync=bsp", "cluster.compute=[1,1.5,1]"], marks=pytest.mark.slow
        ),
        pytest.param(
            ["topology=partial_all_reduce", "sync=ripples_smart", "cluster.compute=[1,1.5,1]"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["server", "sums", "groups"],
)
def test_the_place_of_a_killed_worker_is_taken_from_another_terminal(
    mode, train, workplace, capsys
) -> None:
    """Each reason for which there is no place is one sentence. The file with the secret is there
    for as long as the run is.
    """

    def join(run: Path) -> None:
        assert stat.S_IMODE((run / "job.json").stat().st_mode) == 0o600
        wait_for(
            lambda: main(["join", str(run)]) == 2 and "has not begun" not in capsys.readouterr().err
        )
        for own, why in (
            (["--worker", "7"], "there is no worker 7"),
            ([], "no worker of this run has failed"),
        ):
            assert main(["join", str(run), *own]) == 2
            assert why in capsys.readouterr().err
        if mode == ["sync=bsp"]:
            assert title_of(os.getpid()) == b"ashl controller"
            check_titles(run)
        lose(run)
        with joined(run) as process:
            os.kill(os.getpid(), signal.SIGINT)
            assert process.stdout is not None
            assert process.stdout.read() == "the run is over\n"
        assert process.returncode == 0

    assert train(join, *mode) == (130, INTERRUPTED)
    check_return(workplace / "run", 1, "was killed by SIGKILL", "interrupted")
    assert not (workplace / "run/job.json").exists()
    if mode == ["sync=bsp"]:
        check_logs(workplace / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "why"), [("SIGINT", 130, "was interrupted"), ("SIGKILL", -9, "disconnected")]
)
def test_a_joined_worker_fails_again(number: str, code: int, why: str, train, workplace) -> None:
    def join(run: Path) -> None:
        lose(run)
        with joined(run) as process:
            process.send_signal(signal.Signals[number])
        assert process.returncode == code
        wait_for(lambda: (run / "events.jsonl").read_text().count('"worker_failed"') == 2)
        wait_for(lambda: goes_on(run))  # a failure after the last round is after the end of the run
        os.kill(os.getpid(), signal.SIGINT)

    assert train(join, "sync=bsp") == (130, INTERRUPTED)
    lost = check_records(workplace / "run", "interrupted")["failed_workers"]
    assert [(of["worker"], of["reason"]) for of in lost] == [(1, "was killed by SIGKILL"), (1, why)]
    assert lost[0]["rejoined_s"] < lost[1]["time_s"]
    assert lost[1]["rejoined_s"] is None


@pytest.mark.slow
def test_a_joined_and_evicted_worker_joins_again(train, workplace) -> None:
    def join(run: Path) -> None:
        lose(run)
        with joined(run) as process:
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: (run / "events.jsonl").read_text().count('"worker_failed"') == 2)
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert (
                process.stdout.readline()
                == f"joins {run} as worker 1, which sent no heartbeat for 4 s\n"
            )
            assert process.stdout.readline().startswith("takes part from ")
            wait_for(lambda: (run / "events.jsonl").read_text().count('"worker_rejoined"') == 2)
            os.kill(os.getpid(), signal.SIGINT)
        assert process.returncode == 0

    assert train(join, "sync=bsp", "runtime.heartbeat_timeout_s=4") == (130, INTERRUPTED)
    lost = check_records(workplace / "run", "interrupted")["failed_workers"]
    assert [of["reason"] for of in lost] == ["was killed by SIGKILL", "sent no heartbeat for 4 s"]
    assert all(of["rejoined_s"] for of in lost)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "there is no run"),
        ({"config.yaml": "", "summary.json": "{}"}, "the run is over"),
        ({"config.yaml": ""}, "this run cannot be joined"),
        ({"job.json": "{"}, "not a valid join endpoint (Expecting"),
        ({"job.json": "{}"}, "not a valid join endpoint (the file is invalid: : Input should be"),
        ({"job.json": '["127.0.0.1", 1, "?"]'}, "not a valid join endpoint (non-hexadecimal"),
        ({"job.json": '["127.0.0.1", 1, "00"]'}, "the run has ended"),
    ],
)
def test_a_folder_that_nobody_can_join(files: dict[str, str], why: str, workplace, capsys) -> None:
    Path("runs/other").mkdir(parents=True)
    for name, text in files.items():
        Path("runs/other", name).write_text(text)
    assert main(["join", "runs/other"]) == 2
    assert why in capsys.readouterr().err


def test_a_file_is_no_run_that_can_be_joined(workplace, capsys) -> None:
    Path("plan.json").write_text("{}")
    assert main(["join", "plan.json"]) == 2
    assert capsys.readouterr().err == (
        "ashl: plan.json: there is no run; name the folder of one that is running\n"
    )


@pytest.mark.slow
def test_a_stopped_server_ends_the_run(train, workplace) -> None:
    code, err = train(
        lambda run: os.kill(ranks_of(run)[2], signal.SIGSTOP), "runtime.heartbeat_timeout_s=5"
    )
    silent = "the server (rank 2) sent no heartbeat for 10 s; the run ends here"
    assert (code, err) == (1, f"ashl: {silent}\n")
    check_records(workplace / "run", "failed")
