"""The data of a failed worker: no worker visits them, or the survivors do, each sample at one of
them.
"""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from ashl.data.batches import Batches
from ashl.data.partition import redistribute_shards
from ashl.errors import UsageError
from ashl.learn.trainer import Trainer
from ashl.planning.instantiate import assemble_job
from ashl.stage.members import assign, members_of, survivors
from tests.support import planned, run

RUN = (
    "cluster=homogeneous",
    "cluster.compute=[1,1.5,2,3]",
    "dataset.batch_size=16",
    "model.hidden=[4]",
    "eval.every_commits=100000",
    "stop.steps=160",
)
MODES = {
    "bsp": "sync=bsp",
    "asp, by the data": "sync=asp aggregate=data_share",
    "local SGD": "sync=local_sgd sync.local_steps=3",
    "by all-reduce": "topology=all_reduce sync=bsp aggregate=data_share",
    "in groups": "topology=partial_all_reduce sync=ripples_random sync.group_size=2",
}
COMES_BACK = ("bsp", "asp, by the data", "by all-reduce", "in groups")
LOST = 2


def test_every_sample_is_at_one_of_those_who_are_left_and_once_in_its_pass() -> None:
    rng = random.Random(0)
    for _ in range(50):
        n, total = rng.randint(2, 9), rng.randint(40, 200)
        cuts = sorted(rng.sample(range(1, total), n - 1))
        parts = np.split(np.random.default_rng(total).permutation(total), cuts)
        gone = set(rng.sample(range(n), rng.randint(1, n - 1)))
        found = redistribute_shards(parts, gone)
        here = [rank for rank in range(n) if rank not in gone]
        assert sorted(np.concatenate([found[rank] for rank in here])) == list(range(total))
        more = [len(found[rank]) - len(parts[rank]) for rank in here]
        assert max(more) - min(more) <= 1, "nobody has more of it than another"
        visits = Counter()
        for rank in here:
            stream = Batches(parts[rank], 1, 7, rank).with_shard(found[rank])
            size = len(found[rank])
            visits.update(stream.span(rng.randint(1, 3) * size, size).tolist())
        assert set(visits.values()) == {1}
        assert all(found[rank] is parts[rank] for rank in gone)


def drawn(
    mode: str, on_worker_failure: str, monkeypatch: pytest.MonkeyPatch, *events: dict
) -> dict[int, list[list[bool]]]:
    """Return the kind of each draw by worker: from its own stream, or from the one with the failed
    worker's data.
    """
    plan = planned(*RUN, *mode.split(), f"runtime.on_worker_failure={on_worker_failure}")
    trainer = assemble_job(plan, "cpu").stages[0].trainer
    streams = [list(of.batches) for of in (trainer, trainer.redistribute(frozenset({LOST})))]
    found, span = defaultdict(list), Batches.span

    def listening(self: Batches, first: int, size: int) -> np.ndarray:
        indices = span(self, first, size)
        if size == 16:  # and not the rest of one
            each = [np.array_equal(indices, span(of[self._worker], first, size)) for of in streams]
            found[self._worker].append(each)
        return indices

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "span", listening)
        ran = run(replace(plan, cluster=plan.cluster | {"events": list(events)}))
    assert ran.end["reason"] == "steps"
    return found


@pytest.mark.parametrize("name", MODES)
def test_the_survivors_continue_with_the_data_of_the_failed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = {"time_s": 0.3, "worker": LOST, "fail": True}
    found = drawn(MODES[name], "reshard", monkeypatch, fails)
    for rank in {0, 1, 3}:
        assert [True, False] in found[rank]
        first = found[rank].index([False, True])
        assert all(own for own, _ in found[rank][:first])
        assert all(larger for _, larger in found[rank][first:]), "from one moment on"
        assert len(found[rank]) - first > 3
    alone = drawn(MODES[name], "skip", monkeypatch, fails)
    assert all(own for draws in alone.values() for own, _ in draws)


@pytest.mark.parametrize("name", COMES_BACK)
def test_a_rejoining_worker_has_its_own_data_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, back = (
        {"time_s": 0.2, "worker": LOST, "fail": True},
        {"time_s": 0.5, "worker": LOST, "rejoin": True},
    )
    found = drawn(MODES[name], "reshard", monkeypatch, fails, back)
    for rank in {0, 1, 3}:
        kinds = [own for own, larger in found[rank] if own != larger]
        assert [kinds[0], kinds[-1]] == [True, True]
        assert False in kinds
    assert all(own for own, _ in found[LOST])


def test_weights_by_the_data_follow_them() -> None:
    plan = planned(
        *RUN,
        "sync=asp",
        "aggregate=data_share",
        "runtime.on_worker_failure=reshard",
        "dataset.partition=iid",
    )
    stage = assemble_job(plan, "cpu").stages[0]
    work = members_of(stage, survivors(stage, {LOST})).planned
    assert [w.data_share for w in work.workers] == pytest.approx([1 / 3, 1 / 3, 1 / 4, 1 / 3], 1e-2)
    assert members_of(stage).planned.workers == stage.plan.workers


def test_shards_are_dealt_when_something_has_changed_and_not_at_every_merge() -> None:
    stage = assemble_job(planned(*RUN, "runtime.on_worker_failure=reshard"), "cpu").stages[0]
    trainer = cast("Trainer", stage.trainer)
    found = [trainer.redistribute(frozenset(failed)) for failed in ({LOST}, {LOST}, {0}, {LOST})]
    assert found[0] is found[1] is found[3]
    assert found[0].batches[0].shard is not trainer.batches[0].shard
    for size in (8, 4):
        workers = tuple(replace(worker, batch=size) for worker in stage.plan.workers)
        work = assign(stage, survivors(stage, {LOST}), workers)
        assert work.workers[0].batch == size
        assert work.workers[0].data_share > stage.worker(0).data_share


@pytest.mark.parametrize(
    "mode", ["sync=bsp topology=all_reduce optimizer=bcd", "sync=asylpg optimizer.momentum=0"]
)
def test_what_takes_a_shard_as_a_whole_cannot_have_more_on_the_way(mode: str) -> None:
    with pytest.raises(
        UsageError, match=r"a worker computes on its whole shard at once.*on_worker_failure=skip"
    ):
        planned(*RUN, *mode.split(), "runtime.on_worker_failure=reshard")
