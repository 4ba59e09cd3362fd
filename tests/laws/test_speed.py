"""The cost of computing, and the pacing of a real run."""

import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.cluster.network import make_network
from ashl.cluster.spec import Event
from ashl.cluster.speed import Speed
from ashl.run.supervisor import pacing_summary
from ashl.runtime import throttle as pacing
from ashl.runtime.compute_unit import ComputeUnit
from ashl.runtime.effects import Compute
from ashl.runtime.kernel import Mailbox
from ashl.runtime.records import PacingStats
from ashl.runtime.throttle import Nics, Throttle
from tests.laws.machines import MS, cluster

BATCH = 10


def draws(seed: int, worker: int, count: int, jitter: float = 0.3) -> list[int]:
    speed = Speed(cluster(3, jitter=jitter, step_s=1.0), BATCH, seed)
    return [speed.cost_ns(worker, "compute", BATCH, 0) or 0 for _ in range(count)]


@pytest.mark.parametrize("jitter", [0.05, 0.3, 1.0])
def test_jitter_has_mean_one_and_the_declared_deviation(jitter: float) -> None:
    seconds = np.array(draws(0, 0, 40_000, jitter)) / 1e9
    assert seconds.mean() == pytest.approx(1.0, abs=4 * jitter / 200)
    assert seconds.std() == pytest.approx(jitter, rel=0.1)
    assert seconds.min() > 0


def test_jitter_is_a_function_of_seed_worker_and_count_alone() -> None:
    first = draws(7, 1, 3000)  # over several blocks of draws
    assert first == draws(7, 1, 3000)
    assert first != draws(8, 1, 3000)
    assert first != draws(7, 2, 3000)
    assert len(set(first)) > 2900
    mixed = Speed(cluster(3, jitter=0.3, step_s=1.0), BATCH, 7)
    alternating = [mixed.cost_ns(i % 3, "compute", BATCH, 0) for i in range(9000)]
    assert alternating[1::3] == first


@given(st.floats(0.1, 10), st.floats(1e-4, 1), st.integers(1, 100))
def test_a_step_costs_its_factor_and_its_share_of_a_batch(factor, step_s, work) -> None:
    speed = Speed(cluster(1, compute=(factor,), step_s=step_s), BATCH, 0)
    expected = factor * step_s * work / BATCH * 1e9
    assert speed.cost_ns(0, "compute", work, 0) == pytest.approx(expected, abs=1)


def test_events_change_the_factor_from_their_time_on_in_any_order_of_writing() -> None:
    events = (Event(time_s=2.0, worker=0, compute=5.0), Event(time_s=1.0, worker=0, compute=3.0))
    speed = Speed(cluster(2, step_s=1.0, events=events), BATCH, 0)
    assert [speed.cost_ns(0, "compute", BATCH, t * MS) for t in (0, 999, 1000, 1999, 2000, 9999)] == [
        1000 * MS, 1000 * MS, 3000 * MS, 3000 * MS, 5000 * MS, 5000 * MS,
    ]  # fmt: skip
    assert speed.cost_ns(1, "compute", BATCH, 9999 * MS) == 1000 * MS


def test_a_cost_that_is_not_declared_is_not_zero() -> None:
    speed = Speed(cluster(1, step_s=None, compress_s=None, server_step_s=None), BATCH, 0)
    assert [speed.cost_ns(0, kind, 1, 0) for kind in ("compute", "compress", "apply")] == [None] * 3


class Host:
    """A host whose clock moves only when someone computes or sleeps."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0
        monkeypatch.setattr(pacing.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9) + 60_000  # sleeps overshoot

    def pace(self, **costs) -> Throttle:
        return Throttle(
            cluster(2, compute=(1.0, 3.0), **costs),
            1,
            BATCH,
            0,
            4000,
            lambda: self.now,
            SimpleNamespace(),
        )


def computed(pace: Throttle, kind: str, work: float, start_ns: int) -> int:
    return pace.finish_compute(kind, pace.cost_ns(kind, work, start_ns), start_ns)


def test_overshooting_sleeps_do_not_add_up(monkeypatch) -> None:
    host = Host(monkeypatch)
    pace, end = host.pace(step_s=0.01), 0
    for step in range(100):
        host.now += 2 * MS  # what the step really takes
        end = computed(pace, "compute", BATCH, end)
        assert end == (step + 1) * 30 * MS
    assert host.now - end < 100_000
    assert pace.report().late[0][1:] == (0.0, pytest.approx(3.0))


def test_parts_of_a_slowed_step_are_slowed(monkeypatch) -> None:
    """A step of 10 ms and 10 ms more, three times slower: the first part is ready after 30 ms."""
    host, inbox = Host(monkeypatch), queue.SimpleQueue()
    unit = ComputeUnit(1, host.pace(step_s=None), inbox, Mailbox())

    def work(hand_out) -> None:
        for k in range(2):
            host.now += 10 * MS
            hand_out(k, None)

    tags = [("part", 0, k) for k in range(2)]
    ran = unit.run(Compute(work, BATCH, parts=((0.6, tags[0]), (1.0, tags[1]))), 0)
    times = [inbox.get().start_ns, inbox.get().start_ns, ran.end_ns]
    assert [round(at_ns / MS) for at_ns in times] == [30, 60, 60]


def test_a_host_that_is_too_slow_says_so(monkeypatch) -> None:
    host = Host(monkeypatch)
    pace, end = host.pace(step_s=0.01), 0
    for _ in range(10):
        host.now = max(host.now, end) + 45 * MS
        end = computed(pace, "compute", BATCH, end)
    assert end == host.now == 450 * MS
    assert pace.report().late[0][1:] == (pytest.approx(0.15), 0.3)


@pytest.mark.parametrize("costs", [{"exchange_s": 0.02}, {"exchange_s": None, "latency_s": 0.0}])
def test_transfers_that_took_longer_than_declared_are_counted(costs, monkeypatch) -> None:
    """10 ms each: one comes in time, one 5 ms late."""
    host = Host(monkeypatch)
    rate = {"bandwidth_mbit_s": 3.2, "server_bandwidth_mbit_s": None, "link": None}
    pace = host.pace(step_s=0.01, **rate, **costs)
    pace.schedule_arrival(2, 4000, 0, 10 * MS)
    pace.schedule_arrival(2, 4000, 100 * MS, 115 * MS)
    assert pace.report().late[1:] == [(2, pytest.approx(0.005), pytest.approx(0.02))]


def test_a_push_is_its_workers() -> None:
    """A push that the server applies late counts for the worker that sent it, in proportion to all
    its work.
    """
    reports = [
        PacingStats(0, [(0, 0.0, 1.0), (2, 0.0, 1.0)]),
        PacingStats(1, [(1, 0.0, 1.0), (2, 0.2, 1.0)]),
        PacingStats(2, [(2, 0.0, 0.0), (0, 0.0, 1.0), (1, 0.2, 1.0)]),
    ]
    pace = pacing_summary(reports, 2)
    assert [worker["slower_by"] for worker in pace["workers"]] == pytest.approx([0.0, 0.4 / 3])
    assert pace["slower_by"] == pytest.approx(0.4 / 3)
    assert pacing_summary([PacingStats(0, [(0, 0.0, 0.0)])], 1) == {}


def test_encoding_that_is_declared_to_cost_nothing_is_late_where_it_takes_time(monkeypatch) -> None:
    """45 ms of steps in time, with 5 ms of encoding each: the run is a ninth longer than
    declared.
    """
    host = Host(monkeypatch)
    pace, end = host.pace(step_s=0.015), 0
    for _ in range(10):
        end = computed(pace, "compute", BATCH, end)
        host.now += 5 * MS
        end = computed(pace, "compress", 1, end)
    (worker,) = pacing_summary([pace.report()._replace(rank=0)], 1)["workers"]
    assert worker["slower_by"] == pytest.approx(1 / 9, rel=0.05)


def test_without_a_declared_cost_the_host_is_slowed_down_by_the_factor(monkeypatch) -> None:
    host = Host(monkeypatch)
    pace = host.pace(step_s=None)
    host.now = 7 * MS
    assert computed(pace, "compute", BATCH, 0) == 21 * MS
    assert pace.report().late[0][1:] == (0.0, 0.0), "nothing was declared"


def test_processes_that_decide_at_the_same_moment_queue_at_the_port_that_they_share() -> None:
    """Each has a second's bytes to send at 0; a sum of two, begun at 0, comes after them, at the
    same time for both.
    """
    machines = cluster(4, node=(0, 0, 0, 1), intra_node_bandwidth_mbit_s=1e6)
    nics = Nics(make_network(machines, 4000))
    store = SimpleNamespace(call=lambda _, *args: nics.call(*args))
    paces = [Throttle(machines, rank, 1, 0, 4000, lambda: 0, store) for rank in range(4)]
    with ThreadPoolExecutor(3) as pool:
        tails = list(pool.map(lambda pace: pace.schedule_departure(3, 125_000, 0)[2], paces[:3]))
    assert sorted(tails) == [1000 * MS, 2000 * MS, 3000 * MS]
    for number, start in ((0, 3000 * MS), (1, 4000 * MS)):
        spans = [
            paces[rank].schedule_collective((1, 3), number, 125_000, 0, gathers=False)
            for rank in (3, 1)
        ]
        assert spans == [(start, 1000 * MS)] * 2
    assert paces[0].schedule_collective((0, 1), 0, 125_000, 0, gathers=True)[0] == 0, (
        "inside a machine there are other ports"
    )
