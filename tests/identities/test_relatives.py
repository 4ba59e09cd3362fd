"""The asynchronous relatives: what each merges and drops, and their rules by hand."""

from dataclasses import replace

import pytest
import torch

from ashl.errors import UsageError
from tests.conf_option import conf_option
from tests.plans import cluster
from tests.support import simulated

BASE = (
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "optimizer.lr=0.02",
    "stop.steps=96",
    "model.hidden=[16]",
)
EQUAL = "cluster=homogeneous"
TIMED = "runtime.gradients=false"


def run(*overrides):
    return simulated(*BASE, *overrides)


def rounds(ran):
    """Return the rounds that ended before the run did."""
    return [r for r in ran.of("Round") if r["end_ns"] < ran.time_ns]


@pytest.mark.limit("sync=fedbuff")
def test_fedbuff_of_everybody_on_equal_workers():
    """Every merge holds each worker once; all but the one that completed the merge before are one
    merge behind.
    """
    ran = run("sync=fedbuff", "sync.buffer=4", "sync.local_steps=1", EQUAL)
    assert ran.end["commits"] == [24] * 4
    assert ran.end["merges"] == 24
    assert ran.end["stale_max"] == [1, 1, 1, 0]
    assert all(ledger["wait"] == 0 for ledger in ran.ledgers)


def test_fedbuff_never_waits_and_merges_k_at_a_time():
    ran = run("sync=fedbuff", "sync.buffer=3", "sync.local_steps=2", "stop.steps=120", TIMED)
    assert ran.end["merges"] == 20
    assert sum(ran.end["commits"]) == 60
    assert all(ledger["wait"] == 0 for ledger in ran.ledgers)


@pytest.mark.parametrize("bound", [2, 3])
def test_ringmaster_never_applies_what_is_older(bound):
    ran = run(
        "cluster=one_slow",
        "sync=ringmaster",
        f"sync.max_staleness={bound}",
        TIMED,
        "stop.steps=400",
    )
    assert max(r["staleness"] for r in rounds(ran) if not r["dropped"]) == bound - 1
    assert ran.end["steps"] == sum(ran.end["steps_by"]) == 400


def test_async_local_sgd_counts_the_steps_in_flight():
    """(δ + 1)·M ≤ R: with M = 4 and R = 11 a push may be one merge behind, not two."""
    ran = run(
        "sync=async_local_sgd",
        "sync.local_steps=4",
        "sync.max_staleness=11",
        "stop.steps=400",
        TIMED,
    )
    assert all(r["dropped"] == (r["staleness"] > 1) for r in rounds(ran))
    assert any(r["dropped"] for r in rounds(ran))


def test_a_bound_that_drops_everything_is_refused():
    with pytest.raises(UsageError, match="at least 8"):
        conf_option("sync", "async_local_sgd", max_staleness=7)


def test_rennala_takes_what_comes_first_and_only_on_the_current_model():
    """One worker is five times slower and never in time; of the four gradients of a step, a quick
    one gives two.
    """
    ran = run(
        "cluster=one_slow",
        "sync=rennala",
        "sync.batch=4",
        "cluster.exchange_s=0",
        "stop.steps=80",
        TIMED,
    )
    assert all(r["dropped"] == (r["staleness"] > 0) for r in rounds(ran))
    assert ran.end["steps_by"][3] == 0
    assert ran.end["dropped_by"][3] > 0
    assert ran.end["merges"] == 20
    assert sum(ran.end["commits"]) == 80


def test_rennala_on_one_worker_is_one_large_batch():
    """Two gradients of eight samples at one point are one of sixteen."""
    one = ("cluster.compute=[1]", "cluster.link=[1]", "dataset.partition=interleaved")
    twice = run("sync=rennala", "sync.batch=2", "dataset.batch_size=8", *one)
    once = run("sync=bsp", "dataset.batch_size=16", "stop.steps=48", *one)
    torch.testing.assert_close(twice.params, once.params, rtol=1e-3, atol=2e-5)
    dense = 4 * twice.plan.num_params
    assert [r["bytes_down"] for r in twice.of("TimeTotals") if r["rank"] == 0] == [
        47 * dense
    ]  # one pull a step


def profile(*step_s):
    known = cluster(step_s, [0.2] * len(step_s))
    unlike = {"batch": 8, "push_bytes_s": None, "pull_bytes_s": None}
    return replace(
        known,
        workers=tuple(replace(w, push_s=0.1 * i, **unlike) for i, w in enumerate(known.workers)),
    )


@pytest.mark.parametrize(
    ("step_s", "h", "steps"),
    [
        ((0.02, 0.03, 0.04), 8, [8, 5, 4]),
        ((0.02, 0.03, 0.04), 32, [32, 21, 16]),
        ((0.03, 0.01, 0.1), 10, [3, 10, 1]),
        ((0.01, 1.0), 8, [8, 1]),  # never less than one
        ((0.02,), 5, [5]),
        ((0.02, 0.02, 0.02), 5, [5, 5, 5]),
    ],
)
def test_dylu(step_s, h, steps):
    """H_i = ⌊H·v_i / max v⌋, for all links."""
    rows = conf_option("planner", "dylu").assign(profile(*step_s), h, None, lambda ratio: 1.0)
    assert [row.local_steps for row in rows] == steps
    assert [row.data_share for row in rows] == pytest.approx([s / sum(steps) for s in steps])
    assert {row.compression_ratio for row in rows} == {1.0}
    rows = conf_option("planner", "dylu").assign(profile(*step_s), h, 0.1, lambda ratio: 2 * ratio)
    assert {row.compression_ratio for row in rows} == {0.1}


@pytest.mark.parametrize(("n", "spread"), [(1, 0.0), (1, 0.5), (3, 0.0), (4, 0.25), (4, 0.1)])
def test_delayed_nesterov_is_the_published_recursion(n, spread):
    """Against w −= lr(c·β·m + g/N) with the authors' signs: g = −Δ, and x = lr·Δ/N as `uniform`
    gives it for N = n.
    """
    lr, beta, g = 0.7, 0.9, torch.Generator().manual_seed(0)
    rule = conf_option("outer", "delayed_nesterov", buffer=n, beta=beta, spread=spread)
    w = expected = torch.zeros(5, dtype=torch.float64)
    m, delta, moments = torch.zeros_like(w), torch.zeros_like(w), None
    for k in range(1, 3 * n + 2):
        grad = torch.randn(5, generator=g, dtype=torch.float64)
        moments, w = rule.step(moments, w, -lr * grad / n, 0.1)
        delta = delta + grad
        share = spread
        if k % n == 0:
            m, delta, share = beta * m + delta / n, torch.zeros_like(w), 1 - spread * n + spread
        expected = expected - lr * (share * beta * m + grad / n)
        torch.testing.assert_close(w, expected)


def test_a_spread_of_more_than_the_momentum_is_refused():
    with pytest.raises(UsageError, match=r"at most 0.25"):
        conf_option("outer", "delayed_nesterov", spread=0.3)
