"""The simulator's rates against formulae, for any lists of slowdown factors, and a timeline
computed by hand.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import simulated


@pytest.fixture(autouse=True)
def _forecasts() -> None:
    """Forecasts have their full length here: rates are compared with them."""


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


def slowest(compute, link, steps=1):
    """Steps/s of workers that wait for the slowest one."""
    return steps * len(compute) / max(cycle_times(compute, link, steps))


def summed(compute, link):
    n = len(compute)
    return n / (max(compute) * STEP_S + EXCHANGE_S * max(link) * (n - 1) / n)


RATES = {  # steps/s in the long run
    "sync=bsp": slowest,
    "sync=asp": lambda *cluster: sum(1 / cycle for cycle in cycle_times(*cluster)),
    "sync=ssp sync.staleness=0": slowest,
    "sync=ssp sync.staleness=3": slowest,
    "sync=local_sgd sync.local_steps=5": lambda *cluster: slowest(*cluster, 5),
    "sync=bsp topology=all_reduce": summed,
}


@quick
@given(clusters)
@pytest.mark.parametrize("mode", RATES)
def test_the_rate_is_that_of_its_formula(mode, cluster):
    ran = timed(*cluster, *mode.split(), steps=5 if "local_sgd" in mode else 1)
    assert ran.steps_per_s == pytest.approx(RATES[mode](*cluster), rel=0.01)
    assert all(sum(ledger.values()) == ran.time_ns for ledger in ran.ledgers)
    if "asp" in mode:
        assert all(ledger["wait"] == 0 for ledger in ran.ledgers)
    if "ssp" in mode:
        bound = int(mode[-1])
        assert ran.end["max_lead"] <= bound
        assert max(ran.end["commits"]) - min(ran.end["commits"]) <= bound + 1


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
