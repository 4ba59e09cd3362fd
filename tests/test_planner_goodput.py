"""H by gradient noise and by what exchanges cost: the estimate, the closed form, the limits and
what is refused.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ashl.errors import UsageError
from ashl.planner.goodput import Goodput, Noise, candidates, count_independent_gradients
from ashl.planner.online import Averages
from tests.conf_option import conf_option
from tests.plans import cluster, pairs, steps
from tests.support import planned, simulated

GOODPUT: Goodput = conf_option("planner", "goodput", momentum=0.0)
D, BATCH = 400, 32


def chosen(noise: Noise, exchange_s: float, h_max: int = 64) -> tuple[int, ...] | None:
    """Return the H of four equal workers with 1 s a step and 2 steps until now."""
    online = replace(GOODPUT, h_max=h_max)
    profile = cluster([1] * 4, [exchange_s] * 4)
    plan = online.assign(profile, 2, None, pairs)
    _, fresh = online.replan(Averages(profile, commits=100, noise=noise), plan, 2, None, pairs)
    return fresh and steps(fresh)


def known(signal: float, spread: float) -> Noise:
    return Noise(0, None, BATCH, pairs=99, signal=signal, spread=spread)


@pytest.mark.parametrize(
    ("scale", "exchange_s", "best"), [(2048, 4, 8), (8192, 4, 16), (2048, 16, 16), (32, 4, 1)]
)
def test_on_equal_workers_h_is_the_root_of_noise_and_cost(
    scale: float, exchange_s: float, best: int
) -> None:
    assert best == round((scale / (4 * BATCH) * exchange_s) ** 0.5)
    fresh = chosen(known(0.01, 0.01 * scale), exchange_s)
    assert fresh is not None
    assert set(fresh) <= {h for h in range(1, 65) if best / 1.25 <= h <= best * 1.25}


@pytest.mark.limit("planner=goodput")
def test_limits_of_noise_and_cost() -> None:
    assert (
        chosen(known(1, 0), 4) == chosen(known(1, -1), 4) == (1,) * 4
    )  # no noise: each step on what all know
    assert chosen(known(1, 1000), 0) == (1,) * 4  # exchanges that cost nothing
    assert (
        chosen(known(0, 1), 4) == chosen(known(-1, 1), 4, 64) == (64,) * 4
    )  # no gradient: the fastest
    few = replace(known(1, 0), pairs=49)
    assert chosen(few, 4) is None  # not enough is known yet, and `online` finds nothing better


@pytest.mark.parametrize("h_max", [1, 2, 3, 7, 64, 1000])
def test_candidates_reach_the_bound_in_small_steps(h_max: int) -> None:
    tried = list(candidates(h_max))
    assert (tried[0], tried[-1]) == (1, h_max)
    assert all(a < b <= max(a + 1, 1.25 * a) for a, b in pairwise(tried))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_noise_is_measured_from_what_workers_push_anyway(momentum: float) -> None:
    """Workers of 1, 3 and 8 steps around one gradient; B is that of single samples, for every H and
    momentum.
    """
    planner, draw = (
        replace(GOODPUT, momentum=momentum, smoothing=1e-9),
        torch.Generator().manual_seed(1),
    )
    gradient, sigma = torch.full((D,), 0.05), 1.0
    state, momenta = Averages(cluster([1, 1, 1], [1, 1, 1])), [torch.zeros(D) for _ in range(3)]
    for push in range(900):
        worker, taken, update = push % 3, (1, 3, 8)[push % 3], torch.zeros(D)
        for _ in range(taken):
            noisy = gradient + sigma / BATCH**0.5 * torch.randn(D, generator=draw)
            momenta[worker] = momentum * momenta[worker] + noisy
            update = update - 0.1 * momenta[worker]
        if push > 90:  # momenta are what they will be
            state = planner.observe_update(state, worker, update, taken, taken * BATCH)
    assert state.noise is not None
    assert state.noise.scale == pytest.approx(sigma**2 / 0.05**2, rel=0.15)


def test_momentum_averages_over_the_steps_before() -> None:
    assert [count_independent_gradients(h, 0.0) for h in (1, 2, 8)] == [1, 2, 8]
    assert count_independent_gradients(1, 0.9) == pytest.approx(1.9 / 0.1)
    assert count_independent_gradients(100_000, 0.9) == pytest.approx(100_000, rel=1e-3)


BASE = (
    "model.hidden=[16]",
    "cluster=ashl_paper",
    "aggregate=uniform",
    "stop.steps=200",
    "optimizer.lr=0.1",
)
PLANNED = (*BASE, "sync=ssp", "sync.local_steps=plan")


@pytest.mark.limit("planner=goodput")
@pytest.mark.parametrize(
    "limit",
    [
        ("cluster.num_workers=1", "schedule.h_preset=[3]"),
        ("planner.h_max=1", "schedule.h_preset=[1]"),
    ],
    ids=["one-worker", "h-max-1"],
)
def test_where_there_is_nothing_to_choose_it_is_online(limit: tuple[str, ...]) -> None:
    own, other = (
        simulated(*PLANNED, *limit, f"planner={planner}") for planner in ("goodput", "online")
    )
    assert (own.sha256, own.time_ns, own.ledgers) == (other.sha256, other.time_ns, other.ledgers)


def test_hidden_exchanges_cost_nothing_so_that_h_is_one() -> None:
    ran = simulated(
        *PLANNED,
        "planner=goodput",
        "overlap=delayed",
        "schedule.h_preset=[4]",
        "planner.smoothing=0.1",
    )
    assert min(ran.of("Replan")[-1]["local_steps"]) == 1


def test_updates_of_no_gradients_cannot_be_weighed() -> None:
    with pytest.raises(UsageError, match="needs whole updates of single workers"):
        planned(*PLANNED, "planner=goodput", "schedule.h_preset=[2]", "runtime.gradients=false")
