"""Methods that become each other at their limits, with momentum and weight decay.

Bitwise: SSP(∞) = ASP, backup(0) = BSP, BSP by a server = BSP by all-reduce, local SGD by a server =
by all-reduce, and all costs times an integer. To rounding: SSP(0) = BSP and local SGD(1) = BSP,
where the optimizer steps before the average instead of after it, and n workers of batch b = one
worker of batch n·b, where sums are taken in another order.
"""

import pytest
import torch

from tests.support import simulated

BASE = (
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "optimizer.lr=0.02",
    "stop.steps=48",
    "model.hidden=[16]",
)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def run(*overrides):
    return simulated(*BASE, *overrides)


@pytest.mark.limit("sync=ssp")
def test_unbounded_ssp_is_asp():
    ssp, asp = run("sync=ssp", "sync.staleness=null"), run("sync=asp")
    assert ssp.sha256 == asp.sha256
    assert ssp.time_ns == asp.time_ns


@pytest.mark.limit("sync=backup")
def test_backup_without_backups_is_bsp():
    backup, bsp = run("sync=backup", "sync.backups=0"), run("sync=bsp")
    assert backup.sha256 == bsp.sha256
    assert backup.time_ns == bsp.time_ns


@pytest.mark.parametrize(
    "sync",
    [
        ["sync=bsp"],
        ["sync=bsp", "sync.exchange=difference"],
        ["sync=local_sgd", "sync.local_steps=3"],
    ],
)
def test_a_server_and_an_all_reduce_merge_identically(sync):
    assert run(*sync).sha256 == run(*sync, "topology=all_reduce").sha256


@pytest.mark.limit("sync=ssp")
def test_ssp_with_no_slack_is_bsp():
    close(run("sync=ssp", "sync.staleness=0").params, run("sync=bsp").params)


@pytest.mark.limit("sync=local_sgd")
@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_local_sgd_with_one_step_is_bsp(topology):
    local = run("sync=local_sgd", "sync.local_steps=1", f"topology={topology}")
    close(local.params, run("sync=bsp").params)


def test_n_small_batches_are_one_large_one():
    four = run("sync=bsp", "dataset.partition=interleaved", "dataset.batch_size=8")
    one = run(
        "sync=bsp",
        "dataset.partition=interleaved",
        "dataset.batch_size=32",
        "cluster.compute=[1]",
        "cluster.link=[1]",
        "stop.steps=12",
    )
    close(four.params, one.params)


ANY = (
    "sync=bsp",
    "sync=asp",
    "sync=ssp",
    "sync=backup",
    "sync=local_sgd",
    "sync=fedbuff sync.buffer=3",
    "sync=ringmaster sync.max_staleness=3",
    "sync=rennala sync.batch=5",
    "sync=async_local_sgd sync.local_steps=3 sync.max_staleness=9",
    "sync=asp sync.local_steps=plan planner=dylu schedule=single schedule.h_preset=[4]"
    " aggregate=uniform outer=delayed_nesterov",
    "topology=gossip sync=d_psgd",
    "topology=gossip sync=ad_psgd",
    "topology=partial_all_reduce schedule=single sync=ripples_random",
    "topology=partial_all_reduce schedule=single sync=ripples_smart",
)


@pytest.mark.parametrize("mode", ANY)
def test_all_costs_times_an_integer(mode):
    """The tally is multiplied and nothing else changes, for asynchronous modes too."""
    once, thrice = (
        run(
            *mode.split(),
            f"cluster.step_s={0.012 * factor}",
            f"cluster.exchange_s={0.0072 * factor}",
            f"cluster.server_step_s={0.001 * factor}",
        )
        for factor in (1, 3)
    )
    assert thrice.time_ns == 3 * once.time_ns
    assert thrice.sha256 == once.sha256
