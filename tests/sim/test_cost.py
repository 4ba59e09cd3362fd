"""The cost of a worker's round in virtual time, counted in steps of the interpreter instead of
seconds.

It is the same with 100 workers as with 25, on every topology; so is the cost of planning.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ashl.config.compose import compose
from ashl.planning.compile_plan import prepare_plan
from tests.benchmarks.simulator import simulation

FEW, MANY = 25, 100
ROUNDS = 3
MOST = 1.3  # times as many steps for each round of a worker
GROUPS = "topology=partial_all_reduce schedule=single"
CASES = {
    "server, bsp": "sync=bsp",
    "server, asp": "sync=asp",
    "server, ssp": "sync=ssp",
    "all-reduce": "topology=all_reduce sync=bsp",
    "ring": "topology=gossip sync=d_psgd",
    "ring, evaluated often": "topology=gossip sync=d_psgd eval.every_s=0.1",
    "pairs": "topology=gossip sync=ad_psgd",
    "smart groups": f"{GROUPS} sync=ripples_smart",
    "random groups": f"{GROUPS} sync=ripples_random",
    "static groups": f"{GROUPS} sync=ripples_static",
    "first-come groups": f"{GROUPS} sync=ripples_first_come",
}
LIKE_SMART = ("random groups", "static groups", "first-come groups")


def composed(line: str, n: int) -> dict[str, Any]:
    base = (
        "runtime=sim",
        "tracking=none",
        "runtime.gradients=false",
        "model=mlp",
        "model.hidden=[8]",
    )
    steps = (
        "dataset.batch_size=1",
        "cluster.exchange_s=0.01",
        "cluster.link=null",
        f"stop.steps={ROUNDS * n}",
    )
    return compose(
        [*base, *steps, f"cluster.compute={[1 + i % 7 / 2 for i in range(n)]}", *line.split()], None
    )


def steps_of(run: Callable[[], object]) -> int:
    """Count the Python instructions of a call, with every iteration of a loop."""
    count = 0

    def step(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in LIKE_SMART else ()) for case in CASES],
)
def test_a_round_costs_a_worker_the_same_among_many(case: str) -> None:
    costs = []
    for n in (FEW, MANY):
        run = simulation(prepare_plan(composed(CASES[case], n)).plan)
        run()  # what is kept from run to run is there
        costs.append(steps_of(run) / (ROUNDS * n))
    assert costs[1] < MOST * costs[0], (
        f"{costs[0]:.0f} steps with {FEW} workers, {costs[1]:.0f} with {MANY}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["server, bsp", "all-reduce", "ring", "pairs", "smart groups"])
def test_planning_costs_by_the_worker(case: str) -> None:
    costs = []
    for n in (FEW, MANY):
        config = composed(CASES[case], n)
        prepare_plan(config)
        costs.append(steps_of(lambda config=config: prepare_plan(config)) / n)
    assert costs[1] < MOST * costs[0], (
        f"{costs[0]:.0f} steps a worker of {FEW}, {costs[1]:.0f} of {MANY}"
    )
