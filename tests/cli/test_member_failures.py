"""Members of real collectives fail: the survivors continue.

A worker rejoins from the next merge under all-reduce, and from the next group with groups.
"""

import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch

from ashl.cli.app import main
from ashl.plan.plan import Plan
from ashl.planning.instantiate import assemble_job
from ashl.stage.members import members_of
from ashl.tracking import jsonl
from tests.cli.test_worker_failures import check_return
from tests.disturbed import LONG, check_records, ranks_of
from tests.sim.test_failures_by_mode import Averaged
from tests.sim.test_regrouping import Alone

THREE = "cluster.compute=[1,1.5,1]"
RING = ("topology=all_reduce", "aggregate=uniform", THREE)
GROUPS = ("topology=partial_all_reduce", THREE)
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
def test_the_process_of_a_hanging_worker_is_ended(train, workplace: Path) -> None:
    """Another one takes its place in groups at once."""
    own = ("runtime.heartbeat_timeout_s=4", "stop.seconds=8")
    code, err = train(
        lambda run: os.kill(ranks_of(run)[0], signal.SIGSTOP),
        *GROUPS,
        "sync=ripples_first_come",
        *own,
    )
    assert (code, err) == (0, ""), err
    check_return(workplace / "run", 0, "sent no heartbeat for 4 s")
