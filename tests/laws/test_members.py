"""Laws of members and assignments: functions of a stage's configuration that never change it."""

import random
from dataclasses import replace

import pytest

from ashl.planning.predict import NO_LIMITS
from ashl.stage.contract import StageConfig
from ashl.stage.members import (
    assign,
    cap_local_steps,
    members_of,
    remaining_rounds,
    rest_if_truncated,
    survivors,
    truncate_round,
)
from ashl.sync.local_sgd import LocalSGD
from ashl.topology.all_reduce import AllReduce
from tests.swarm.drawn import bound

SEEDS = range(20)


def drawn_stage(seed: int, **fields: object) -> StageConfig:
    """Return a stage of local SGD with unequal workers, and a limit on steps."""
    rng = random.Random(seed)
    limits = replace(NO_LIMITS, steps=rng.randint(1, 200))
    stage = bound(rng, LocalSGD(local_steps="plan"), AllReduce(), rng.randint(1, 6), limits)
    workers = [replace(own, local_steps=rng.randint(1, 9)) for own in stage.plan.workers]
    return replace(stage, plan=replace(stage.plan, workers=tuple(workers)), **fields)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_workers_have_the_work_of_the_plan(seed: int) -> None:
    stage = drawn_stage(seed)
    planned = members_of(stage).planned
    assert planned.workers == stage.plan.workers
    assert planned.steps == tuple(worker.local_steps for worker in stage.plan.workers)
    assert planned.total_steps == sum(planned.steps)
    assert sum(planned.weights) == pytest.approx(stage.aggregate.scale)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_weights_of_members_add_up_and_others_have_none(seed: int) -> None:
    stage = drawn_stage(seed, reshards=True)
    failed = {stage.num_workers - 1} if stage.num_workers > 1 else set[int]()
    members = members_of(stage, survivors(stage, failed))
    assert sum(members.planned.weights) == pytest.approx(stage.aggregate.scale)
    assert all(members.planned.weights[rank] == 0 for rank in failed)
    shares = [members.planned.workers[rank].data_share for rank in members.ranks]
    assert sum(shares) == pytest.approx(sum(own.data_share for own in stage.plan.workers))
    back = assign(stage, stage.workers, members.planned.workers)
    assert [own.data_share for own in back.workers] == [
        own.data_share for own in stage.plan.workers
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_truncated_round_exceeds_the_count_by_less_than_a_step_per_worker(seed: int) -> None:
    stage = drawn_stage(seed)
    members = members_of(stage)
    done, rounds = (0, 0), 0
    while done[0] < stage.limits.steps:
        rest = rest_if_truncated(remaining_rounds(stage, members, members.planned, done))
        work = truncate_round(stage, members, members.planned, rest)
        assert (work is members.planned) == (rest is None)
        assert work.steps == tuple(
            cap_local_steps(members.planned, rank, rest) for rank in stage.workers
        )
        done, rounds = (done[0] + work.total_steps, done[1] + work.total_samples), rounds + 1
    assert done[0] < stage.limits.steps + stage.num_workers
    assert rounds == -(-stage.limits.steps // members.planned.total_steps)
