"""A plan's shares of the data are the shards that are, and weights refer to them."""

from collections.abc import Sequence

import numpy as np
import pytest

from ashl.data.quadratic import optimum
from ashl.learn.learner import Learner
from ashl.plan.plan import WorkerPlan
from ashl.planning.instantiate import assemble_job
from ashl.topology import parameter_server
from tests.support import planned, simulated

TOTAL = 1437  # digits
ASHL = (
    "cluster=ashl_paper",
    "model.hidden=[16]",
    "schedule=ashl",
    "schedule.loss_switch=1e-9",
    "stop.epochs=5",
)
SLOWED = "cluster.events=[{time_s: 0, worker: 0, compute: 9}]"  # which the plan does not know


def shares(workers: Sequence[WorkerPlan]) -> list[float]:
    return [worker.data_share for worker in workers]


@pytest.mark.parametrize(
    "partition",
    [(), ("dataset.partition=iid",), ("dataset.partition=dirichlet", "dataset.alpha=0.5")],
    ids=["planned", "equal", "skewed"],
)
def test_a_plan_shows_the_shards_that_are(partition: tuple[str, ...]) -> None:
    plan = planned(*ASHL, *partition)
    for stage, running in zip(plan.stages, assemble_job(plan, "cpu").stages, strict=True):
        sizes = [running.trainer.shard_size(rank) for rank in range(3)]
        assert sum(sizes) == TOTAL
        assert shares(stage.workers) == [size / TOTAL for size in sizes]
        if partition == ():  # Algorithm 1: D_i = H_i / Σ H
            steps = [worker.local_steps for worker in stage.workers]
            assert sizes == pytest.approx([TOTAL * h / sum(steps) for h in steps], abs=1)


def test_a_profile_during_the_run_repartitions_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[np.ndarray]] = [[], [], []]
    gradient = Learner.gradient_found

    def spied(self: Learner, params, indices: np.ndarray, worker: int, step: int, *more, **named):
        seen[worker].append(indices)
        return gradient(self, params, indices, worker, step, *more, **named)

    monkeypatch.setattr(Learner, "gradient_found", spied)
    ran = simulated(*ASHL, "schedule.profile_steps=2", SLOWED)
    (record,) = ran.of("PlanMade")
    rows = record["stages"][0]  # by worker: H, share, ratio, cycle
    assert [share for _, share, *_ in rows] != shares(ran.plan.stages[1].workers)
    assert rows[0][1] < 0.2, "profiling has seen that this worker is slow"
    visited = [
        len(set(np.concatenate(batches[3:]))) for batches in seen
    ]  # after those that were timed
    assert [n / TOTAL for n in visited] == [share for _, share, *_ in rows]


def test_an_online_plan_leaves_the_shares_to_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    assign_work = parameter_server.assign_work
    monkeypatch.setattr(
        parameter_server,
        "assign_work",
        lambda *a, **k: made.append(assign_work(*a, **k)) or made[-1],
    )
    asynchronous = (
        "cluster=ashl_paper",
        "sync=asp",
        "sync.local_steps=plan",
        "schedule.h_preset=[2]",
    )
    ran = simulated(*asynchronous, "planner=online", SLOWED, "model.hidden=[16]", "stop.steps=200")
    before = ran.plan.stages[0].workers
    assert made
    assert [w.local_steps for w in made[-1]] != [w.local_steps for w in before]
    assert all(shares(workers) == shares(before) for workers in made)


def test_fednova_ends_where_the_loss_of_all_samples_is_least() -> None:
    """Check argmin Σ n_i/n·f_i with n_i the shard, not H / Σ H: equal shards, each one batch, and H
    = (7, 4, 2).
    """
    data = ("dataset=quadratic", "dataset.num_samples=96", "dataset.noise=1", "dataset.condition=1")
    equal = (
        "dataset.partition=iid",
        "dataset.batch_size=32",
        "model=linear",
        "optimizer.momentum=0",
    )
    ends = ("stop.epochs=200", "optimizer.lr=0.2", "optimizer.schedule=cosine", "aggregate=fednova")
    steps = ("sync=local_sgd", "sync.local_steps=plan", "schedule.h_preset=[2]", "planner=paper")
    ran = simulated(*data, *equal, *ends, *steps, "cluster=ashl_paper", "cluster.exchange_s=0.03")
    assert [worker.local_steps for worker in ran.plan.stages[0].workers] == [7, 4, 2]
    best, _ = optimum(assemble_job(ran.plan, "cpu").data)
    assert float((ran.params - best).norm()) < 0.04  # 0.20 where p_i is H_i / Σ H
    # Where nobody waits cycles differ, too: rescaling takes out the one, FedNova's weights the
    # other.
    asynchronous = (
        "sync=rescaled_asgd",
        "sync.local_steps=plan",
        "schedule.h_preset=[4]",
        "planner=dylu",
    )
    ran = simulated(
        *data, *equal, *ends, *asynchronous, "cluster=ashl_paper", "cluster.exchange_s=0.03"
    )
    assert [worker.local_steps for worker in ran.plan.stages[0].workers] == [4, 2, 2]
    assert len(set(ran.end["commits"])) == 3
    assert (
        float((ran.params - best).norm()) < 0.03
    )  # 0.13 with aggregate=uniform, 0.05 with sync=asp
