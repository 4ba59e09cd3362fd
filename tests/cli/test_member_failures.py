"""Members of real collectives fail: the survivors continue.

A worker rejoins from the next merge under all-reduce, and from the next group with groups.
"""

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from ashl.cli.app import main
from ashl.plan.plan import Plan
from ashl.planning.instantiate import assemble_job
from ashl.stage.members import members_of
from ashl.tracking import jsonl
from tests.cli.test_worker_failures import check_return
from tests.disturbed import LONG, check_records, ranks_of, wait_for
from tests.sim.test_failures_by_mode import Averaged
from tests.sim.test_regrouping import Alone

THREE = "cluster.compute=[1,1.5,1]"
RING = ("topology=all_reduce", "aggregate=uniform", THREE)
GROUPS = ("topology=partial_all_reduce", THREE)
AVERAGES = tuple(
    (*GROUPS, f"sync=ripples_{mode}") for mode in ("first_come", "random", "smart", "static")
)
PARTS = (
    "sync=bsp",
    "overlap=wfbp",
    "optimizer.momentum=0.9",
    "model.hidden=[32,32]",
    "cluster.exchange_s=0.02",
)
pytestmark = pytest.mark.timeout(90)


def fails(*events: tuple[int, float]) -> str:
    each = (f"{{time_s: {time_s}, worker: {worker}, fail: true}}" for worker, time_s in events)
    return f"cluster.events=[{', '.join(each)}]"


@pytest.mark.parametrize(
    ("worker", "mode"),
    [
        (0, ("sync=bsp", "optimizer.momentum=0.9")),
        *(
            pytest.param(worker, mode, marks=pytest.mark.slow)
            for worker, mode in (
                (2, ("sync=bsp", "optimizer.momentum=0.9")),
                (1, ("sync=bsp", "compression=topk", "compression.ratio=0.1")),
                (
                    0,
                    (
                        "sync=local_sgd",
                        "sync.local_steps=3",
                        "optimizer.momentum=0.9",
                        "outer=nesterov",
                        "optimizer.lr=0.005",
                    ),
                ),
                (1, ("sync=local_sgd", "sync.local_steps=3", "cluster.exchange_s=0.01")),
                (1, ("sync=pr_sgd_momentum", "sync.local_steps=3", "optimizer.momentum=0.9")),
                (0, PARTS),
            )
        ),
    ],
)
def test_sums_after_a_loss_are_those_of_the_others_alone(
    worker: int, mode: tuple[str, ...], workplace: Path
) -> None:
    """Each round equals the formula to the bit: with all workers until the failure, then with the
    survivors.
    """
    assert main(["train", *LONG, *RING, *mode, fails((worker, 0.3)), "stop.seconds=1.4"]) == 0
    summary = check_records(workplace / "run", "finished")
    assert [(of["worker"], of["time_s"], of["reason"]) for of in summary["failed_workers"]] == [
        (worker, 0.3, "declared")
    ]
    by = Averaged if "sync=pr_sgd_momentum" in mode else Alone
    alone = by(
        assemble_job(Plan.from_json((workplace / "run/plan.json").read_text()), "cpu").stages[0]
    )
    with_it, others = (
        summary["workers"][worker]["commits"],
        [rank for rank in range(3) if rank != worker],
    )
    assert 0 < with_it < summary["commits"]
    for number in range(summary["commits"]):
        alone.round([0, 1, 2] if number < with_it else others)
    assert isinstance(alone.params, torch.Tensor)
    assert summary["params_sha256"] == hashlib.sha256(alone.params.numpy().tobytes()).hexdigest()
    assert summary["workers"][worker]["dropped"] == members_of(alone.stage).planned.steps[worker]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "mode",
    [
        ("sync=bsp", "optimizer.momentum=0.9"),
        ("sync=bsp", "optimizer=adam"),
        (
            "sync=local_sgd",
            "sync.local_steps=3",
            "optimizer.momentum=0.9",
            "outer=nesterov",
            "optimizer.lr=0.005",
        ),
        ("sync=bsp", "compression=topk", "compression.ratio=0.1", "cluster.exchange_s=0.002"),
        PARTS,
    ],
    ids=["momentum", "adam", "outer", "topk", "parts"],
)
def test_sums_after_a_rejoin_are_those_of_all_from_that_state(
    mode: tuple[str, ...], rank: int, train, workplace: Path
) -> None:
    """Rounds of all, of the survivors, and of all again equal the formula to the bit.

    The rejoining worker begins without state of its own.
    """
    own = ("cluster.step_s=0.02", "runtime.max_restarts=1", "stop.seconds=9")
    code, err = train(lambda run: os.kill(ranks_of(run)[rank], signal.SIGKILL), *RING, *mode, *own)
    assert (code, err) == (0, ""), err
    run = workplace / "run"
    summary = check_return(run, rank, "was killed by SIGKILL")
    alone = Alone(assemble_job(Plan.from_json((run / "plan.json").read_text()), "cpu").stages[0])
    rejoined_s, merges = summary["failed_workers"][0]["rejoined_s"], summary["commits"]
    events = jsonl.read(run / "events.jsonl")
    first = min(
        e["round"]
        for e in events
        if e["kind"] == "round" and e["rank"] == rank and e["end_s"] > rejoined_s
    )
    before = first - 1  # one more round was dropped
    since = summary["workers"][rank]["commits"] - before
    for number in range(merges):
        if number == merges - since:
            alone.workers[rank] = alone.worker(
                rank, (before + 1) * members_of(alone.stage).planned.steps[rank]
            )
        here = number < before or number >= merges - since
        alone.round([0, 1, 2] if here else [other for other in range(3) if other != rank])
    assert isinstance(alone.params, torch.Tensor)
    assert summary["params_sha256"] == hashlib.sha256(alone.params.numpy().tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("mode", AVERAGES, ids=lambda mode: mode[-1])
def test_groups_take_in_whoever_is_killed_again_and_again(
    mode: tuple[str, ...], train, workplace: Path
) -> None:
    """Nobody takes a worker for its earlier life, and what counts is in the records."""

    def kill(run: Path) -> None:
        for times, rank in enumerate((0, 3, 0), 1):
            os.kill(ranks_of(run)[rank], signal.SIGKILL)
            wait_for(
                lambda times=times: (
                    (run / "events.jsonl").read_text().count('"worker_rejoined"') == times
                )
            )
            time.sleep(0.2)

    own = (
        "cluster.compute=[1,1.5,1,2]",
        "cluster.exchange_s=0.02",
        "runtime.max_restarts=2",
        "stop.seconds=8",
    )
    assert train(kill, *mode, *own) == (0, "")
    summary = check_records(workplace / "run", "finished")
    assert [of["worker"] for of in summary["failed_workers"]] == [0, 3, 0]
    rounds = [
        e
        for e in jsonl.read(workplace / "run/events.jsonl")
        if e["kind"] == "round" and not e["dropped"]
    ]
    for rank, worker in enumerate(summary["workers"]):
        done = sum(event["steps"] for event in rounds if event["rank"] == rank)
        assert done == worker["steps"] or (rank in (0, 3) and done < worker["steps"]), (
            "not all was told before a kill"
        )
        later = [
            e
            for e in rounds
            if e["rank"] == rank and e["start_s"] > summary["failed_workers"][-1]["rejoined_s"]
        ]
        assert {len(event["group"]) > 1 for event in later} >= {True}, "it meets others"


@pytest.mark.slow
def test_two_killed_workers_rejoin_also_over_a_stage_boundary(train, workplace: Path) -> None:
    def kill(run: Path) -> None:
        os.kill(ranks_of(run)[0], signal.SIGKILL)
        time.sleep(0.5)
        os.kill(ranks_of(run)[2], signal.SIGKILL)

    own = ("schedule=post_local", "runtime.max_restarts=1", "stop.seconds=12")
    assert train(kill, *RING, *own) == (0, "")
    lost = check_records(workplace / "run", "finished")["failed_workers"]
    assert [of["worker"] for of in lost] == [0, 2]
    assert all(of["rejoined_s"] for of in lost)


@pytest.mark.slow
def test_the_process_of_a_hanging_worker_is_ended(train, workplace: Path) -> None:
    """Another one takes its place in groups at once."""
    own = ("runtime.heartbeat_timeout_s=4", "stop.seconds=8")
    code, err = train(lambda run: os.kill(ranks_of(run)[0], signal.SIGSTOP), *AVERAGES[0], *own)
    assert (code, err) == (0, ""), err
    check_return(workplace / "run", 0, "sent no heartbeat for 4 s")
