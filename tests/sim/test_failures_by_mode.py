"""Workers fail and rejoin in modes with more messages than updates: momenta, elastic models,
gradient tables, snapshots.

Each is compared with the rule's formula alone, in the order of the pushes.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ashl.aggregate.weighted import Push
from ashl.data.quadratic import optimum
from ashl.planning.instantiate import assemble_job
from ashl.runtime.sums import sum_in_rank_order
from ashl.size_only import join_vectors, split_vectors
from ashl.stage.contract import StageConfig
from ashl.stage.members import members_of
from ashl.sync.asylpg import Epoch
from ashl.sync.easgd import EASGD
from ashl.sync.ringleader import Ringleader, Table
from ashl.topology.local_work import WorkerState
from ashl.topology.parameter_server import ServerState
from tests.sim.test_churn import RUN, back, lost, with_events
from tests.sim.test_regrouping import Alone, models
from tests.support import Ran, planned, run


class Averaged(Alone):
    """Rounds of PR-SGD with momentum, of some workers."""

    def round(self, members: Sequence[int]) -> Tensor:
        bodies, (mean,) = list[Tensor](), self.moments
        for rank in members:
            self.workers[rank].moments = self.moments
            moved = self.update(rank)
            bodies.append(
                join_vectors(moved, self.workers[rank].moments[0] - mean) * (1 / len(members))
            )
        moved, turned = split_vectors(sum_in_rank_order(bodies))
        self.moments = (mean + turned,)
        self.outer, self.params = self.stage.outer.step(self.outer, self.params, moved, 1.0)
        self.samples += sum(members_of(self.stage).planned.samples[rank] for rank in members)
        return self.params


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_momenta_are_those_of_who_is_there(topology: str) -> None:
    """A rejoining worker begins with the mean momentum of the others, as they do, to the bit."""
    mode = (
        "sync=pr_sgd_momentum",
        "sync.local_steps=3",
        "optimizer.momentum=0.9",
        f"topology={topology}",
    )
    events = lost(0, 0.51), back(0, 1.2)
    plan = with_events(
        planned(*RUN, *mode, "aggregate=uniform", "outer=nesterov", "stop.steps=99"), *events
    )
    ran, alone = run(plan), Averaged(assemble_job(plan, "cpu").stages[0])
    found, before, teams = models(ran), [0, 0, 0], list[list[int]]()
    for record, _ in ran.snapshots:
        teams.append([rank for rank in range(3) if record["commits"][rank] > before[rank]])
        before = record["commits"]
    teams = [team for team in teams if team]
    assert [team for at, team in enumerate(teams) if not at or teams[at - 1] != team] == [
        [0, 1, 2],
        [1, 2],
        [0, 1, 2],
    ]
    for number, team in enumerate(teams[:-1], 1):  # the last round may be cut short
        if len(team) == 3 and number > 1 and len(teams[number - 2]) == 2:
            done = before[0] - len(teams) + number - 1 + ran.end["dropped_by"][0] // 3
            alone.workers[0] = alone.worker(0, done * 3)
        assert torch.equal(found[number], alone.round(team)), number


def pushes(ran: Ran) -> Iterator[tuple[int, int, Tensor]]:
    """Return for each counted push the worker, the time of its merge, and the model after it."""
    before = [0, 0, 0]
    for record, params in ran.snapshots:
        changed = [rank for rank in range(3) if record["commits"][rank] > before[rank]]
        for rank in changed:
            yield rank, record["time_ns"], params
        before = record["commits"]


def steps_of(
    stage: StageConfig, worker: WorkerState, rank: int, params: Tensor, steps: int
) -> Tensor:
    """Local steps of a worker."""
    for _ in range(steps):
        span = range(worker.drawn, worker.drawn + worker.batch)
        rate = stage.trainer.rate(0)
        _, worker.moments, params = stage.trainer.local_step(
            params, worker.moments, rank, worker.step, rate, span
        )
        worker.step, worker.drawn = worker.step + 1, span.stop
    return params


def test_a_rejoining_worker_begins_at_the_servers_model() -> None:
    """The models equal the formula to the bit; those of the others and the server do not change."""
    mode = ("sync=easgd", "sync.local_steps=2", "optimizer.momentum=0.9", "stop.steps=90")
    plan = with_events(planned(*RUN, *mode), lost(0, 0.5), back(0, 0.93))
    ran, stage = run(plan), assemble_job(plan, "cpu").stages[0]
    assert isinstance(stage.sync, EASGD)
    centre, moments = stage.trainer.init()
    workers, own, history = [WorkerState(centre, moments) for _ in range(3)], [centre] * 3, [centre]
    for rank, worker in enumerate(workers):
        worker.enter(stage, members_of(stage), rank)
    came = next(
        r["staleness"] for r in ran.of("Round") if r["rank"] == 0 and r["end_ns"] > 930_000_000
    )
    away = True
    for rank, time_ns, params in pushes(ran):
        if away and rank == 0 and time_ns > 930_000_000:
            away, own[0], workers[0].moments = False, history[len(history) - 1 - came], moments
        moved = own[rank] + (steps_of(stage, workers[rank], rank, own[rank], 2) - own[rank])
        pull = (moved - centre) * stage.sync.alpha
        centre, own[rank] = centre + pull, moved - pull
        history.append(centre)
        assert torch.equal(centre, params), len(history)
    assert not away
    assert ran.end["reason"] == "steps"


# --- a table of gradients
# ---------------------------------------------------------------------------------------------


def test_a_ringleader_steps_along_the_mean_of_those_who_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every gradient is in the model, or waits, or is dropped, to the bit, by the list of arrivals
    and failures.
    """
    mode = ("sync=ringleader", "aggregate=uniform", "optimizer.momentum=0.9", "stop.steps=80")
    plan = with_events(
        planned(*RUN, *mode), lost(2, 0.26), back(2, 0.6), lost(0, 0.85), back(0, 0.93)
    )
    came, take = list[tuple[int, Tensor | None]](), Table.add_push
    without, with_joined = Ringleader.without, Ringleader.with_joined

    def taking(table: Table, push: Push) -> bool:
        came.append((push.worker, push.payload))
        return take(table, push)

    def failing(rule: Ringleader, stage: StageConfig, state: ServerState, rank: int) -> None:
        came.append((rank, None))
        without(rule, stage, state, rank)

    def joining(rule: Ringleader, stage: StageConfig, state: ServerState, rank: int) -> None:
        came.append((rank, None))
        with_joined(rule, stage, state, rank)

    monkeypatch.setattr(Table, "add_push", taking)
    monkeypatch.setattr(Ringleader, "without", failing)
    monkeypatch.setattr(Ringleader, "with_joined", joining)
    ran = run(plan)
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    params, moments = trainer.init()
    there, due, now, later, dropped = {0, 1, 2}, {0, 1, 2}, dict[int, list](), dict[int, list](), 0
    used = False
    for worker, gradient in came:
        if gradient is None:
            if worker in there:
                dropped += len(later.pop(worker, [])) + (0 if used else len(now.get(worker, [])))
                now.pop(worker, None)
            there ^= {worker}
            due &= there
        elif worker not in due:
            later.setdefault(worker, []).append(gradient)
        else:
            now.setdefault(worker, []).append(gradient)
            if due <= now.keys():
                means = [
                    sum(now[rank][1:], now[rank][0]) * (1 / len(now) / len(now[rank]))
                    for rank in sorted(now)
                ]
                moments, params = trainer.apply(
                    params, moments, sum_in_rank_order(means), trainer.rate(0)
                )
                due, used = due - {worker}, True
        if not due:
            due, now, later, used = set(there), later, {}, False
    assert [gradient for _, gradient in came].count(None) == 4
    assert torch.equal(params, ran.params)
    assert sum(ran.end["dropped_by"]) == dropped > 0
    assert ran.end["steps"] == sum(gradient is not None for _, gradient in came) - dropped


# --- snapshots
# --------------------------------------------------------------------------------------------------


def gradients(*parts: tuple[float, int]) -> float:
    return sum(gradient * samples for gradient, samples in parts) / sum(
        samples for _, samples in parts
    )


def test_a_full_gradient_is_over_all_who_have_sent_theirs() -> None:
    epoch = Epoch(None, {0, 1, 2}, 5)
    assert epoch.add_gradient(0, 1.0, 10)
    assert epoch.add_gradient(1, 4.0, 20)
    epoch.finish_gathering()
    assert epoch.gathers
    epoch.full_gradient_due.discard(2)
    epoch.finish_gathering()
    assert (epoch.gathers, epoch.gradient) == (False, gradients((1.0, 10), (4.0, 20))), "it is lost"
    epoch.full_gradient_due |= {0, 2}
    assert epoch.add_gradient(2, 7.0, 30)
    assert epoch.gradient == pytest.approx(gradients((1.0, 10), (4.0, 20), (7.0, 30))), (
        "... and comes back"
    )
    before = epoch.gradient
    assert not epoch.add_gradient(0, 1.0, 10), "who had sent it before"
    assert (epoch.gradient, epoch.full_gradient_due) == (before, set())


@pytest.mark.slow
def test_it_still_comes_to_the_optimum() -> None:
    """The run converges linearly, as each worker uses the snapshot of all others, after any missed
    messages.

    This also holds if the worker of the last missing full gradient fails, and the rejoining one had
    sent its own before.
    """
    data = (
        "dataset=quadratic",
        "model=linear",
        "optimizer.lr=0.2",
        "dataset.batch_size=40",
        "stop.epochs=36",
    )
    plain = ("optimizer.momentum=0", "optimizer.weight_decay=0", "sync=asylpg", "compression=grid")
    plan = planned(
        *data, *plain, "compression.bits=4", "cluster=homogeneous", "cluster.compute=[1,2,4]"
    )
    whole = run(plan)
    early_s = next(r["end_ns"] for r in whole.of("Round") if r["rank"] == 0) / 1e9
    half_s = whole.time_ns / 2e9
    events = (
        lost(2, early_s),
        lost(0, early_s + 0.03),
        back(0, early_s + 0.05),
        back(2, half_s),
        lost(1, half_s),
    )
    ran = run(with_events(plan, *events, back(1, 1.2 * half_s)))
    assert len(ran.of("WorkerFailed")) == len(ran.of("WorkerRejoined")) == 3
    best, _ = optimum(assemble_job(plan, "cpu").data)
    first = assemble_job(plan, "cpu").learner.init()
    apart = [float((params - best).norm()) for params in (first, whole.params, ran.params)]
    assert apart[2] < 1e-3 * apart[0]


# --- a tree of servers


@pytest.mark.parametrize("sync", ["asp", "ssp", "dssp", "fedbuff"])
def test_the_server_of_a_region_drops_and_admits_its_workers(sync: str) -> None:
    """All steps are in the counts, also if a region has no worker for a while."""
    regions = ("topology=halos", "topology.regions=[0,0,1,1]", "cluster.compute=[1,2,4,1]")
    plan = planned(*RUN, *regions, f"sync={sync}", "stop.steps=160", "runtime.gradients=false")
    alone = (lost(1, 0.512), back(1, 0.52), lost(2, 0.95), lost(3, 0.96), back(2, 1.2))
    for events in ((lost(0, 0.51),), (lost(2, 0.51), lost(3, 0.6)), alone):
        ran = run(with_events(plan, *events))
        assert ran.end["reason"] == "steps"
        assert ran.end["steps"] == sum(ran.end["steps_by"]) >= 160
        assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
