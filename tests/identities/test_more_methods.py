"""Growing batches, Ringleader and Rescaled ASGD, EASGD and Gossip-PGA by hand, and what each is
for.
"""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

from ashl.aggregate.weighted import Push
from ashl.planning.instantiate import assemble_job
from ashl.stage.progress import Progress
from ashl.sync.ringleader import Table
from tests.conf_option import conf_option
from tests.support import simulated

BASE = (
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "optimizer.lr=0.02",
    "stop.steps=24",
)
run = cache(partial(simulated, *BASE, "model.hidden=[16]"))
ONE = ("cluster.compute=[1]", "cluster.link=null")
GOSSIP = "topology=gossip"


def close(a, b):
    torch.testing.assert_close(a.params, b.params, rtol=1e-3, atol=2e-5)


def test_batches_grow_to_the_maximum_and_begin_again():
    """8 samples, doubled: 8, 16, 32, then 40 at most; with 4 · (8 + 16) samples a run, 8 and 16 by
    turns.
    """
    small = (
        "dataset.batch_size=8",
        "sync.growth=2",
        "sync.max_batch=40",
        "stop.steps=20",
        "runtime.gradients=false",
    )
    ran = run("sync=cr_psgd", *small)
    assert ran.end["samples"] == 4 * (8 + 16 + 32 + 40 + 40)
    again = run("sync=cr_psgd_catalyst", "sync.budget=96", *small)
    assert again.end["samples"] == 4 * (8 + 16 + 8 + 16 + 8)


def test_a_catalyst_is_held_to_where_each_run_of_it_began():
    """One worker by hand, with batches of 8 and 16 in turn."""
    base = (
        "sync=cr_psgd_catalyst",
        "sync.growth=2",
        "sync.budget=24",
        "sync.theta=2",
        "dataset.batch_size=8",
        *ONE,
    )
    ran = run(*base, "stop.steps=6")
    trainer, drawn = assemble_job(ran.plan, "cpu").stages[0].trainer, 0
    w, moments = trainer.init()
    begin = w
    for step, batch in enumerate([8, 16] * 3):
        begin = w if batch == 8 else begin
        _, g = trainer.gradient(w, 0, step, range(drawn, drawn + batch))
        moments, w = trainer.apply(w, moments, g + 2 * (w - begin), 0.02)
        drawn += batch
    torch.testing.assert_close(ran.params, w)


def pushed(worker: int, gradient: float) -> Push:
    return Push(worker, gradient, 1, 1, 0, 0.0, 0.0, 0.0, 0.0)


def test_a_ringleader_steps_once_for_each_in_a_round():
    """Workers by the moment of their pushes; what one sends after its step counts for the next
    round.
    """
    table, stepped, used = Table().open_round(range(3)), [], []
    for k, worker in enumerate([0, 0, 1, 2, 1, 0, 0, 2, 1, 1, 0]):
        if table.add_push(pushed(worker, float(k))):
            used.append({rank: own.payload / own.steps for rank, own in table.sums.items()})
            stepped.append(worker)
            table.due.remove(worker)
            table = table if table.due else table.open_round(range(3))
    assert stepped == [
        2,
        1,
        0,
        1,
        0,
    ]  # 0 sent once more after its step, 2 too; the round of 1 completes the next
    assert used[0] == {
        0: 0.5,
        1: 2.0,
        2: 3.0,
    }  # the mean of both that 0 sent while the others were waited for
    assert used[1:3] == [{0: 0.5, 1: 3.0, 2: 3.0}, {0: 2.0, 1: 3.0, 2: 3.0}]
    assert used[3] == {0: 6.0, 2: 7.0, 1: 8.0}


@pytest.mark.parametrize("discount", [None, 1.0])
def test_a_ringleader_by_hand(discount):
    """Three workers, with pushes in order of arrival, by hand.

    Each step is along the mean of the workers' latest gradients, each weighted by its staleness. A
    worker whose push made no step continues with its own model.
    """
    more = () if discount is None else (f"aggregate.staleness_discount={discount}",)
    timed = (
        "cluster.compute=[1,2,3.7]",
        "cluster.link=null",
        "cluster.step_s=1",
        "cluster.exchange_s=0.2",
    )
    ran = run("sync=ringleader", *timed, *more, "stop.steps=13")
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    w, moments = trainer.init()
    models, steps, seen, version, sums, due = [w] * 3, [0] * 3, [0] * 3, 0, {}, {0, 1, 2}
    for rank in [0, 1, 0, 0, 2, 1, 0, 0, 1, 0, 2, 0, 1]:
        _, g = trainer.gradient(models[rank], rank, steps[rank])
        steps[rank] += 1
        sums.setdefault(rank, []).append(g * (1 + version - seen[rank]) ** -(discount or 0))
        if len(sums) == 3:
            mean = sum(sum(sent) / len(sent) for sent in sums.values()) / 3
            moments, w = trainer.apply(w, moments, mean, 0.02)
            models[rank], version = w, version + 1
            due.remove(rank)
            sums, due = (sums, due) if due else ({}, {0, 1, 2})
        seen[rank] = version
    assert version == 6
    torch.testing.assert_close(ran.params, w)


def test_rescaled_asgd_steps_by_how_long_a_workers_cycle_is():
    """One comes every second and then after two, another every third one."""
    rule, stage = (
        conf_option("sync", "rescaled_asgd"),
        SimpleNamespace(outer=conf_option("outer", "average")),
    )
    cycles = rule.begin(stage, Progress(2))
    for worker, now_s in ((0, 1), (1, 1), (0, 2), (1, 4), (0, 4)):
        cycles = rule.observe(stage, cycles, SimpleNamespace(now_s=now_s), pushed(worker, 0.0))
    assert cycles.cycle_s == pytest.approx({0: 1.2, 1: 3.0})
    for worker, factor in ((0, 1.2 / 2.1), (1, 3 / 2.1)):
        state = SimpleNamespace(
            rule_state=cycles, progress=SimpleNamespace(latest=worker), outer_state=None, params=1.0
        )
        assert rule.step(stage, state, 1.0, 0.1)[2] == pytest.approx(1 + factor)
    rule.without(stage, SimpleNamespace(rule_state=cycles), 1)
    assert rule.observe(
        stage, cycles, SimpleNamespace(now_s=90), pushed(1, 0.0)
    ).cycle_s.keys() == {0}


def test_both_ends_of_a_spring_by_hand():
    """Two equal workers push their models one after the other."""
    alpha, two = 0.3, ("cluster.compute=[1,1]", "cluster.link=null", "stop.steps=12")
    ran = run("sync=easgd", "sync.local_steps=2", f"sync.alpha={alpha}", *two)
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    middle, moments = trainer.init()
    own, kept = [middle, middle], [moments, moments]
    for start in (0, 2, 4):
        for rank in (0, 1):
            for step in (start, start + 1):
                _, kept[rank], own[rank] = trainer.local_step(
                    own[rank], kept[rank], rank, step, 0.02
                )
            pull = alpha * (own[rank] - middle)
            own[rank], middle = own[rank] - pull, middle + pull
    torch.testing.assert_close(ran.params, middle)


def test_where_all_meet_they_meet_in_the_mean_that_gossip_keeps():
    """In the fourth round all have the mean over all, which is what D-PSGD's models are on average
    then.
    """
    four = (GOSSIP, "stop.steps=16")
    meet, apart = (
        run("sync=gossip_pga", "sync.period=4", *four),
        run("sync=d_psgd", "sync.order=atc", *four),
    )
    close(meet, apart)
    assert (
        meet.snapshots[-1][0]["consensus_distance"]
        == 0
        < apart.snapshots[-1][0]["consensus_distance"]
    )
