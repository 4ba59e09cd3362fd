"""Baselines at the limits where they are another method, bit for bit."""

import pytest
import torch

from tests.support import simulated

BASE = ("cluster=homogeneous", "optimizer.lr=0.02", "stop.steps=96", "model.hidden=[16]")


def run(*overrides):
    return simulated(*BASE, *overrides)


def same(a, b):
    return (a.sha256, a.time_ns, a.end["commits"]) == (b.sha256, b.time_ns, b.end["commits"])


@pytest.mark.limit("sync=adsp")
def test_adsp_of_equal_workers_is_asp_with_local_steps():
    """Γ/C of exactly four steps, an exchange that takes no time, and no search."""
    base = ("cluster.exchange_s=0", "aggregate=uniform")
    adsp = run(
        "sync=adsp",
        "sync.gamma_s=0.32",
        "sync.commits=4",
        "sync.search_s=null",
        *base,
    )
    assert same(adsp, run("sync=asp", "sync.local_steps=4", *base))


@pytest.mark.limit("sync=dssp")
def test_dssp_without_a_range_is_ssp():
    for cluster in ("cluster=mixed", "cluster=one_slow"):
        dssp = run(cluster, "sync=dssp", "sync.s_low=2", "sync.s_high=2")
        assert same(dssp, run(cluster, "sync=ssp", "sync.staleness=2"))


@pytest.mark.limit("sync=adacomm")
def test_adacomm_from_one_step_is_local_sgd_with_one():
    adacomm = run("sync=adacomm", "sync.local_steps=1", "sync.every_s=0.1")
    assert same(adacomm, run("sync=local_sgd", "sync.local_steps=1"))


def test_adacomm_before_its_first_check_is_local_sgd():
    adacomm = run("sync=adacomm", "sync.local_steps=4", "sync.every_s=1e6")
    assert same(adacomm, run("sync=local_sgd", "sync.local_steps=4"))


@pytest.mark.limit("sync=lb_bsp")
@pytest.mark.parametrize("aggregate", ["mean", "samples"])
def test_lb_bsp_of_equal_workers_is_bsp(aggregate):
    lb_bsp = run("sync=lb_bsp", f"aggregate={aggregate}")
    assert same(lb_bsp, run("sync=bsp", f"aggregate={aggregate}"))


@pytest.mark.limit("sync=adsp_ashlrepo")
@pytest.mark.parametrize("steps", [1, 4])
def test_adsp_of_the_ashl_repository_takes_no_local_steps(steps):
    """One worker, four gradients on a frozen model: one large batch with four times the rate,
    squared.
    """
    one = (
        "cluster.compute=[1]",
        "cluster.exchange_s=0",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0",
    )
    every = (
        f"sync.gamma_s={0.08 * steps}",
        "sync.commits=4",
        "sync.floor_s=0.01",
        "sync.search_s=null",
    )
    weak = run("sync=adsp_ashlrepo", "dataset.batch_size=8", "optimizer.lr=0.2", *every, *one)
    batch, rate = f"dataset.batch_size={8 * steps}", f"optimizer.lr={steps * 0.2**2}"
    large = run("sync=bsp", batch, rate, *one, f"stop.steps={96 // steps}")
    assert weak.end["merges"] == large.end["merges"] == 96 // steps
    torch.testing.assert_close(weak.params, large.params, rtol=1e-3, atol=2e-5)
