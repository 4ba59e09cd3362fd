"""The simulator's rates against formulae, for any lists of slowdown factors, and a timeline
computed by hand.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import simulated

STEP_S, EXCHANGE_S = 0.02, 0.01
factors = st.floats(1, 8).map(lambda x: round(x, 3))
clusters = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(factors, min_size=n, max_size=n), st.lists(factors, min_size=n, max_size=n)
    )
)
quick = settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def timed(compute, link, *overrides, cycles=400, steps=1):
    total = cycles * len(compute) * steps
    return simulated(
        "runtime.gradients=false",
        f"cluster.compute={compute}",
        f"cluster.link={link}",
        f"cluster.step_s={STEP_S}",
        f"cluster.exchange_s={EXCHANGE_S}",
        "dataset.batch_size=8",
        f"stop.steps={total}",
        *overrides,
    )


def cycle_times(compute, link, steps=1):
    return [steps * c * STEP_S + k * EXCHANGE_S for c, k in zip(compute, link, strict=True)]


def adds_up(ran):
    return all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)


@quick
@given(clusters)
def test_bsp(cluster):
    ran = timed(*cluster, "sync=bsp")
    assert ran.steps_per_s == pytest.approx(len(cluster[0]) / max(cycle_times(*cluster)), rel=0.01)
    assert adds_up(ran)


@quick
@given(clusters)
def test_asp(cluster):
    ran = timed(*cluster, "sync=asp")
    assert ran.steps_per_s == pytest.approx(
        sum(1 / cycle for cycle in cycle_times(*cluster)), rel=0.01
    )
    assert adds_up(ran)
    assert all(ledger["wait"] == 0 for ledger in ran.ledgers)


@quick
@given(clusters, st.integers(0, 3))
def test_ssp_in_the_long_run_goes_at_the_pace_of_the_slowest(cluster, staleness):
    ran = timed(*cluster, "sync=ssp", f"sync.staleness={staleness}")
    assert ran.steps_per_s == pytest.approx(len(cluster[0]) / max(cycle_times(*cluster)), rel=0.01)
    assert adds_up(ran)
    assert ran.end["max_lead"] <= staleness
    assert max(ran.end["commits"]) - min(ran.end["commits"]) <= staleness + 1


@quick
@given(clusters, st.integers(1, 6))
def test_local_sgd(cluster, h):
    ran = timed(*cluster, "sync=local_sgd", f"sync.local_steps={h}", steps=h)
    assert ran.steps_per_s == pytest.approx(
        h * len(cluster[0]) / max(cycle_times(*cluster, h)), rel=0.01
    )
    assert adds_up(ran)


@quick
@given(clusters)
def test_all_reduce(cluster):
    compute, link = cluster
    n = len(compute)
    ran = timed(*cluster, "sync=bsp", "topology=all_reduce")
    assert ran.steps_per_s == pytest.approx(
        n / (max(compute) * STEP_S + EXCHANGE_S * max(link) * (n - 1) / n), rel=1e-6
    )
    assert adds_up(ran)
    assert ran.end["merges"] == 400


def test_a_plan_predicts_what_comes_out():
    ran = timed([2.0, 3.0, 4.0], [4.0, 6.0, 8.0], "sync=ssp")
    stage = ran.plan.stages[0]
    assert stage.predicted_steps_per_s == pytest.approx(ran.steps_per_s, rel=0.01)
    assert [w.predicted_cycle_s for w in stage.workers] == pytest.approx(
        cycle_times([2, 3, 4], [4, 6, 8])
    )
    waiting = sum(ledger["wait"] for ledger in ran.ledgers) / (3 * ran.time_ns)
    assert stage.predicted_wait_share == pytest.approx(waiting, abs=0.01)


def test_a_timeline_by_hand():
    """Two workers, BSP, three rounds. Worker 1 takes 30 ms to compute and 2 × 10 ms to exchange,
    worker 0 10 and 2 × 5: merges at 40, 90 and 140 ms; worker 0 computes 30, pushes 15, pulls 10
    and waits the rest.
    """
    ran = simulated(
        "runtime.gradients=false",
        "cluster.compute=[1,3]",
        "cluster.link=[1,2]",
        "cluster.step_s=0.01",
        "cluster.exchange_s=0.01",
        "sync=bsp",
        "stop.steps=6",
    )
    ms = 1_000_000
    assert ran.time_ns == 140 * ms
    assert ran.ledgers[0] == {
        "compute": 30 * ms,
        "compress": 0,
        "push": 15 * ms,
        "pull": 10 * ms,
        "wait": 85 * ms,
        "down": 0,
    }
    assert ran.ledgers[1] == {
        "compute": 90 * ms,
        "compress": 0,
        "push": 30 * ms,
        "pull": 20 * ms,
        "wait": 0,
        "down": 0,
    }
    dense = 4 * ran.plan.num_params
    assert [(r["bytes_up"], r["bytes_down"]) for r in ran.of("TimeTotals") if r["rank"] < 2] == [
        (3 * dense, 2 * dense)
    ] * 2
    assert ran.end["steps"] == 6
    # 6 computes, 6 pushes, 4 pulls of the model, 2 words to stop, 3 starts
    assert ran.events == 21
