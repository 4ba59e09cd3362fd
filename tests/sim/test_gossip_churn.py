"""Workers that are lost and that come back, in gossip: who goes on how, to the nanosecond, and on which models."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ashl.errors import AshlError, UsageError
from ashl.plan.plan import Plan
from ashl.planning.build import assemble, parts_of
from ashl.planning.legal_churn import check_churn
from ashl.run.mean_model import ModelSet
from ashl.runtime.records import Counts, Snapshot
from ashl.runtime.sums import sum_in_rank_order
from ashl.sync import d_admm, hop
from tests.sim.test_churn import DETECT_S, back, lost, with_events
from tests.support import Ran, planned, run

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


ROUNDS = (
    "topology=gossip",
    "cluster=homogeneous",
    "cluster.compute=[1,2,4,2]",
    "dataset.batch_size=16",
    "eval.every_commits=1",
)


def with_models(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Ran, dict[tuple[int, int], torch.Tensor]]:
    """A run, and by rank and merge each worker's model."""
    models, kept = {}, Ran.snapshot

    def keep(ran, record, vector) -> None:
        if record.tick is not None:
            models[record.rank, record.tick] = vector
        kept(ran, record, vector)

    monkeypatch.setattr(Ran, "snapshot", keep)
    return run(plan), models


def mixed(rank: int, row: dict[int, float], now: dict, made: dict, order: str) -> torch.Tensor:
    """A worker's next model: the average of what those in its row sent, by weight, and what it made itself."""
    sent = {j: now[j] + made[j] if order == "atc" else now[j] for j in row}
    (j, weight), *others = row.items()
    total = sent[j] * weight
    for j, weight in others:
        total.add_(sent[j], alpha=weight)
    return total if order == "atc" else total + made[rank]


@pytest.mark.parametrize(
    ("mode", "order", "period"),
    [
        (("sync=d_psgd", "sync.order=awc"), "awc", None),
        (("sync=d_psgd", "sync.order=atc"), "atc", None),
        (("sync=gossip_pga", "sync.period=3"), "atc", 3),
    ],
)
def test_rounds_after_a_loss_are_those_of_the_others_alone(
    mode: tuple[str, ...], order: str, period: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a ring of four worker 1 is lost: 0 and 2 hear of it, 3 from them. What is left is the path 0, 3, 2. Where all
    meet every so often, it is these three."""
    own = ("sync.local_steps=2", "optimizer.momentum=0.9", "stop.steps=140")
    plan = with_events(planned(*ROUNDS, *mode, *own), lost(1, 0.83))
    ran, models = with_models(plan, monkeypatch)
    first = next(record["merges"] for record, _ in ran.snapshots if record.get("without")) - 1
    assert 3 < first < ran.end["merges"] - 5
    third = 1 / 3
    rows = {0: {0: 1 - third, 3: third}, 2: {2: 1 - third, 3: third}, 3: {0: third, 2: third, 3: 1 - (third + third)}}
    stage = assemble(plan, "cpu").stages[0]
    trainer, samples = stage.trainer, {record["merges"]: record["samples"] for record, _ in ran.snapshots} | {0: 0}
    moments = {rank: trainer.moments() for rank in rows}
    now = dict.fromkeys(rows, trainer.init()[0])
    for k in range(ran.end["merges"] - 1):  # the last one may be cut short
        made = {}
        for rank in rows:
            local = now[rank]
            for step in (2 * k, 2 * k + 1):
                span, rate = range(16 * step, 16 * step + 16), trainer.rate(samples[k])
                _, moments[rank], local = trainer.local_step(local, moments[rank], rank, step, rate, span)
            made[rank] = local - now[rank]
        mean = sum_in_rank_order([(now[rank] + made[rank]) * third for rank in rows])
        now = {rank: mixed(rank, row, now, made, order) for rank, row in rows.items()}
        now = now if period is None or (k + 1) % period else dict.fromkeys(rows, mean)
        for rank in rows:
            if k < first:
                now[rank] = models[rank, k + 1]
            assert torch.equal(now[rank], models[rank, k + 1]), (rank, k)


@pytest.mark.parametrize("mode", ["d_psgd", "sgp", "choco", "matcha", "noloco", "relay_sum"])
def test_gossip_in_rounds_goes_on_without_any_worker(mode: str) -> None:
    """Also without rank 0, which counts and judges: the next one does. What counts, somebody has heard."""
    plan = planned(*ROUNDS, "topology.graph=complete", f"sync={mode}", "sync.local_steps=1", "stop.steps=60")
    ran = run(with_events(plan, lost(2, 0.17), lost(0, 0.5)))
    assert (ran.end["reason"], ran.end["rank"]) == ("steps", 1)
    assert ran.end["commits"][1] == ran.end["commits"][3] == ran.end["merges"]
    assert ran.end["commits"][2] < ran.end["commits"][0] < ran.end["merges"]
    for rank in (0, 2):
        done = sum(record["rank"] == rank for record in ran.of("round"))
        assert ran.end["commits"][rank] <= done + 1
    record, params = ran.snapshots[-1]
    assert record["without"] == (0, 2)
    assert torch.allclose(params, (ran.models[1] + ran.models[3]) / 2, atol=1e-6)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_a_graph_that_falls_apart_ends_the_run_in_one_sentence() -> None:
    plan = planned(*ROUNDS, "sync=d_psgd", "stop.steps=200", "runtime.gradients=false")
    with pytest.raises(
        AshlError, match=r"without worker 0, 2 the graph of those who are left falls apart at 0\.52\d* s"
    ):
        run(with_events(plan, lost(0, 0.1), lost(2, 0.5)))
    with pytest.raises(
        AshlError, match=r"worker 2 is lost .* 2 of 4 workers are left, fewer than runtime\.min_workers=3"
    ):
        run(with_events(replace(plan, runtime=plan.runtime | {"min_workers": 3}), lost(0, 0.1), lost(2, 0.5)))


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_rounds_after_a_return_are_those_of_all_with_the_model_of_a_neighbour(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 of a ring of four is lost and comes back: from its first round on it is the ring as it was, with the
    model that worker 0 had before it, and with empty moments."""
    mode = ("sync=d_psgd", f"sync.order={order}", "sync.local_steps=2", "optimizer.momentum=0.9", "stop.steps=160")
    plan = with_events(planned(*ROUNDS, *mode), lost(1, 0.4), back(1, 0.8))
    ran, models = with_models(plan, monkeypatch)
    without = [record["merges"] for record, _ in ran.snapshots if record.get("without")]
    first = without[-1]  # rounds before the one that it begins with
    last = ran.end["merges"] - 1  # the last one may be cut short
    assert 3 < first < last - 4
    assert (1, first) not in models
    stage = assemble(plan, "cpu").stages[0]
    trainer, samples = stage.trainer, {record["merges"]: record["samples"] for record, _ in ran.snapshots} | {0: 0}
    done = {rank: 2 * first for rank in (0, 2, 3)}
    done[1] = ran.end["steps_by"][1] - (ran.end["steps_by"][0] - 2 * first)  # what was counted of its first life
    start, now = trainer.init()[0], {rank: models[rank, first] for rank in (0, 2, 3)}
    now[1] = now[0]
    moments = {rank: trainer.moments() for rank in range(4)}
    replay = dict.fromkeys((0, 2, 3), start)
    for k in range(first):  # for the moments alone
        for rank in replay:
            local = start if k == 0 else models[rank, k]
            for step in (2 * k, 2 * k + 1):
                span, rate = range(16 * step, 16 * step + 16), trainer.rate(samples[k])
                _, moments[rank], local = trainer.local_step(local, moments[rank], rank, step, rate, span)
    third, made = 1 / 3, {}
    for k in range(first, last):
        for rank in range(4):
            local = now[rank]
            for i in range(2):
                step = done[rank] + 2 * (k - first) + i
                span, rate = range(16 * step, 16 * step + 16), trainer.rate(samples[k])
                _, moments[rank], local = trainer.local_step(local, moments[rank], rank, step, rate, span)
            made[rank] = local - now[rank]
        near = [sorted({rank, (rank + 1) % 4, (rank - 1) % 4}) for rank in range(4)]
        rows = [{j: third if j != rank else 1 - (third + third) for j in near[rank]} for rank in range(4)]
        now = {rank: mixed(rank, rows[rank], now, made, order) for rank in range(4)}
        assert all(torch.equal(now[rank], models[rank, k + 1]) for rank in range(4)), k


@pytest.mark.parametrize("mode", ["d_psgd", "sgp", "choco", "matcha", "noloco", "relay_sum"])
def test_any_worker_comes_back_to_gossip_in_rounds(mode: str) -> None:
    """Also rank 0, which counts and judges again then."""
    plan = planned(*ROUNDS, "topology.graph=ring", f"sync={mode}", "sync.local_steps=1", "stop.steps=120")
    ran = run(with_events(plan, lost(2, 0.17), lost(0, 0.5), back(2, 0.4), back(0, 1.0)))
    assert (ran.end["reason"], ran.end["rank"]) == ("steps", 0)
    assert ran.end["commits"][1] == ran.end["commits"][3] == ran.end["merges"]
    assert max(ran.end["commits"][0], ran.end["commits"][2]) < ran.end["merges"]
    assert min(ran.end["commits"][0], ran.end["commits"][2]) > 5
    record, params = ran.snapshots[-1]
    assert "without" not in record
    assert torch.allclose(params, sum(ran.models[rank] for rank in range(4)) / 4, atol=1e-6)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


@pytest.mark.parametrize("lost_s", [0.85, 0.9, 0.95])
def test_who_gives_its_model_to_one_that_comes_is_lost(lost_s: float) -> None:
    """Worker 0 comes back and has the model of 1 at 0.868 s, and at 0.932 s what belongs to it. Where 1 is lost between
    the two, only 0 waits for it, and has to tell 2 and 3, which wait for 0 in its first round."""
    links = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=5", "cluster.latency_s=0.001")
    plan = planned(*ROUNDS, *links, "topology.graph=complete", "sync=d_psgd", "sync.local_steps=1", "stop.steps=80")
    ran = run(with_events(plan, lost(0, 0.1), back(0, 0.5), lost(1, lost_s)))
    assert (ran.end["reason"], ran.end["rank"]) == ("steps", 0)
    assert ran.end["commits"][2] == ran.end["commits"][3] == ran.end["merges"] > ran.end["commits"][0] > 20
    record, params = ran.snapshots[-1]
    assert record["without"] == (1,)
    assert torch.allclose(params, (ran.models[0] + ran.models[2] + ran.models[3]) / 3, atol=1e-6)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


@pytest.mark.parametrize("graph", ["ring", "complete"])
@pytest.mark.parametrize(("mode", "more"), [("hop", 0), ("hop", 1), ("d_admm", 0), ("d_admm", 1)])
def test_neighbours_that_wait_for_each_other_go_on_without_the_lost(mode: str, more: int, graph: str) -> None:
    """Without delay, too, where all of them are in step and count on each other."""
    delay = {"hop": f"sync.staleness={more}", "d_admm": f"sync.delay={more}"}[mode]
    plan = planned(*ROUNDS, f"topology.graph={graph}", f"sync={mode}", delay, "sync.local_steps=1", "stop.steps=120")
    ran = run(with_events(plan, lost(2, 0.17), lost(0, 0.5)))
    assert ran.end["reason"] == "steps"
    done = ran.end["commits"]
    assert done[2] < done[0] < min(done[1], done[3])
    assert abs(done[1] - done[3]) <= 1 + more
    record, params = ran.snapshots[-1]
    assert record["without"] == (0, 2)
    assert torch.allclose(params, (ran.models[1] + ran.models[3]) / 2, atol=1e-6)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_means_of_hop_are_over_those_who_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found, mixed = [], hop.mixed

    def noted(rule, k, own, rank, heard, age=0):
        found.append((rank, set(heard)))
        return mixed(rule, k, own, rank, heard, age)

    monkeypatch.setattr(hop, "mixed", noted)
    plan = planned(*ROUNDS, "topology.graph=complete", "sync=hop", "sync.local_steps=1", "stop.steps=120")
    run(with_events(plan, lost(2, 0.5)))
    for rank in (0, 1, 3):
        with_whom = [known for who, known in found if who == rank]
        assert with_whom[0] == {0, 1, 2, 3} - {rank}
        assert with_whom[-1] == {0, 1, 3} - {rank}
        assert with_whom == sorted(with_whom, key=len, reverse=True), "from the loss on for good"


@pytest.mark.parametrize("delay", [0, 2])
def test_duals_of_those_who_are_left_add_up_to_zero(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the edges of the lost had brought into them is taken out."""
    edges, opened = {}, d_admm.opened

    def noted(stage, state, rank):
        edges[rank] = opened(stage, state, rank)
        return edges[rank]

    monkeypatch.setattr(d_admm, "opened", noted)
    own = ("sync=d_admm", "sync.local_steps=1", f"sync.delay={delay}", "topology.graph=complete", "stop.steps=200")
    run(with_events(planned(*ROUNDS, *own), lost(2, 1.0)))
    duals = [edges[rank].dual for rank in (0, 1, 3)]
    assert sum(duals).norm() < 1e-5 * min(dual.norm() for dual in duals)
    assert edges[2].dual.norm() > 0.01, "the sum of all was zero with it"


def test_an_average_that_lacks_a_worker_comes_to_nothing() -> None:
    """All meet in every second round. Whenever one is lost, in a sum or between two, everybody goes on: whom it keeps
    waiting hears of it on a ring, too, where one is no neighbour of it."""
    mode = ("sync=gossip_pga", "sync.period=2", "sync.local_steps=1", "runtime.gradients=false", "stop.steps=40")
    plan = planned(*ROUNDS, *mode, "cluster.compute=[1,1,1,1]")
    times = [record["time_ns"] for record, _ in run(plan).snapshots]
    for moment in range(times[1], times[3], (times[3] - times[1]) // 40):
        for rank in (0, 1):
            ran = run(with_events(plan, lost(rank, moment / 1e9)))
            assert ran.end["reason"] == "steps"
            assert ran.end["commits"].count(ran.end["merges"]) == 3
            assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


def test_a_graph_that_falls_apart_in_the_next_stage_ends_the_run() -> None:
    """Without worker 0 all are still linked in the first stage, and a star has lost its middle in the second."""
    plan = planned(*ROUNDS, "sync=d_psgd", "stop.steps=200", "runtime.gradients=false", "topology.graph=complete")
    (stage,) = plan.stages
    star = replace(stage, topology=stage.topology | {"graph": "star"})
    plan = replace(plan, stages=(replace(stage, until={"commits": 8}), star))
    with pytest.raises(AshlError, match="without worker 0 the graph of those who are left falls apart"):
        run(with_events(plan, lost(0, 0.1)))


@pytest.mark.parametrize("mode", ["hop", "d_admm", "gossip_pga"])
def test_who_comes_back_to_those_who_wait_for_each_other_is_refused(mode: str) -> None:
    plan = planned(*ROUNDS, f"sync={mode}", "runtime.gradients=false")
    parts = parts_of(with_events(plan, lost(1, 0.5), back(1, 0.7)))
    with pytest.raises(UsageError, match=f"has sync={mode}, where a worker that is lost cannot come back yet; take"):
        check_churn(parts, plan.stages, None)


def two_stages(commits: int, *overrides: str) -> Plan:
    """A plan whose first stage ends after so many rounds."""
    plan = planned(*ROUNDS, *overrides)
    (stage,) = plan.stages
    return replace(plan, stages=(replace(stage, until={"commits": commits}), replace(stage, name="second")))


@pytest.mark.parametrize("mode", ["d_psgd", "sgp", "choco", "matcha", "noloco", "relay_sum"])
@pytest.mark.parametrize(("back_s", "index"), [(0.4, 0), (0.93, 1), (1.2, 1)])
def test_a_worker_comes_back_before_at_and_after_the_border_of_stages(mode: str, back_s: float, index: int) -> None:
    """Worker 0, which counts and judges, without which the first stage would end at 0.96 s."""
    plan = two_stages(8, f"sync={mode}", "sync.local_steps=1", "topology.graph=ring", "stop.steps=120")
    ran = run(with_events(plan, lost(0, 0.17), back(0, back_s)))
    first, end = ran.of("stage")
    assert (first["stage"], end["stage"], end["reason"], end["rank"]) == (0, 1, "steps", 0)
    assert ran.end["commits"][1] == ran.end["commits"][3] == ran.end["merges"] > ran.end["commits"][0] > 10
    rounds = [record for record in ran.of("round") if record["rank"] == 0 and record["start_ns"] > back_s * 1e9]
    assert rounds[0]["stage"] == index
    assert [record["round"] for record in rounds] == [*range(rounds[0]["round"], rounds[0]["round"] + len(rounds))]
    assert "without" not in ran.snapshots[-1][0]
    assert torch.allclose(ran.snapshots[-1][1], sum(ran.models[rank] for rank in range(4)) / 4, atol=1e-6)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
