"""Workers that are lost and that come back, in gossip: who goes on how, to the nanosecond, and on which models."""

from itertools import pairwise

import pytest
import torch

from ashl.run.mean_model import ModelSet
from ashl.runtime.records import Counts, Snapshot
from tests.sim.test_churn import DETECT_S, back, lost, with_events
from tests.support import planned, run

PAIRS = ("topology=gossip", "cluster=homogeneous", "dataset.batch_size=16", "eval.every_commits=4")


def test_who_waits_for_an_answer_of_the_lost_goes_on_when_it_hears_of_it() -> None:
    """Worker 0 asks after each step of 0.02 s and has the answer 0.01 s later; the other is lost while it is asked."""
    mode = ("sync=swarm", "sync.local_steps=1", "sync.overlap=false", "cluster.compute=[1,1000]", "stop.seconds=0.4")
    ran = run(with_events(planned(*PAIRS, *mode), lost(1, 0.085)))
    ends = [r["end_ns"] for r in ran.of("round") if r["rank"] == 0]
    assert ends[:2] == [30_000_000, 60_000_000]
    assert ends[2] == round((0.085 + DETECT_S) * 1e9)
    assert {after - before for before, after in pairwise(ends[2:-1])} == {20_000_000}, "alone"
    assert ran.end["commits"][1] == 0
    record, params = ran.snapshots[-1]
    assert record["without"] == (1,)
    assert torch.equal(params, ran.models[0]), "the mean is that of those who are left"


def test_who_comes_back_has_the_model_of_a_neighbour() -> None:
    mode = ("sync=swarm", "cluster.compute=[1,1000]", "sync.local_steps=1", "sync.overlap=true")
    events = (lost(1, 0.1), back(1, 0.601))
    ran = run(with_events(planned(*PAIRS, *mode, "stop.seconds=0.6195"), *events))
    assert torch.equal(ran.models[0], ran.models[1])
    assert ran.end["commits"] == [30, 0]
    assert ran.ledgers[1]["down"] == 501_000_000
    assert "without" not in ran.snapshots[-1][0]
    ran = run(with_events(planned(*PAIRS, *mode, "stop.seconds=1"), *events))
    later = [r["staleness"] for r in ran.of("round") if r["rank"] == 0 and r["start_ns"] > 620_000_000]
    assert len(later) > 15
    assert set(later) == {0}
    assert not torch.equal(ran.models[0], ran.models[1])


@pytest.mark.parametrize("mode", ["ad_psgd", "swarm"])
def test_every_evaluation_has_the_models_of_those_who_are_there(mode: str) -> None:
    plan = planned(*PAIRS, f"sync={mode}", "sync.local_steps=1", "cluster.compute=[1,2,4,2]", "stop.steps=80")
    ran = run(with_events(plan, lost(2, 0.1), back(2, 0.25), lost(0, 0.3)))
    assert ran.end["reason"] == "steps"
    assert len(ran.snapshots) > 15
    gone = [record.get("without", ()) for record, _ in ran.snapshots]
    assert {(), (2,), (0,)} == set(gone)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
    whole = run(plan)
    early = sum(record["time_ns"] < 100_000_000 for record, _ in whole.snapshots)
    for (_, mine), (_, theirs) in zip(ran.snapshots[:early], whole.snapshots[:early], strict=True):
        assert torch.equal(mine, theirs), "until somebody is lost, whom anyone meets is drawn as before"


def test_an_evaluation_does_not_wait_for_a_model_of_the_lost() -> None:
    models, counts = ModelSet(3), Counts(3, 3, 1, *([[0] * 3] * 5), 0, None, None, 0.0, None)
    assert models.add(Snapshot(3, 5, tick=1, counts=counts), None) is None
    for rank in (0, 1):
        assert models.add(Snapshot(rank, 6, tick=1), torch.full((2,), float(rank))) is None
    (whole,) = models.lose(2)
    assert whole.params.tolist() == [0.5, 0.5]
    assert models.add(Snapshot(3, 7, tick=2, counts=counts), None) is None
    models.come(2)
    assert models.add(Snapshot(0, 7, tick=2), torch.ones(2)) is None
    assert models.add(Snapshot(1, 7, tick=2), torch.ones(2)) is not None, "who came later was not asked"
