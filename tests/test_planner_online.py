"""The planner that follows: drift, jitter, averages, cooldown, in pure arithmetic."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ashl.plan.profile import Profile
from ashl.planner.assignment import assignments, costs_of, sent_share
from ashl.planner.online import Averages, Online, pace
from tests.plans import ONLINE, Plan, cluster, cycles, pairs, ratios, reference, steps


def slower(profile: Profile, worker: int, factor: float) -> Profile:
    workers = list(profile.workers)
    workers[worker] = replace(workers[worker], step_s=factor * workers[worker].step_s)
    return replace(profile, workers=tuple(workers))


def bounded_run(
    online: Online,
    planned: Profile,
    truth: Profile,
    h_preset: int,
    rounds: int,
    jitter: float = 0.0,
    r_preset: float | None = None,
) -> tuple[Plan, list[Plan]]:
    """A bounded stage in the long run, one commit each a round: the first plan, and the plan after
    each round.
    """
    plan, state, history = online.assign(planned, h_preset, r_preset, pairs), Averages(planned), []
    first, draw = plan, np.random.default_rng(0)
    for _ in range(rounds):
        for rank, worker in enumerate(truth.workers):
            step_s = worker.step_s * max(0.1, 1 + jitter * draw.standard_normal())
            part = sent_share(pairs, plan[rank].compression_ratio)
            state = online.observe(state, rank, step_s, worker.push_of(part), worker.pull_s, part)
            state, fresh = online.replan(state, plan, h_preset, r_preset, pairs)
            plan = fresh or plan
        history.append(plan)
    return first, history


def true_pace(plan: Plan, truth: Profile, encoded: bool = False) -> float:
    return pace(assignments(costs_of(truth, encoded), steps(plan), ratios(plan), pairs))


def changes(history: list[Plan]) -> int:
    return sum(old != new for old, new in itertools.pairwise(history))


@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("h_max", [None, 16, 64])
@pytest.mark.parametrize("r_preset", [None, 0.1])
def test_drift(worker: int, h_max: int | None, r_preset: float | None) -> None:
    """One of four turns 3 times slower: a static plan keeps under 60 % of a fresh plan's pace, this
    one over 80 %.
    """
    online = replace(ONLINE, h_max=h_max)
    before = cluster([0.02, 0.03, 0.04, 0.06], [0.01, 0.01, 0.02, 0.02])
    after = slower(before, worker, 3)
    first, history = bounded_run(online, before, after, 2, 20, r_preset=r_preset)
    encoded = r_preset is not None
    fresh = pace(online.assign(after, 2, r_preset, pairs))
    assert true_pace(first, after, encoded) < 0.6 * fresh
    assert true_pace(history[-1], after, encoded) > 0.85 * fresh
    whole = sum(sum(steps(p)) for p in history) / sum(
        sum(steps(p)) / true_pace(p, after, encoded) for p in history
    )
    assert whole > 0.8 * fresh  # the time in which the averages follow included
    assert changes(history) <= 3


def test_drift_with_a_bound_keeps_the_cycle() -> None:
    before = cluster([1, 1, 1, 5], [0.5] * 4)
    after = slower(before, 3, 3)
    (_, free), (_, bounded) = (
        bounded_run(replace(ONLINE, h_max=m), before, after, 2, 20) for m in (None, 16)
    )
    assert steps(bounded[-1]) == (16, 16, 16, 1)
    assert free[-1][3].local_steps == 2
    assert max(cycles(free[-1])) > 1.5 * max(cycles(bounded[-1]))


@pytest.mark.parametrize(("rho", "h_preset"), [(0.5, 2), (1.5, 2), (1.5, 8)])
def test_jitter_moves_nothing(rho: float, h_preset: int) -> None:
    """10 % on every commit's step time, 500 rounds."""
    profile = reference(rho)
    first, history = bounded_run(ONLINE, profile, profile, h_preset, 500, jitter=0.1)
    assert changes([first, *history]) == 0


def test_jitter_among_many_does_not_thrash() -> None:
    draw = np.random.default_rng(1)
    profile = cluster(draw.uniform(0.5, 5, 16).tolist(), draw.uniform(0.1, 5, 16).tolist())
    first, history = bounded_run(ONLINE, profile, profile, 2, 200, jitter=0.1)
    assert changes([first, *history]) <= 2


def test_averages_follow_and_a_compressed_push_counts_as_what_the_dense_one_takes() -> None:
    profile = cluster([1.0, 1.0], [4.0, 4.0], fixed=0.5)  # a push of 1 s latency and 1 s of bytes
    state = replace(ONLINE, alpha=0.5).observe(Averages(profile), 0, 3.0, 2 * 1.1, 0.0, payload=0.1)
    seen = state.profile.workers[0]
    assert (seen.step_s, seen.push_s, seen.pull_s) == pytest.approx(
        (2.0, 3.0, 2.0)
    )  # a pull of 0 s was not seen
    assert seen.push_of(0.1) == pytest.approx(1.5 * 1.1)
    assert state.profile.workers[1] == profile.workers[1]
    assert state.commits == 1


def test_it_is_judged_only_after_the_cooldown() -> None:
    profile = cluster([1, 1], [1, 1])
    plan = ONLINE.assign(profile, 4, None, pairs)
    state = Averages(slower(profile, 0, 5), commits=2 * ONLINE.cooldown_commits - 1)
    assert ONLINE.replan(state, plan, 4, None, pairs) == (state, None)
    state, fresh = ONLINE.replan(replace(state, commits=state.commits + 1), plan, 4, None, pairs)
    assert state.commits == 0
    assert fresh == ONLINE.assign(state.profile, 4, None, pairs)
