"""Planners: hand-computed plans, laws on random clusters, exactness against brute force."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ashl.plan.profile import Profile
from ashl.planner.assignment import assignments, costs_of, sent_share
from ashl.planner.balanced import Load, anchor_of, balance_cycles
from ashl.planner.hidden import Hidden
from ashl.planner.online import Averages
from tests.plans import (
    BALANCED,
    ONLINE,
    PAPER,
    REFERENCE,
    TICK_S,
    cluster,
    cycles,
    linear,
    pairs,
    ratios,
    reference,
    spread,
    steps,
    wait_share,
)

# --- the paper's algorithms, by hand
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "ahl", "shl"),
    [
        (0.2, (16, 11, 8), (4, 3, 2)),
        (0.5, (17, 11, 8), (5, 3, 2)),
        (1.0, (18, 11, 8), (6, 3, 2)),
        (1.5, (19, 12, 8), (7, 4, 2)),
        (5.0, (26, 14, 8), (14, 6, 2)),
    ],
)
def test_the_papers_cluster(rho: float, ahl: tuple[int, ...], shl: tuple[int, ...]) -> None:
    assert steps(PAPER.assign(reference(rho), 8, None, pairs)) == ahl
    assert steps(PAPER.assign(reference(rho), 2, None, pairs)) == shl


def test_the_papers_cluster_in_full() -> None:
    """T_max = 0.64 + 0.24 = 0.88 s in AHL and 0.16 + 0.24 = 0.40 s in SHL."""
    ahl, shl = (PAPER.assign(reference(1.5), h, None, pairs) for h in (8, 2))
    assert [round(w.data_share, 3) for w in shl] == [0.538, 0.308, 0.154]
    assert cycles(ahl) == pytest.approx([0.88, 0.90, 0.88])
    assert cycles(shl) == pytest.approx([0.40, 0.42, 0.40])
    assert ratios(shl) == [1.0, 1.0, 1.0]


def test_algorithm_2_by_hand() -> None:
    """SHL at rho = 1.5 and r = 0.1: rest = (0.34, 0.33, 0.28), push = (0.06, 0.09, 0.12), T =
    0.346, R by hand.

    Worker 0 defines T_max; worker 1 has room for R = 0.016 / 0.09, worker 2 for R = 0.066 / 0.12.
    """
    plan = PAPER.assign(reference(1.5), 2, 0.1, linear)
    assert steps(plan) == (7, 4, 2)
    assert ratios(plan) == pytest.approx([0.1, 0.016 / 0.09, 0.066 / 0.12])
    assert ratios(plan)[0] == 0.1
    assert cycles(plan) == pytest.approx([0.346] * 3)
    charged = PAPER.assign(reference(1.5), 2, 0.1, pairs)
    assert ratios(charged) == ratios(plan)  # decided on push · R, as printed ...
    # the plan has it in bytes as sent
    assert cycles(charged) == pytest.approx([0.352, 0.362, 0.412])


@pytest.mark.parametrize(
    ("exchange", "h"),
    [(0.05, 2), (0.15, 2), (0.25, 4), (0.35, 4)],
    ids=["1.5->2", "2.5->2", "3.5->4", "4.5->4"],
)
def test_half_goes_to_even(exchange: float, h: int) -> None:
    """Worker 0 fills (exchange + 0.1) / 0.1 steps, which in floating point is never just a half."""
    assert steps(PAPER.assign(cluster([0.1, 0.1], [0.0, exchange]), 1, None, pairs)) == (h, 1)


def test_where_a_push_costs_nothing_there_is_nothing_to_save() -> None:
    free = cluster([1, 3], [0, 0])
    assert ratios(PAPER.assign(free, 2, 0.1, pairs)) == [1.0, 1.0]
    assert ratios(BALANCED.assign(free, 2, 0.1, pairs)) == [1.0, 1.0]


# --- laws
# --------------------------------------------------------------------------------------------------

milliseconds = st.integers(1, 400).map(lambda ms: ms / 1000)
PRESETS = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.9, 1.0])


@st.composite
def clusters(draw: st.DrawFn, most: int = 6) -> Profile:
    n = draw(st.integers(1, most))
    exchange = st.integers(0, 2000).map(lambda ms: ms / 1000)
    return cluster(
        draw(st.lists(milliseconds, min_size=n, max_size=n)),
        draw(st.lists(exchange, min_size=n, max_size=n)),
        compress=draw(st.sampled_from([0.0, 0.05])),
        fixed=draw(st.sampled_from([0.0, 0.2])),
    )


law = settings(max_examples=150, deadline=None)


@law
@given(clusters(), st.integers(1, 12))
def test_paper_comes_within_half_a_step(profile: Profile, h_preset: int) -> None:
    plan = PAPER.assign(profile, h_preset, None, pairs)
    t_max = max(w.step_s * h_preset + w.push_s + w.pull_s for w in profile.workers)
    assert min(steps(plan)) >= h_preset
    assert h_preset in steps(plan)
    assert sum(w.data_share for w in plan) == pytest.approx(1)
    for worker, cycle in zip(profile.workers, cycles(plan), strict=True):
        assert abs(cycle - t_max) <= worker.step_s / 2 + TICK_S


@law
@given(clusters(), st.integers(1, 12), PRESETS)
def test_paper_compresses_nobody_more_than_preset(
    profile: Profile, h_preset: int, r_preset: float
) -> None:
    plan = PAPER.assign(profile, h_preset, r_preset, linear)
    assert all(r_preset <= ratio <= 1 for ratio in ratios(plan))
    rows = zip(profile.workers, steps(plan), strict=True)
    first = [w.step_s * h + w.compress_s + w.push_s * r_preset + w.pull_s for w, h in rows]
    longest = first.index(max(first))
    assert ratios(plan)[longest] == pytest.approx(
        r_preset if profile.workers[longest].push_s else 1.0, rel=1e-12
    )


@law
@given(clusters(), st.integers(1, 12))
def test_balanced_is_never_wider_than_paper(profile: Profile, h_preset: int) -> None:
    paper, balanced = (
        planner.assign(profile, h_preset, None, pairs) for planner in (PAPER, BALANCED)
    )
    assert spread(balanced) <= spread(paper) + TICK_S


@law
@given(clusters(), st.integers(1, 12), PRESETS, st.sampled_from([None, 4, 16]))
def test_balanced_ratios_fill_the_common_cycle(
    profile: Profile, h_preset: int, r: float, h_max: int | None
) -> None:
    """No worker exceeds the common cycle; a worker with spare time has density 1; no density is
    below the preset.
    """
    plan = replace(BALANCED, h_max=h_max).assign(profile, h_preset, r, pairs)
    common = max(cycles(plan))
    assert all(r <= worker.compression_ratio <= 1 for worker in plan)
    assert all(1 <= h <= (h_max or h) for h in steps(plan))
    for worker in plan:
        assert worker.compression_ratio == 1 or worker.predicted_cycle_s == pytest.approx(
            common, rel=1e-4
        )
        assert (
            sent_share(pairs, worker.compression_ratio) <= 1
        )  # pairs dearer than the dense vector are never sent


def brute_force(loads: list[Load], h_preset: int) -> tuple[int, int, int]:
    """(spread, longest cycle, -steps) at best, of all integers that keep the anchor's steps."""
    anchor, kept = anchor_of(loads, h_preset)
    limit = (
        max(load.cycle(1) for load in loads)
        + loads[anchor].cycle(kept)
        + max(load.step for load in loads)
    )
    choices = [range(1, (load.most or limit // load.step + 1) + 1) for load in loads]
    choices = [
        range(kept, kept + 1) if load == loads[anchor] else own
        for load, own in zip(loads, choices, strict=True)
    ]
    best = []
    for combination in itertools.product(*choices):
        times = [load.cycle(h) for load, h in zip(loads, combination, strict=True)]
        best.append((max(times) - min(times), max(times), -sum(combination)))
    return min(best)


@law
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([None, 1, 3, 6]),
)
def test_balanced_is_exact(costs: list[tuple[int, int]], h_preset: int, h_max: int | None) -> None:
    loads = [Load(step, base, 0, h_max) for step, base in costs]
    cycle, chosen = balance_cycles(loads, h_preset)
    times = [load.cycle(h) for load, h in zip(loads, chosen, strict=True)]
    assert max(times) == cycle
    assert (max(times) - min(times), max(times), -sum(chosen)) == brute_force(loads, h_preset)


@law
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 99), st.integers(0, 80)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 6),
    st.sampled_from([None, 1, 3, 6]),
)
def test_workers_of_equal_costs_get_equal_steps(
    costs: list[tuple[int, int, int]], h_preset: int, h_max: int
) -> None:
    loads = [Load(*cost, h_max) for cost in costs]
    _, chosen = balance_cycles([*loads, *loads], h_preset)
    assert chosen[: len(loads)] == chosen[len(loads) :]


# --- balanced, by hand
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "rounded", "balanced"),
    [((8, 8.5), (3, 2, 1), (3, 3, 1)), ((10, 14), (2, 2, 1), (2, 1, 1))],
    ids=["both up", "both down"],
)
def test_balanced_moves_two_workers_the_same_way(
    pair: tuple, rounded: tuple, balanced: tuple
) -> None:
    """Rounding with an anchor of 1 + 20 s gives cycles of (24, 17, 21) and (20, 28, 21) s: one up,
    one down.
    """
    profile = cluster([*pair, 1], [0, 0, 20])
    assert steps(PAPER.assign(profile, 1, None, pairs)) == rounded
    assert steps(BALANCED.assign(profile, 1, None, pairs)) == balanced


def test_h_max_bounds_the_cycle_and_the_slow_workers_steps() -> None:
    """One worker 30 times slower: filling its 8 steps would take 240 of the others."""
    profile = cluster([1, 1, 30], [0, 0, 0])
    assert steps(BALANCED.assign(profile, 8, None, pairs)) == (240, 240, 8)
    assert steps(replace(BALANCED, h_max=64).assign(profile, 8, None, pairs)) == (64, 64, 2)
    assert steps(replace(BALANCED, h_max=16).assign(profile, 8, None, pairs)) == (16, 16, 1)


def test_pairs_that_cost_more_than_the_vector_are_not_sent() -> None:
    plan = BALANCED.assign(reference(1.5), 2, 0.6, pairs)
    assert ratios(plan) == [1.0, 1.0, 1.0]
    assert steps(plan) == steps(BALANCED.assign(reference(1.5), 2, None, pairs))


def test_one_slow_worker_holds_nobody_up() -> None:
    """The shipped one_slow under BSP waits 3 · 80 ms of 4 · 110 ms; planned, nobody waits."""
    slow = cluster([0.02, 0.02, 0.02, 0.1], [0.01] * 4)
    assert wait_share(
        assignments(costs_of(slow, False), [1] * 4, [1.0] * 4, pairs)
    ) == pytest.approx(0.24 / 0.44)
    plan = BALANCED.assign(slow, 2, None, pairs)
    assert steps(plan) == (10, 10, 10, 2)
    assert wait_share(plan) < 0.02


@pytest.mark.parametrize("planner", [PAPER, BALANCED, ONLINE], ids=["paper", "balanced", "online"])
def test_where_exchanges_are_hidden_h_alone_makes_the_cycles_equal(planner: Any) -> None:
    """Links of 4, 6 and 8 play no part, and nobody sends more than is preset."""
    profile = cluster(*REFERENCE)
    rows = Hidden(planner, planner.replans).assign(profile, 6, 0.1, pairs)
    assert [row.local_steps for row in rows] == [12, 8, 6]
    assert [row.compression_ratio for row in rows] == [0.1] * 3
    assert [row.predicted_cycle_s for row in rows] == pytest.approx([24.0] * 3)
    assert [
        row.compression_ratio for row in Hidden(planner, False).assign(profile, 6, None, pairs)
    ] == [1.0] * 3


def test_a_hidden_exchange_that_turns_slower_moves_no_plan_and_a_slower_step_does() -> None:
    planner, state = Hidden(ONLINE, True), Averages(cluster(*REFERENCE))
    rows = planner.assign(state.profile, 6, 0.1, pairs)
    for step_s, replanned in ((2.0, False), (4.0, True)):
        for _ in range(200):
            state = planner.observe(state, 0, step_s, 100.0, 100.0, 0.2)
        state, fresh = planner.replan(state, rows, 6, 0.1, pairs)
        assert (fresh is not None) == replanned
    assert [row.local_steps for row in fresh] == [6, 8, 6]
    assert [row.compression_ratio for row in fresh] == [0.1] * 3
