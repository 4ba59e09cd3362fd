"""Rates of gossip: timelines computed by hand, and the rate of a method with one slow worker of
sixteen.

The bands are those of the literature's comparison.
"""

from functools import cache

import pytest

from tests.support import planned, simulated


@pytest.fixture(autouse=True)
def _forecasts() -> None:
    """Forecasts have their full length here: rates are compared with them."""


EQUAL = (
    "runtime.gradients=false",
    "cluster=homogeneous",
    "topology=gossip",
    "dataset.batch_size=8",
)
SIXTEEN = (*EQUAL, "cluster.exchange_s=0.002", "topology.graph=exponential")


def adds_up(ran):
    return all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


@pytest.mark.parametrize(
    ("mode", "time_ns", "up"),
    [
        # twelve rounds of 20 ms; a model travels in 5 ms, to both neighbours at once; 10 digits'
        # MLP has 4·d bytes
        (["sync=d_psgd", "sync.order=atc"], 12 * 25_000_000, 12 * 2),
        (["sync=d_psgd", "sync.order=awc"], 12 * 20_000_000, 12 * 2),
        (["sync=sgp", "topology.graph=one_peer_exponential"], 12 * 25_000_000, 12),
        # messages one round late are hidden; at the end the last one is waited for
        (
            ["sync=sgp", "topology.graph=one_peer_exponential", "sync.overlap=1"],
            12 * 20_000_000 + 5_000_000,
            12,
        ),
        (["sync=relay_sum"], 12 * 25_000_000, None),
        (["sync=noloco", "sync.local_steps=3", "topology.graph=complete"], 4 * 70_000_000, 4 * 2),
        (["sync=choco", "sync.gamma=1"], 12 * 25_000_000, 12 * 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_timeline_by_hand(mode, time_ns, up):
    ran = simulated(*EQUAL, "stop.steps=48", *mode)
    assert ran.time_ns == time_ns
    assert ran.end["merges"] * ran.plan.stages[0].workers[0].local_steps == 12
    assert adds_up(ran)
    if up is not None:
        dense = 4 * ran.plan.num_params
        assert [r["bytes_up"] for r in ran.of("TimeTotals")] == [up * dense] * 4


@pytest.mark.parametrize(("overlap", "cycle_ns"), [("true", 20_000_000), ("false", 30_000_000)])
def test_active_workers_wait_for_the_answer_only_without_overlap(overlap, cycle_ns):
    """Passive workers (0 and 2) take a step each 20 ms, active ones an exchange of 10 ms more."""
    ran = simulated(*EQUAL, "stop.seconds=0.6", "sync=ad_psgd", f"sync.overlap={overlap}")
    passive, active = 600 // 20, 600_000_000 // cycle_ns
    assert ran.end["commits"] == pytest.approx([passive, active, passive, active], abs=1)
    assert adds_up(ran)


@cache
def rate(factor, *overrides):
    """Steps/s of sixteen workers in virtual time, one of them so many times slower."""
    return (
        planned(*SIXTEEN, f"cluster.compute={[1] * 15 + [factor]}", *overrides)
        .stages[0]
        .predicted_steps_per_s
    )


@pytest.mark.parametrize(
    ("overlap", "factor", "least", "ideal"),
    [("true", 2, 0.90, 15.5 / 16), ("true", 5, 0.85, 15.2 / 16), ("false", 5, 0.85, 15.2 / 16)],
)
def test_ad_psgd_keeps_its_rate_with_a_slow_worker(overlap, factor, least, ideal):
    mode = ("sync=ad_psgd", f"sync.overlap={overlap}")
    share = rate(factor, *mode) / rate(1, *mode)
    assert least <= share <= 1
    assert share == pytest.approx(ideal, abs=0.03)


@pytest.mark.parametrize("sync", ["d_psgd", "ad_psgd", "hop"])
def test_what_is_predicted_is_what_comes(sync):
    overrides = (*EQUAL, "cluster.compute=[1,1.5,2,3]", f"sync={sync}", "stop.steps=800")
    assert planned(*overrides).stages[0].predicted_steps_per_s == pytest.approx(
        simulated(*overrides).steps_per_s, rel=0.03
    )


def test_no_evaluation_is_later_than_the_end_of_the_run() -> None:
    """The slow worker sends its models at 0.16 s, and the coordinator ends the run at 0.085 s."""
    mode = ("topology=gossip", "sync=hop", "sync.staleness=2", "cluster.compute=[1,1,1,4]")
    limits = ("stop.steps=13", "eval.every_commits=1", "runtime.gradients=false")
    ran = simulated("schedule=single", "cluster=homogeneous", *mode, *limits)
    times_ns = [record["time_ns"] for record, _ in ran.snapshots]
    assert times_ns == sorted(times_ns)
    assert times_ns[-2:] == [ran.time_ns, ran.time_ns] == [85_000_000, 85_000_000]
