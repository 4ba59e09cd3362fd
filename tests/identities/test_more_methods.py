"""Growing batches, FedPAQ, Ringleader and Rescaled ASGD, EASGD and Gossip-PGA at their limits, and what each is for."""

from functools import cache, partial

import pytest
import torch

from ashl.aggregate.weighted import Push
from ashl.planning.build import assemble
from ashl.sync.ringleader import Table
from tests.support import simulated

BASE = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "optimizer.lr=0.02", "stop.steps=24")
run = cache(partial(simulated, *BASE, "model.hidden=[16]"))
ONE = ("cluster.compute=[1]", "cluster.link=null")
GOSSIP = "topology=gossip"


def same(a, b):
    assert (a.sha256, a.time_ns, a.end["commits"]) == (b.sha256, b.time_ns, b.end["commits"])


def close(a, b):
    torch.testing.assert_close(a.params, b.params, rtol=1e-3, atol=2e-5)


# --- growing batches --------------------------------------------------------------------------------------------------


@pytest.mark.limit("sync=cr_psgd")
def test_batches_that_do_not_grow_are_bsp():
    same(run("sync=cr_psgd", "sync.growth=1"), run("sync=bsp"))


@pytest.mark.limit("sync=cr_psgd_catalyst")
def test_a_catalyst_of_single_steps_is_bsp_whatever_holds_it():
    same(run("sync=cr_psgd_catalyst", "sync.growth=1", "sync.theta=9", "sync.budget=1"), run("sync=bsp"))


@pytest.mark.limit("sync=cr_psgd_catalyst")
@pytest.mark.slow
def test_a_catalyst_that_never_begins_anew_and_hardly_holds_is_cr_psgd():
    catalyst = run("sync=cr_psgd_catalyst", "sync.theta=1e-30", "sync.budget=100000000")
    assert catalyst.sha256 == run("sync=cr_psgd").sha256


def test_batches_grow_to_the_most_and_begin_anew():
    """8 samples, doubled: 8, 16, 32, then 40 at most; with 4 · (8 + 16) samples a run, 8 and 16 by turns."""
    small = ("dataset.batch_size=8", "sync.growth=2", "sync.max_batch=40", "stop.steps=20", "runtime.gradients=false")
    ran = run("sync=cr_psgd", *small)
    assert ran.end["samples"] == 4 * (8 + 16 + 32 + 40 + 40)
    again = run("sync=cr_psgd_catalyst", "sync.budget=96", *small)
    assert again.end["samples"] == 4 * (8 + 16 + 8 + 16 + 8)


# --- FedPAQ -----------------------------------------------------------------------------------------------------------


FEDPAQ = ("experiment=fedpaq", "model.hidden=[16]", "stop.steps=80")


def test_fedpaq_sends_quantized_differences():
    ran = simulated(*FEDPAQ)
    stage = assemble(ran.plan, "cpu").stages[0]
    rounds = 80 // (4 * 10)
    sent = [ledger["bytes_up"] for ledger in ran.of("ledger") if ledger["rank"] < 4]
    assert sent == [rounds * stage.codec.payload(None, stage.link.d)] * 4
    assert sent[0] < rounds * stage.trainer.dense_bytes / 6


@pytest.mark.slow
def test_fedpaq_without_a_codec_is_local_sgd():
    local = ("sync=local_sgd", "sync.local_steps=10", "optimizer.momentum=0")
    assert simulated(*FEDPAQ, "compression=none").sha256 == simulated(*local, *FEDPAQ[1:]).sha256


# --- asynchronous, and fair to everybody's data -----------------------------------------------------------------------


@pytest.mark.limit("sync=ringleader")
def test_a_ringleader_of_one_worker_is_sgd():
    same(run("sync=ringleader", *ONE), run("sync=bsp", *ONE))


def pushed(worker: int, gradient: float) -> Push:
    return Push(worker, gradient, 1, 1, 0, 0.0, 0.0, 0.0, 0.0)


def test_a_ringleader_steps_once_for_each_in_a_round():
    """Workers by the moment of their pushes; what one sends after its step counts for the next round."""
    table, stepped, used = Table().opened(range(3)), [], []
    for k, worker in enumerate([0, 0, 1, 2, 1, 0, 0, 2, 1, 1, 0]):
        if table.take(pushed(worker, float(k))):
            used.append({rank: own.body / own.steps for rank, own in table.sums.items()})
            stepped.append(worker)
            table.due.remove(worker)
            table = table if table.due else table.opened(range(3))
    assert stepped == [2, 1, 0, 1, 0]  # 0 sent once more after its step, 2 too; the round of 1 completes the next
    assert used[0] == {0: 0.5, 1: 2.0, 2: 3.0}  # the mean of both that 0 sent while the others were waited for
    assert used[1:3] == [{0: 0.5, 1: 3.0, 2: 3.0}, {0: 2.0, 1: 3.0, 2: 3.0}]
    assert used[3] == {0: 6.0, 2: 7.0, 1: 8.0}


@pytest.mark.limit("sync=rescaled_asgd")
@pytest.mark.slow
def test_rescaled_asgd_of_equal_workers_is_asp():
    rescaled, asp = (run(f"sync={name}", "cluster=homogeneous") for name in ("rescaled_asgd", "asp"))
    close(rescaled, asp)
    assert (rescaled.time_ns, rescaled.end["commits"]) == (asp.time_ns, asp.end["commits"])


@pytest.mark.slow
def test_the_data_of_the_slow_count_as_much():
    """One of two workers takes six times as long and has other classes: ASP hardly learns them."""
    skewed = (
        *("dataset.partition=dirichlet", "dataset.alpha=0.05", "model=linear", "aggregate=uniform", "seed=1"),
        *("cluster.compute=[1,6]", "cluster.link=null", "optimizer.momentum=0", "optimizer.lr=0.3", "stop.steps=300"),
    )
    loss = {}
    for sync in ("asp", "ringleader", "rescaled_asgd"):
        ran = simulated(*skewed, f"sync={sync}")
        assert ran.learner is not None
        loss[sync] = ran.learner.evaluate(ran.params)["train_loss"]
    assert loss["ringleader"] < 0.95 * loss["asp"]
    assert loss["rescaled_asgd"] < loss["asp"]


# --- elastic averaging, and a global average now and then -------------------------------------------------------------


@pytest.mark.limit("sync=easgd")
def test_one_worker_on_a_spring_of_a_half_is_asp_at_half_the_scale():
    close(run("sync=easgd", "sync.local_steps=3", "sync.alpha=0.5", *ONE),
          run("sync=asp", "sync.local_steps=3", "aggregate.scale=0.5", *ONE))  # fmt: skip


@pytest.mark.slow
def test_springs_pull_alike_at_both_ends():
    """Without steps to speak of all stay where they are; with α = 1 both ends change places."""
    still = simulated("sync=easgd", "optimizer.lr=1e-30", "stop.steps=16", "model.hidden=[16]")
    start = simulated("sync=bsp", "optimizer.lr=1e-30", "stop.steps=4", "model.hidden=[16]")
    assert torch.equal(still.params, start.params)
    assert still.sha256 != run("sync=easgd").sha256


@pytest.mark.limit("sync=gossip_pga")
def test_gossip_that_never_meets_is_d_psgd():
    never = run("sync=gossip_pga", "sync.period=null", GOSSIP)
    same(never, run("sync=d_psgd", "sync.order=atc", GOSSIP))


@pytest.mark.limit("sync=gossip_pga")
@pytest.mark.slow
def test_gossip_that_always_meets_is_local_sgd():
    always = run("sync=gossip_pga", "sync.period=1", "sync.local_steps=2", GOSSIP)
    close(always, run("sync=local_sgd", "sync.local_steps=2", "topology=all_reduce", "aggregate=uniform"))
    assert always.snapshots[-1][0]["consensus_distance"] == 0


def test_gossip_pays_for_both_kinds_of_rounds():
    rounds, n = 8, 4
    ran = run("sync=gossip_pga", "sync.period=4", GOSSIP, f"stop.steps={rounds * n}", "runtime.gradients=false")
    dense = 4 * ran.plan.num_params
    sent = [ledger["bytes_up"] for ledger in ran.of("ledger")]
    assert sent == [6 * 2 * dense + 2 * 2 * dense * (n - 1) // n] * n
