"""A quorum of learners and a grace window: DiLoCo with a server as a limit, waiting, and learners
that proceed alone.
"""

from functools import partial

import pytest

from ashl.errors import UsageError
from tests.support import simulated

BASE = ("optimizer.lr=0.02", "model.hidden=[8]", "cluster.compute=[1,1,1,3]", "sync.local_steps=2")
run = partial(simulated, *BASE)
decoupled = partial(run, "sync=decoupled")
TIMED = (
    "runtime.gradients=false",
    "cluster.step_s=0.01",
    "cluster.exchange_s=0.002",
    "cluster.link=null",
)


@pytest.mark.parametrize(("grace_s", "merges", "slow"), [(0.005, 39, 13), (0.045, 16, 16)])
def test_a_merge_waits_for_its_quorum_and_as_long_as_it_may(
    grace_s: float, merges: int, slow: int
) -> None:
    """Three push every 22 ms and the fourth every 62 ms; with 45 ms of grace it is in all
    merges.
    """
    ran = decoupled(
        *TIMED,
        "sync.min_learners=3",
        f"sync.grace_s={grace_s}",
        "stop.seconds=1",
        "stop.epochs=null",
    )
    assert ran.end["merges"] == merges
    assert ran.end["commits"] == [merges] * 3 + [slow]
    assert ran.end["stale_max"] == [0, 0, 0, 2 if slow < merges else 0]


def merged_together(*more: str) -> tuple[float, float]:
    """Return the pushes of the three equal learners per merge, and those of the slow one."""
    jitter = ("sync.min_learners=2", "cluster.jitter=0.2", "stop.seconds=8", "stop.epochs=null")
    ran = decoupled(*TIMED, *jitter, *more)
    commits = [count / ran.end["merges"] for count in ran.end["commits"]]
    return sum(commits[:3]), commits[3]


def test_a_grace_window_follows_the_arrivals() -> None:
    """Two of three equal learners with jitter are a quorum. The window waits for the third one, and
    not for the slow one; it does so after all have become four times slower, too.
    """
    slower = "{{time_s: 2, worker: {0}, compute: {1}}}".format
    events = ",".join(slower(worker, 12 if worker == 3 else 4) for worker in range(4))
    later = f"cluster.events=[{events}]"
    fixed, _ = merged_together("sync.grace_s=0.002", later)
    adaptive, slow = merged_together("sync.grace_s=0.002", "sync.grace_mads=4", later)
    assert fixed < 2.5
    assert adaptive > 2.8
    assert slow < 0.5


def test_a_long_grace_window_waits_for_all() -> None:
    adaptive, slow = merged_together("sync.grace_mads=1000")
    assert (adaptive, slow) == pytest.approx((3, 1), rel=0.1)


def test_a_long_grace_window_waits_for_all_of_many() -> None:
    """More learners than pushes whose delays are kept at least: the window follows them, too."""
    own = ("cluster.compute=[" + "1," * 39 + "3]", "sync.min_learners=20", "sync.grace_s=0")
    ran = decoupled(*TIMED, *own, "sync.grace_mads=1000", "cluster.jitter=0.2", "stop.steps=2000")
    assert ran.end["commits"][-1] / ran.end["merges"] > 0.8


def test_one_learner_is_enough_where_it_is_said_so() -> None:
    """Simultaneous pushes are merged at once, and no worker waits."""
    ran = decoupled(*TIMED, "sync.min_learners=1", "stop.steps=200")
    assert (ran.end["merges"], ran.end["commits"]) == (40, [30, 30, 30, 10])
    assert all(ledger["wait"] == 0 for ledger in ran.ledgers)


@pytest.mark.parametrize(
    "more", [("sync.min_learners=4",), ("sync.min_learners=2", "sync.grace_s=0.1")]
)
def test_others_continue_without_a_learner_and_readmit_it(more: tuple[str, ...]) -> None:
    """A merge waits for all workers if they are fewer than the quorum; a rejoining worker counts
    again.
    """
    fails, comes = "{time_s: 0.15, worker: 1, fail: true}", "{time_s: 0.6, worker: 1, rejoin: true}"
    ran = decoupled(
        *TIMED, *more, f"cluster.events=[{fails},{comes}]", "stop.seconds=1.2", "stop.epochs=null"
    )
    away = [r for r in ran.of("Round") if r["rank"] == 0 and 0.2e9 < r["end_ns"] < 0.6e9]
    assert len(away) > 4
    assert 4 < ran.end["commits"][1] < ran.end["commits"][0] - 4
    assert max(r["end_ns"] for r in ran.of("Round") if r["rank"] == 1) > 1.0e9


def test_learners_compute_on_while_they_wait() -> None:
    at = (*TIMED, "sync.min_learners=2", "cluster.exchange_s=0.02", "stop.steps=240")
    late = decoupled(*at, "overlap=delayed")
    assert late.end["steps"] == sum(late.end["steps_by"]) == 240
    assert late.time_ns < 0.75 * decoupled(*at).time_ns


def test_more_learners_than_there_are() -> None:
    with pytest.raises(
        UsageError, match="min_learners=5: more than the 4 workers of the run; take at most 4"
    ):
        decoupled("sync.min_learners=5")
