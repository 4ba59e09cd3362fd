"""ASHL's timing claims on its own testbed: three workers, compute 2:3:4, transfers 4:6:8, ρ =
exchange_s / step_s.

AHL never waits, so every worker commits asynchronously. SHL does the same until the fastest worker
has used up its slack of s commits. From then on it has the rate of its longest cycle. Source: Shen
et al., "ASHL", IEEE TC 2024, and its released emulation.
"""

import math

import pytest

from tests.support import Ran, planned, simulated

STEP_S, COMPUTE, LINK = 0.02, (2, 3, 4), (4, 6, 8)
BSP = {rho: 3 / (STEP_S * (4 + 8 * rho)) for rho in (0.2, 0.5, 1.5)}  # steps/s
AHL = {0.5: (17, 11, 8), 1.5: (19, 12, 8)}  # H by worker, for the slowest worker's 8
SHL = {0.2: (4, 3, 2), 0.5: (5, 3, 2), 1.5: (7, 4, 2)}


def timed(rho: float, *overrides: str) -> Ran:
    cluster = (
        "cluster=ashl_paper",
        f"cluster.step_s={STEP_S}",
        f"cluster.exchange_s={STEP_S * rho}",
    )
    return simulated(
        "runtime.gradients=false", "schedule=single", "planner=paper", *cluster, *overrides
    )


def cycles(rho: float, steps: tuple[int, ...]) -> list[float]:
    """Seconds from commit to commit of a worker that never waits."""
    return [STEP_S * (h * c + rho * k) for h, c, k in zip(steps, COMPUTE, LINK, strict=True)]


def free(rho: float, steps: tuple[int, ...]) -> float:
    """Steps/s of workers that never wait."""
    return sum(h / cycle for h, cycle in zip(steps, cycles(rho, steps), strict=True))


def pace(ran: Ran, from_s: float = 0.0, until_s: float = math.inf) -> float:
    """Steps/s of all workers: of each, what it did in its whole rounds in this window of
    the clock.
    """
    total = 0.0
    for rank in range(3):
        ends = [
            r["end_ns"] / 1e9
            for r in ran.of("Round")
            if r["rank"] == rank and r["end_ns"] < ran.time_ns
        ]
        inside = [from_s] * (from_s == 0) + [end for end in ends if from_s < end <= until_s]
        total += (
            (len(inside) - 1)
            * ran.plan.stages[0].workers[rank].local_steps
            / (inside[-1] - inside[0])
        )
    return total


def wait_share(ran: Ran) -> float:
    return sum(ledger["wait"] for ledger in ran.ledgers) / (len(ran.ledgers) * ran.time_ns)


def planned_steps(ran: Ran) -> tuple[int, ...]:
    return tuple(worker.local_steps for worker in ran.plan.stages[0].workers)


@pytest.mark.parametrize(("rho", "times_bsp"), [(0.5, 2.67), (1.5, 4.69)])
def test_ahl_never_waits(rho: float, times_bsp: float) -> None:
    ran = timed(rho, "sync=ahl", "schedule.h_preset=[8]", "stop.steps=1000")
    assert planned_steps(ran) == AHL[rho]
    assert wait_share(ran) == 0
    assert pace(ran) == pytest.approx(free(rho, AHL[rho]), rel=1e-6)
    assert pace(ran) / BSP[rho] == pytest.approx(times_bsp, abs=0.005)


@pytest.mark.parametrize(
    ("rho", "at_first", "in_the_long_run"),
    [(0.2, 1.79, 1.65), (0.5, 2.22, 2.22), (1.5, 3.42, 3.30)],
)
def test_shl_slows_down_once_its_slack_is_used(
    rho: float, at_first: float, in_the_long_run: float
) -> None:
    """The lead grows by one commit every 1/(1/T_fast − 1/T_slow) seconds, and s of those
    are free.
    """
    ran = timed(rho, "sync=shl", "schedule.h_preset=[2]", "stop.seconds=120")
    steps = planned_steps(ran)
    assert steps == SHL[rho]
    times = cycles(rho, steps)
    lead = 1 / min(times) - 1 / max(times)  # commits per second by which the fastest gets ahead
    used_s = 0.95 * 3 / lead if lead > 1e-9 else 50.0
    begun, later = pace(ran, 0, used_s), pace(ran, 2 * used_s)
    assert begun == pytest.approx(free(rho, steps), rel=1e-6)
    assert begun / BSP[rho] == pytest.approx(at_first, abs=0.005)
    assert later == pytest.approx(sum(steps) / max(times), rel=0.01)
    assert later / BSP[rho] == pytest.approx(in_the_long_run, abs=0.02)


@pytest.mark.parametrize("rho", [0.2, 1.5])
def test_bsp_waits_a_quarter_of_the_time_for_every_rho(rho: float) -> None:
    assert wait_share(timed(rho, "sync=bsp", "stop.steps=60")) == pytest.approx(0.25, abs=1e-9)


def test_one_slow_worker_costs_bsp_half_and_shl_next_to_nothing() -> None:
    base = ("runtime.gradients=false", "schedule=single", "cluster=one_slow", "stop.seconds=20")
    shl = simulated(*base, "sync=shl", "schedule.h_preset=[2]", "planner=balanced")
    assert wait_share(simulated(*base, "sync=bsp")) > 0.5
    assert planned_steps(shl) == (10, 10, 10, 2)
    assert wait_share(shl) < 0.02


@pytest.mark.limit("schedule=ashl_plus")
def test_ashl_plus_without_compression_is_ashl() -> None:
    alike = ("compression=none", "planner=online", "aggregate=uniform", "schedule.profile_steps=3")
    both = (["schedule=ashl_plus", "schedule.shl_scale=1"], ["schedule=ashl"])
    own, plain = (planned(*schedule, "schedule.h_preset=[4,2]", *alike) for schedule in both)
    assert own.stages == plain.stages


def test_ashl_plus_takes_smaller_steps_in_shl() -> None:
    plan = planned("schedule=ashl_plus", "schedule.shl_scale=0.25", "aggregate.scale=2")
    assert [stage.aggregate["scale"] for stage in plan.stages] == [2, 2, 0.5]


def test_ashl_plus_pulls_a_share_unless_told_otherwise() -> None:
    ratios = [
        {stage.topology["pull_ratio"] for stage in planned("schedule=ashl_plus", *more).stages}
        for more in ((), ("topology.pull_ratio=0.5",))
    ]
    assert ratios == [{0.1}, {0.5}]
