"""Workers of a real run that are killed or stand still: the others go on, and who comes back takes part again."""

import os
import signal
import time
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.tracking import jsonl
from tests.disturbed import LONG, check_records, ranks_of, wait_for

FAILS = "cluster.events=[{time_s: 1.5, worker: 1, fail: true}]"


@pytest.mark.parametrize(
    ("rank", "mode"),
    [
        (1, "sync=ssp"),
        *(
            pytest.param(rank, mode, marks=pytest.mark.slow)
            for mode in ("sync=bsp", "sync=local_sgd sync.local_steps=4", "sync=asp", "sync=fedbuff", "sync=backup")
            for rank in (0, 1)  # the first waits at a barrier, the second computes
        ),
    ],
)
def test_a_run_goes_on_without_a_killed_worker(rank: int, mode: str, train, workplace) -> None:
    code, err = train(lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL), *mode.split(), "stop.seconds=3")
    assert (code, err) == (0, "")
    summary = check_records(workplace / "run", "finished")
    (lost,) = summary["lost_workers"]
    assert (lost["worker"], lost["why"], lost["back_s"]) == (rank, "was killed by SIGKILL", None)
    away_s = summary["workers"][rank]["down_s"]
    assert away_s == pytest.approx(summary["time_s"] - lost["time_s"], abs=0.5)
    assert summary["workers"][1 - rank]["down_s"] == 0
    assert summary["workers"][1 - rank]["commits"] > summary["workers"][rank]["commits"]


@pytest.mark.slow
def test_a_worker_that_fails_as_its_cluster_says(workplace, capsys) -> None:
    assert main(["train", *LONG, "sync=bsp", "stop.seconds=3", FAILS]) == 0
    (lost,) = check_records(workplace / "run", "finished")["lost_workers"]
    assert (lost["worker"], lost["why"]) == (1, "declared")
    assert lost["time_s"] == pytest.approx(1.5, abs=0.5)
    assert main(["train", *LONG, "sync=bsp", "runtime.min_workers=2", "run.dir=few", FAILS]) == 1
    assert "1 of 2 workers are left, fewer than runtime.min_workers=2" in capsys.readouterr().err
    assert main(["train", *LONG, "schedule.profile_steps=1000", "run.dir=early", FAILS]) == 1
    said = "ashl: worker 1 failed, as cluster.events says; its log is early/rank1.log\n"
    assert capsys.readouterr().err == said, "a stage that profiles cannot do without it"


def check_return(run: Path, rank: int, why: str) -> dict:
    """A worker was lost and is back: what it did in both lives counts, and in between it was down."""
    summary = check_records(run, "finished")
    (lost,) = summary["lost_workers"]
    assert (lost["worker"], lost["why"]) == (rank, why)
    assert 0 < lost["time_s"] < lost["back_s"] < summary["time_s"]
    assert summary["workers"][rank]["down_s"] >= lost["back_s"] - lost["time_s"]
    rounds = [e for e in jsonl.read(run / "events.jsonl") if e["kind"] == "round" and e["rank"] == rank]
    later = [event for event in rounds if event["start_s"] >= lost["back_s"] - 0.01]
    assert later, "it works"
    assert summary["workers"][rank]["steps"] > len(later), "and what it did before counts, too"
    kinds = [event["kind"] for event in jsonl.read(run / "events.jsonl") if event["kind"] in ("lost", "joined")]
    assert kinds == ["lost", "joined"]
    return summary


@pytest.mark.parametrize(
    "mode", ["sync=bsp", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync=ssp", "schedule=ashl"))]
)
def test_a_killed_worker_is_started_anew(mode: str, train, workplace) -> None:
    kill, own = lambda run: os.kill(ranks_of(run)[1], signal.SIGKILL), ["stop.seconds=5", "runtime.respawn=1"]
    assert train(kill, mode, *own) == (0, "")
    check_return(workplace / "run", 1, "was killed by SIGKILL")


def test_a_worker_that_stood_still_for_too_long_is_dropped_and_comes_anew(train, workplace) -> None:
    def stop_for_a_while(run: Path) -> None:
        os.kill(stopped := ranks_of(run)[1], signal.SIGSTOP)
        wait_for(lambda: '"lost"' in (run / "events.jsonl").read_text())
        os.kill(stopped, signal.SIGCONT)

    assert train(stop_for_a_while, "runtime.timeout_s=4", "stop.seconds=9") == (0, "")
    check_return(workplace / "run", 1, "was not heard of for 4 s")
    said = (workplace / "run/rank1.log").read_text()
    assert said == "ashl: worker 1 was not heard of for 4 s (runtime.timeout_s), and the run went on\n"


@pytest.mark.slow
def test_a_worker_that_stands_still_for_less_is_late(train, workplace) -> None:
    def stop_for_a_while(run: Path) -> None:
        os.kill(stopped := ranks_of(run)[1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(stopped, signal.SIGCONT)

    assert train(stop_for_a_while, "sync=bsp", "runtime.timeout_s=6", "stop.seconds=5") == (0, "")
    assert check_records(workplace / "run", "finished")["lost_workers"] == []


@pytest.mark.slow
def test_a_stopped_server_is_late(train, workplace) -> None:
    code, err = train(lambda run: os.kill(ranks_of(run)[2], signal.SIGSTOP), "runtime.timeout_s=5")
    late = "the server (rank 2) was not heard of for 5 s (runtime.timeout_s) and is late; the run ends here"
    assert (code, err) == (1, f"ashl: {late}\n")
    check_records(workplace / "run", "failed")
