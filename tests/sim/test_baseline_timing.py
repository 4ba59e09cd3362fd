"""Baselines in virtual time: commits at ADSP's check points, DSSP's range, AdaComm's periods,
LB-BSP's balance.
"""

import math
from types import SimpleNamespace

import pytest

from ashl.stage.progress import Progress
from ashl.sync.adsp import ADSP, reward
from ashl.sync.dssp import Controller, grant
from ashl.sync.lb_bsp import share_out
from tests.conf_option import conf_option
from tests.support import simulated

NS = 1_000_000_000


def commit_times(ran):
    """When the server answered each worker's commits, in ns: where the pull after it starts."""
    times = [[] for _ in range(ran.plan.num_workers)]
    for record in ran.of("Round"):
        pulls = [start for kind, start, _ in record["spans_ns"] if kind == "pull"]
        times[record["rank"]] += pulls[-1:]
    return times


def timed(*overrides):
    return simulated("runtime.gradients=false", "stop.steps=null", *overrides)


# --- ADSP
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["one_slow", "mixed", "ashl_paper"])
@pytest.mark.parametrize("commits", [2, 5])
def test_adsp_has_equal_commits_at_check_points(cluster, commits):
    ran = timed(
        f"cluster={cluster}",
        "sync=adsp",
        "sync.gamma_s=4",
        f"sync.commits={commits}",
        "stop.seconds=40",
    )
    times = commit_times(ran)
    for check in range(1, 10):
        done = [sum(time <= check * 4 * NS for time in worker) for worker in times]
        assert max(done) - min(done) <= 1
    waiting = sum(ledger["wait"] for ledger in ran.ledgers)
    assert waiting == 0
    assert max(ran.end["steps_by"]) > min(ran.end["steps_by"])  # the fast do more in the same time


def curve(a2, b, c, times=(3.0, 4.0, 5.5)):
    return [(t, 1 / (a2 * t + b) + c) for t in times]


def test_adsp_predicts_when_its_curve_gets_to_the_target():
    seconds = (1 / (0.2 - 0.1) - 0.5) / 0.4
    assert reward(curve(0.4, 0.5, 0.1), 0.2) == pytest.approx(1 / seconds)
    assert reward(curve(0.1, 0.2, -1.0), 0.2) == pytest.approx(
        0.1 / (1 / 1.2 - 0.2)
    )  # as released, c has any sign


def test_adsp_ranks_curves_that_never_get_to_the_target():
    """The reward by the formula, with the period's own clock: below 0, and higher nearer to the
    target.
    """
    here = [(t - 3.0, loss) for t, loss in curve(0.4, 0.5, 1.9)]
    assert (
        reward(curve(0.4, 0.5, 1.9), 0.1)
        == reward(here, 0.1)
        == pytest.approx(0.4 / (1 / (0.1 - 1.9) - 1.7))
    )
    assert reward(curve(0.4, 0.5, 1.9), 0.1) < reward(curve(0.4, 0.5, 1.0), 0.1) < 0


def test_adsp_sees_no_reward_in_what_does_not_fall():
    for losses in ((1.0, 1.0, 1.0), (1.0, 0.9, 0.95), (0.9, 1.0, 0.95), (math.nan,) * 3):
        assert reward(list(enumerate(losses)), 0.1) == -math.inf
    assert reward([(0, 1.0), (1, 0.9)], 0.1) == -math.inf
    assert reward([(0, 1.0), (1, 0.9), (2, 0.05)], 0.1) == math.inf
    assert (
        reward([(0, 1.0), (1, 0.95), (2, 0.8)], 0.1) is None
    )  # falls ever faster: not on the curve


def checked(rule, periods):
    """C after each check of Γ = 2 s, by the losses at the middle and the end of each period; the
    first starts at 3.
    """
    progress = Progress(1, loss=3.0)
    state = rule.begin(None, progress)
    rates = []
    push = SimpleNamespace(worker=0, push_s=0.0, pull_s=0.0)
    rule.observe(None, state, progress, push)
    for number, losses in enumerate(periods):
        for half, loss in enumerate(losses, start=1):
            progress.now_s, progress.loss = 2.0 * number + half, loss
            rule.observe(None, state, progress, push)
        rates.append(state.rate)
    return rates


def adsp(**fields):
    values = {
        "gamma_s": 2.0,
        "commits": 4,
        "floor_s": 0.05,
        "loss_target": 0.1,
        "search_s": 5.0,
        "rise": 0.3,
    }
    return ADSP(**(values | fields))


def test_adsp_searches_on_where_the_fit_stays_above_the_target():
    """Each of these curves ends far above 0.1, but each nearer to it than the one before."""
    assert checked(adsp(), [(2.9, 2.85), (2.7, 2.6), (2.3, 2.1), (2.1, 2.1)]) == [5, 6, 7, 6]


def test_adsp_searches_again_from_its_current_rate():
    ended = [(2.9, 2.85), (2.7, 2.6), (2.6, 2.6)]  # at C = 5
    quiet = [(2.6, 2.6)] * 3  # until 5 s have passed
    assert checked(adsp(), [*ended, *quiet, (2.4, 2.3)]) == [5, 6, 5, 5, 5, 5, 6]
    risen = [(3.0, 3.4)]  # by 31 % since the last check
    assert checked(adsp(), [*ended, *risen, (3.2, 3.1)]) == [5, 6, 5, 5, 6]
    assert checked(adsp(), [*ended, (3.0, 3.2), (3.3, 3.5), (3.2, 3.1)]) == [
        5,
        6,
        5,
        5,
        5,
        5,
    ]  # never by 30 %
    assert checked(adsp(search_s=None), [*ended, *quiet, *risen]) == [4] * 7


def test_adsp_does_not_count_periods_that_accelerate():
    """A loss that only begins to fall says nothing of the rate."""
    assert checked(adsp(), [(2.99, 2.9), (2.8, 2.6), (2.4, 2.3), (2.2, 2.2)]) == [4, 4, 5, 4]


# --- DSSP
# --------------------------------------------------------------------------------------------------


def test_dssp_grants_nothing_to_a_push_that_came_too_late():
    """It was let go for what had been granted to the push before."""
    rule, progress = conf_option("sync", "dssp", s_low=0, s_high=3), Progress(3)
    for worker in (1, 1, 2, 2):
        progress.commit(worker, 1, 1)
    progress.start_waiting(1, 0, False)
    progress.latest = 1
    granted = Controller([], [], granted=True)
    assert rule.may_proceed(granted, progress) == [1]
    progress.release(1)
    progress.start_waiting(2, 5, True)
    progress.latest = 2
    assert rule.may_proceed(granted, progress) == []


def test_dssp_grants_what_waits_least():
    """The fastest pushes every 3 s, now at 10; the slowest every 10 s, last at 9, so next at 19:
    arrivals at 10, 13, 16 and 19 wait 9, 6, 3 and 0 s.
    """
    assert [grant((7, 10), (-1, 9), room) for room in range(6)] == [0, 1, 2, 3, 3, 3]
    assert grant((7, 10), (0, 0), 5) == 0


# --- AdaComm
# --------------------------------------------------------------------------------------------------


def test_adacomm_stretches_under_a_falling_rate_only():
    """Halved to one step by the third check, stretched by √(0.1/0.025) = 2 where the rate has
    fallen to a quarter.
    """
    rule, rates = (
        conf_option("sync", "adacomm", local_steps=8, every_s=1.0),
        iter([0.1, 0.1, 0.1, 0.1, 0.025, 0.1]),
    )
    progress = SimpleNamespace(now_s=0.0, waiting=[0], num_present=1, loss=1.0, samples=0)
    stage = SimpleNamespace(
        num_workers=1, trainer=SimpleNamespace(rate=lambda samples: next(rates))
    )
    periods, state = [], rule.begin(stage, progress)
    for second in range(6):
        progress.now_s = float(second)
        state = rule.observe(stage, state, progress, None)
        periods.append(state.local_steps)
    assert periods == [8, 4, 2, 1, 2, 1]


# --- LB-BSP
# --------------------------------------------------------------------------------------------------


def test_lb_bsp_waits_little_where_bsp_waits_much():
    cluster = (
        "cluster=one_slow",
        "cluster.exchange_s=0.001",
        "dataset.batch_size=64",
        "stop.seconds=20",
    )

    def waits(sync):
        ran = timed(f"sync={sync}", *cluster)
        return sum(ledger["wait"] for ledger in ran.ledgers) / (4 * ran.time_ns), ran.end["samples"]

    (bsp, few), (balanced, many) = waits("bsp"), waits("lb_bsp")
    assert bsp > 0.5
    assert balanced < 0.05
    assert many > 2.5 * few


def test_lb_bsp_follows_a_worker_that_turns_slower():
    event = "cluster.events=[{time_s: 10, worker: 0, compute: 4}]"
    cluster = (
        "cluster=homogeneous",
        "cluster.exchange_s=0.001",
        "dataset.batch_size=64",
        "stop.seconds=30",
    )
    ran = timed("sync=lb_bsp", event, *cluster)
    late = [
        record
        for record in ran.of("Round")
        if record["start_ns"] > 20 * NS and record["end_ns"] < 29 * NS
    ]
    times = [
        sum(end - start for kind, start, end in record["spans_ns"] if kind == "compute")
        for record in late
    ]
    assert max(times) < 1.1 * min(times)


def test_lb_bsp_shares_out_the_whole_batch():
    assert share_out(128, [1.0] * 4) == [32] * 4
    assert share_out(128, [5.0, 5.0, 5.0, 1.0]) == [40, 40, 40, 8]
    assert share_out(64, [1000.0, 1.0, 1.0]) == [60, 2, 2]
    assert share_out(3, [9.0, 1.0, 1.0]) == [1, 1, 1]
