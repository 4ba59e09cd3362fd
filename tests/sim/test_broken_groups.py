"""Failures of group members and rejoining workers, under partial all-reduce in virtual time."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ashl.errors import UsageError
from ashl.planning.compatibility import check_max_restarts
from ashl.planning.instantiate import parts_of
from ashl.run.evaluation import ModelSet
from ashl.runtime.records import Counts, Snapshot
from ashl.runtime.sums import sum_in_rank_order
from tests.sim.test_churn import RUN, back, lost, with_events
from tests.support import Ran, planned, run

GROUPS = (*RUN, "topology=partial_all_reduce", "sync=ripples_first_come")
ALL = (*GROUPS, "sync.group_size=3", "sync.local_steps=3", "optimizer.momentum=0.9")


@pytest.mark.parametrize("moment", [0.51, 0.72], ids=["in compute", "while others wait"])
def test_a_group_of_all_is_an_all_reduce_of_those_who_are_left(moment: float) -> None:
    """The models equal the formula to the bit, with momentum, from the first round without the
    failed worker.
    """
    plan = planned(*ALL, "stop.steps=78")
    ring = planned(
        *RUN,
        "topology=all_reduce",
        "sync=local_sgd",
        "sync.local_steps=3",
        ALL[-1],
        "stop.steps=78",
    )
    mine, theirs = run(with_events(plan, lost(2, moment))), run(with_events(ring, lost(2, moment)))
    assert mine.end["commits"] == theirs.end["commits"]
    assert mine.end["commits"][2] > 1
    models = {record["merges"]: params for record, params in theirs.snapshots}
    last = max(merges for merges in models)
    assert torch.equal(mine.models[0], models[last])
    assert torch.equal(mine.models[1], models[last])


def test_survivors_of_a_group_average_again() -> None:
    """All of the first group have come at 0.24 s. Worker 1 fails during the sum; its work is
    dropped.
    """
    ran = run(with_events(planned(*ALL, "stop.steps=60"), lost(1, 0.243)))
    assert ran.end["commits"][1] == 0
    assert ran.end["dropped_by"] == [0, 3, 0]
    first = [record for record in ran.of("Round") if record["round"] == 0 and record["rank"] != 1]
    assert [record["dropped"] for record in first] == [False, False]
    assert first[0]["end_ns"] > 0.263 * 1e9, "once the loss was noticed"


def present(ran: Ran) -> list[int]:
    return [rank for rank in range(3) if rank in ran.models]


def test_who_comes_has_the_model_of_another() -> None:
    ran = run(with_events(planned(*ALL, "stop.steps=120"), lost(0, 0.3), back(0, 0.7)))
    assert ran.end["commits"][0] > 2
    mean = sum_in_rank_order([ran.models[rank] for rank in present(ran)]) / 3
    assert all(torch.allclose(ran.models[rank], mean, atol=1e-6) for rank in range(3)), (
        "they met in groups of all"
    )
    assert ran.ledgers[0]["down"] == 400_000_000


@pytest.mark.parametrize(
    ("own", "known", "said"),
    [
        (("topology=all_reduce", "sync=bsp"), {}, None),
        (GROUPS[-2:], {}, None),
        (
            (
                "topology=gossip",
                "topology.graph=random_regular",
                "topology.degree=2",
                "sync=d_psgd",
            ),
            {},
            "sync=d_psgd does not support rejoins; remove it, or take",
        ),
        (
            ("topology=parameter_server", "sync=bsp"),
            {"name": "torchrun"},
            "the launcher of the job restarts processes",
        ),
    ],
)
def test_no_worker_is_restarted_in_modes_without_rejoins(
    own: tuple[str, ...], known: dict, said: str | None
) -> None:
    runtime = {
        "name": "local",
        "max_restarts": 1,
        "backend": "auto",
        "device": "cpu",
        "precision": "fp32",
        "graphs": "auto",
    } | known
    parts = replace(parts_of(planned(*RUN, *own)), runtime=SimpleNamespace(**runtime))
    with pytest.raises(UsageError, match=said) if said else nullcontext():
        check_max_restarts(parts)


def test_an_evaluation_does_not_wait_for_failed_workers() -> None:
    models, counts = ModelSet(3), Counts(3, 3, 1, *([[0] * 3] * 5), 0, None, None, 0.0, None)
    assert models.add(Snapshot(3, 5, tick=1, counts=counts), None) is None
    for rank in (0, 1):
        assert models.add(Snapshot(rank, 6, tick=1), torch.full((2,), float(rank))) is None
    (whole,) = models.exclude_worker(2)
    assert whole.params.tolist() == [0.5, 0.5]
    assert models.add(Snapshot(3, 7, tick=2, counts=counts), None) is None
    models.restore_worker(2)
    assert models.add(Snapshot(0, 7, tick=2), torch.ones(2)) is None
    assert models.add(Snapshot(1, 7, tick=2), torch.ones(2)) is not None, (
        "who came later was not asked"
    )
