"""Pushes whose slices leave while backward goes on: the same model at a server, in the time of the
closed form.
"""

from dataclasses import replace
from itertools import product

import pytest

from ashl.config.construct import construct
from ashl.overlap.timeline import StepTimeline
from ashl.plan.plan import Plan
from ashl.planning.instantiate import layer_groups
from ashl.planning.step_timelines import make_timeline
from tests.benchmarks.simulator import simulation
from tests.support import planned

LINKS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.002",
    "cluster.step_s=0.03",
)
IMAGES = ("dataset=synthetic", "dataset.num_train=400", "dataset.num_test=100")
PUSHES = ("topology=parameter_server", "optimizer.momentum=0.9", *LINKS)
SERVER = (*PUSHES, *IMAGES, "model=lenet")
FIRST = "priority overlap.slice=3000 overlap.credit=2"
UNEQUAL = ("cluster.compute=[1,1,3]", "cluster.link=[1,2,1]")

SMALL = (*PUSHES, *UNEQUAL, "sync=bsp", "model=mlp", "model.hidden=[64]")


def four_layers(
    overlap: str, workers: int, size: int = 250, server: float | None = 1, **spec: object
) -> Plan:
    """The chain of the literature: a third of 15 s is forward, backward takes 3, 1, 2 and 4, pushes
    take 5, 1, 1 and 6. The server's port is so many times as fast as a worker's, or no bottleneck.
    """
    mbit_s = 0.008 * size / 250
    links = (
        "cluster.exchange_s=null",
        f"cluster.bandwidth_mbit_s={mbit_s}",
        "cluster.latency_s=0",
        "cluster.step_s=15",
    )
    plan = planned(
        "topology=parameter_server",
        "sync=bsp",
        "runtime.gradients=false",
        f"stop.steps={10 * workers}",
        f"cluster.compute={[1] * workers}",
        "cluster.link=null",
        *links,
        f"cluster.server_bandwidth_mbit_s={mbit_s * server if server else 'null'}",
    )
    layers = tuple(
        (f"layer{k}", (size * c,)) for k, c in enumerate((5, 1, 1, 6))
    )  # size · 4 bytes a second
    stage = replace(plan.stages[0], overlap={"_target_": f"ashl.overlap.{overlap}", **spec})
    return replace(plan, layers=layers, num_params=size * 13, work=(3, 1, 2, 4), stages=(stage,))


@pytest.mark.parametrize(
    ("overlap", "spec", "workers", "seconds"),
    [
        (
            "none.Serial",
            {},
            1,
            10 * (15 + 13 + 13) - 13,
        ),  # step, push, pull; the last push ends the run
        ("wfbp.WFBP", {}, 1, 10 * (22 + 13) - 13),
        ("merged.Merged", {"plan": [2, 2]}, 1, 10 * (24 + 13) - 13),
        # The pulls of 5, 1, 1 and 6 hide the forward pass except its last part, of 4/10 of 5 s: 22
        # - 5 + 13 + 2.
        ("tictac.TicTac", {"plan": "layers"}, 1, 22 + 9 * (22 - 5 + 13 + 2)),
        ("tictac.TicTac", {"plan": [2, 2]}, 1, 24 + 9 * (24 - 5 + 13 + 3)),
        ("tictac.TicTac", {"plan": [4]}, 1, 10 * (28 + 13) - 13),
        # Slice by slice the pull of each goes on beside the pushes that follow; the last one comes
        # alone.
        ("slices.Slices", {"slice": 250}, 1, 9 * (22 + 1) + 22),
        (
            "slices.Slices",
            {"slice": 750},
            1,
            9 * (22 - 5 + 3 + 2 + 3) + 22,
        ),  # of 3, 3, 1, 1, 3 and 2
        ("slices.Slices", {"slice": 1500}, 1, 9 * (9 + 6 + 13) + 22),
        # The slices that the next forward pass needs first go first, and the others overlap it: 20
        # and a pull of 1.
        ("priority.Priority", {"plan": "layers", "slice": 250, "credit": 1}, 1, 9 * (20 + 1) + 22),
        ("priority.Priority", {"plan": "layers", "slice": 250, "credit": 2}, 1, 9 * (21 + 1) + 22),
        # Through one port the second pull comes after 26, a push of that worker begins with its
        # first slice, and the
        # port serves it last. In the first round both begin at once.
        ("none.Serial", {}, 2, 15 + 26 + 9 * (26 + 15 + 13)),
        ("wfbp.WFBP", {}, 2, 9 + 26 + 9 * (26 + 9 + 13)),
        # From the second step on one worker is a slice behind, and the last two slices are whole one
        # right after the other.
        ("slices.Slices", {"slice": 250}, 2, 9 + 26 + 9 * (26 + 9 + 2)),
    ],
)
def test_the_chain_of_the_literature_to_the_nanosecond(overlap, spec, workers, seconds) -> None:
    sim = simulation(four_layers(overlap, workers, **spec))()
    assert sim.contexts[workers].counter.progress.end_ns == seconds * 10**9


@pytest.mark.parametrize(("latency_s", "slice"), [(0.1, 250), (0.25, 400)])
def test_slices_take_what_their_plan_says(latency_s, slice) -> None:
    """The closed form of the plan, with latencies, and merges that take no time."""
    plan = four_layers("slices.Slices", 1, slice=slice)
    plan = replace(plan, cluster={**plan.cluster, "latency_s": latency_s})
    chain = make_timeline(
        plan.stages[0], construct(plan.cluster, "cluster"), layer_groups(plan), server=True
    )
    step_ns = construct(plan.stages[0].overlap, "overlap").step_ns(chain)
    sim = simulation(plan)()
    assert sim.contexts[1].counter.progress.end_ns == 9 * step_ns + chain.end_ns((1, 1, 1, 1)), (
        "the last ends with its push"
    )


def by_priority(
    latency_s: float, workers: int, size: int = 250, port: float | None = None, **spec: object
) -> tuple[Plan, StepTimeline]:
    """Waited for layer by layer."""
    plan = four_layers("priority.Priority", workers, size, port, plan=[1, 1, 1, 1], **spec)
    plan = replace(plan, cluster={**plan.cluster, "latency_s": latency_s})
    chain = make_timeline(
        plan.stages[0], construct(plan.cluster, "cluster"), layer_groups(plan), server=True
    )
    assert chain is not None
    return plan, chain


def step_of(plan: Plan, steps: tuple[int, int] = (8, 16)) -> float:
    """In the long run, in virtual time."""
    n = plan.num_workers
    before, after = (
        simulation(replace(plan, limits=replace(plan.limits, steps=n * count)))()
        .contexts[n]
        .counter.progress.end_ns
        for count in steps
    )
    return (after - before) / (steps[1] - steps[0])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("latency_s", "slice", "credit"), [(0.1, 250, 1), (0.3, 400, 2), (1, 250, 4), (0.05, 1500, 2)]
)
def test_a_step_by_priority_takes_what_its_plan_says(latency_s, slice, credit, workers) -> None:
    """The time includes the confirmation of the server to the worker."""
    plan, chain = by_priority(latency_s, workers, slice=slice, credit=credit)
    assert step_of(plan) == construct(plan.stages[0].overlap, "overlap").step_ns(chain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latency_s", "port", "worse"),
    [(0.02, None, 1.001), (0.3, None, 1.001), (0.02, 1, 1.001), (0, 2, 1.09)],
)
def test_what_is_tuned_for_a_server_is_the_best_that_the_simulator_finds(
    latency_s, port, worse
) -> None:
    """If the server's NIC is a bottleneck workers are not served equally, which the plan does not
    know.
    """
    plan, chain = by_priority(latency_s, 2, 10_000, port, slice="auto", credit="auto")
    tuned = construct(plan.stages[0].overlap, "overlap").with_plan(chain)

    def step_ns(slice: int, credit: int) -> float:
        return step_of(
            by_priority(latency_s, 2, 10_000, port, slice=slice, credit=credit)[0], (2, 4)
        )

    sizes, credits = (60_000 // 2**k for k in range(5)), (1, 2, 4, 8)
    best = min(step_ns(size, count) for size, count in product(sizes, credits))
    assert step_ns(tuned.slice, tuned.credit) <= worse * best


def test_a_plan_weighs_what_all_push_at_once() -> None:
    """The port of the server takes one push after the other, and merged plans are made for that."""
    alike = ("cluster.compute=[1,1,1,1]", "cluster.link=null", "cluster.server_bandwidth_mbit_s=20")
    plan = planned(*SERVER, *alike, "sync=bsp", "overlap=merged")
    note = next(note for note in plan.notes if "its push and its pull" in note)
    whole_ms = 2 + 4 * 4 * plan.num_params * 8 / 20e3
    assert 2 * whole_ms < float(note.split("take ")[1].split()[0]) < 30 + 2 * whole_ms
