"""Resources that the tasks of one rank share, on both kernels: one compute unit, NICs, and one
queue per process group.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ashl.cluster.spec import RealCluster
from ashl.errors import AshlError
from ashl.runtime import collectives, communicator
from ashl.runtime.effects import AllReduce
from tests import overlapping as play
from tests.kernels import in_virtual_time, on_processes
from tests.laws.machines import cluster

DECLARED = cluster(
    2, step_s=0.1, compress_s=0.1, exchange_s=0.2
)  # a sum of the whole model between two takes 0.1 s
REAL = RealCluster(num_workers=2, hosts=None)


def results(ended):
    assert [rank.error for rank in ended] == [None] * len(ended)
    return [rank.result for rank in ended]


def test_a_node_computes_one_thing_at_a_time():
    expected = [pytest.approx([0.1, 0.3, 0.6])] * 2
    virtual = in_virtual_time(play.two_computes, DECLARED)
    assert results(virtual) == expected
    assert virtual[0].spent == {**dict.fromkeys(virtual[0].spent, 0.0), "wait": 0.3, "compute": 0.3}
    real = on_processes(play.two_computes, DECLARED, 2)
    for rank in results(real):
        assert all(took >= declared for took, declared in zip(rank, (0.1, 0.3, 0.6), strict=True))
    assert real[0].spent["compute"] == pytest.approx(0.3, abs=0.02)
    assert real[0].spent["wait"] >= 0.27


def test_several_sums_at_once_go_by_their_keys():
    """The first that all have posted goes first, then the lowest key, equal keys in order; the node
    computes on.
    """
    virtual = results(in_virtual_time(play.two_at_once, DECLARED))
    assert virtual[0] == virtual[1]
    computed, *sums = virtual[0]
    assert computed == 0.1
    assert [value for value, _ in sums] == [3.0, 30.0, 300.0, 3000.0]
    assert [time for _, time in sums] == pytest.approx([0.1, 0.4, 0.2, 0.3])
    for rank in results(on_processes(play.two_at_once, DECLARED, 2)):
        assert [value for value, _ in rank[1:]] == [3.0, 30.0, 300.0, 3000.0]
        (_, third), (_, second), (_, first), (_, next_first) = rank[1:]
        assert first < next_first < second, "of those under way the lowest key goes first"
        assert max(third, second, next_first) >= 0.4
        assert rank[0] < 0.3, "while sums are under way the node computes"
    assert [
        [value for value, _ in rank[1:]]
        for rank in results(on_processes(play.two_at_once, REAL, 2))
    ] == [[3.0, 30.0, 300.0, 3000.0]] * 2


@pytest.mark.parametrize("machines", [DECLARED, REAL], ids=["paced", "real"])
def test_what_is_committed_is_not_overtaken(machines):
    """One collective is in flight when lower keys come; a credit of two has committed the next one,
    too.
    """
    one = ["first", "late a", "early a", "early b", "late b", "late c"]
    two = ["first", "late a", "late b", "early a", "early b", "late c"]
    assert results(in_virtual_time(play.one_ahead, DECLARED)) == [one] * 2
    assert results(in_virtual_time(play.two_ahead, DECLARED)) == [two] * 2
    orders = results(
        on_processes(play.two_ahead, machines, 2)
    )  # a rank that is late by the clock may find another order
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(two)


def test_members_commit_the_same_collective_of_those_posted_by_all():
    """This member has posted four collectives and the others three of them: they start by key,
    while credit remains.
    """
    end = communicator.LocalQueue((0, 1), lambda end: None)
    for key in (3, 2, 4, 1):
        effect = AllReduce(torch.zeros(1000), (0, 1), key=key, credit=2)
        end.pending.append(communicator.Pending(end.posted, effect, False, lambda outcome: None))
        end.posted += 1
    end.commit(3)
    assert [pending.effect.key for pending in end.committed] == [2, 3]
    end.remove(end.committed[0])
    end.commit(4)
    assert [pending.effect.key for pending in end.committed] == [3, 1]


def test_a_computation_waits_for_its_inputs():
    """Half of 0.2 s, then until 0.15 s, then the other half; a pause counts as waiting."""
    virtual = in_virtual_time(play.standing_still, DECLARED, 1)
    assert results(virtual) == [(7.0, pytest.approx(0.25), 2)]
    assert virtual[0].spent == {
        **dict.fromkeys(virtual[0].spent, 0.0),
        "wait": 0.05,
        "compute": 0.2,
    }
    real = on_processes(play.standing_still, DECLARED, 1)
    assert results(real)[0][::2] == (7.0, 2)
    assert 0.25 <= real[0].result[1] < 0.35
    assert real[0].spent["compute"] == pytest.approx(0.2, abs=0.02)
    assert real[0].spent["wait"] >= 0.04
    assert results(on_processes(play.standing_still, REAL, 1))[0][::2] == (7.0, 2)


def test_a_sum_in_two_halves():
    """Chunks of equal length, filled up with zeros; each half costs half a sum of six numbers."""
    wide = cluster(3, exchange_s=4000.0 * 3 / 6)
    chunks = [[0.0, 111.0], [222.0, 333.0], [444.0, 0.0]]
    gathered = [[*chunk, float(rank)] for rank, chunk in enumerate(chunks)]
    expected = [(chunk, gathered, pytest.approx(4.0), pytest.approx(8.0)) for chunk in chunks]
    assert results(in_virtual_time(play.in_halves, wide)) == expected
    quick = cluster(3, exchange_s=0.01)
    assert [rank[:2] for rank in results(on_processes(play.in_halves, quick, 3))] == [
        rank[:2] for rank in expected
    ]


@pytest.mark.parametrize("machines", [DECLARED, REAL], ids=["paced", "real"])
def test_kinds_are_told_apart(machines):
    expected = [[[12, 24], 4.0, [7, 14]]] * 2
    assert results(in_virtual_time(play.kinds_mixed, DECLARED)) == expected
    assert results(on_processes(play.kinds_mixed, machines, 2)) == expected


@pytest.mark.parametrize("machines", [DECLARED, REAL], ids=["paced", "real"])
@pytest.mark.parametrize("groups", [(), ((0, 1), (0, 1, 2))], ids=["loose", "listed"])
def test_teams_that_share_ranks_have_a_channel_each(groups, machines):
    expected = [[6.0, 3.0], [6.0, 3.0], [6.0], None]
    wide = cluster(4, exchange_s=0.2)
    assert results(in_virtual_time(three, wide)) == expected
    assert (
        results(on_processes(three, wide if machines is DECLARED else machines, 4, groups))
        == expected
    )


async def three(ctx):
    return await play.three_and_two_ranks(ctx) if ctx.rank < 3 else None


PORTS = cluster(
    2, latency_s=0.01, bandwidth_mbit_s=0.32
)  # 4000 bytes in 0.1 s; a sum: two rounds of 0.01 + 0.05


def test_a_send_queues_behind_a_collective():
    (summed,), (also, came) = results(in_virtual_time(play.a_send_beside_a_collective, PORTS))
    assert summed == also == pytest.approx(0.12)
    assert came == pytest.approx(0.12 + 0.01 + 0.1)
    (summed,), (_, came) = results(on_processes(play.a_send_beside_a_collective, PORTS, 2))
    assert summed >= 0.12
    assert came >= summed + 0.1 - 0.005, "by the clocks of two ranks, which started together"


def test_a_collective_queues_behind_a_send():
    (summed,), (also, came) = results(in_virtual_time(play.a_collective_behind_a_send, PORTS))
    assert came == pytest.approx(0.11)
    assert summed == also == pytest.approx(0.11 + 0.12), "from when both ports are free"
    (summed,), (also, came) = results(on_processes(play.a_collective_behind_a_send, PORTS, 2))
    assert came >= 0.11
    assert min(summed, also) >= 0.22


@pytest.mark.parametrize("machines", [DECLARED, REAL], ids=["paced", "real"])
def test_a_cancelled_tasks_collective_is_carried_out(machines):
    assert results(in_virtual_time(play.cancelled, DECLARED)) == [1.0, 1.0]
    assert results(on_processes(play.cancelled, machines, 2)) == [1.0, 1.0]


def test_what_is_pending_at_the_end_ends():
    assert results(in_virtual_time(play.left_pending, DECLARED)) == ["ended", "ended"]
    assert results(on_processes(play.left_pending, DECLARED, 2)) == ["ended", "ended"]


def test_a_collective_that_not_all_have_posted_is_an_error_at_the_end():
    with pytest.raises(
        AshlError, match=r"only rank 0 posted AllReduce with key 2 of ranks \[0, 1\]"
    ):
        in_virtual_time(play.one_sided, DECLARED)
    ended = on_processes(hasty, DECLARED, 2)
    assert "rank 0 has ended and still is in AllReduce with ranks [0, 1], key 2" in ended[0].error
    assert ended[1].error != "still running"


async def hasty(ctx):
    communicator.LINGER_S = 0.5
    return await play.one_sided(ctx)


def test_another_order_is_an_error():
    order = (
        r"in the same order: rank 1 posts AllReduce with key 2 .* where rank 0 posted AllReduce"
        r" with key 1"
    )
    with pytest.raises(AshlError, match=order):
        in_virtual_time(play.crossed, DECLARED)


def test_a_failed_peer_ends_operations_that_wait_for_it():
    ended = on_processes(play.a_peer_dies, DECLARED, 2, within_s=30)
    assert ended[1].error == "ValueError: rank 1 falls over"
    assert "closed by peer" in ended[0].error or "reset by peer" in ended[0].error


def test_computed_identically():
    assert results(in_virtual_time(play.computed_alike, DECLARED)) == [[0, 1, 2]] * 2
    assert results(on_processes(play.computed_alike, REAL, 2)) == [[0, 1, 2]] * 2


def test_a_push_lasts_until_its_last_byte_is_there():
    """Time by the receiver's clock: its NIC takes 0.2 s for a message that leaves the sender's in
    0.002 s. Then the sender waits. On a loaded machine both last longer.
    """
    links = {
        "exchange_s": None,
        "bandwidth_mbit_s": 16.0,
        "latency_s": 0.0,
        "server_bandwidth_mbit_s": 0.16,
    }
    machines = cluster(1, **links)
    (virtual, _), (real, _) = (
        in_virtual_time(play.push_and_wait, machines, 2),
        on_processes(play.push_and_wait, machines, 2),
    )
    assert (virtual.spent["push"], virtual.spent["wait"]) == pytest.approx((0.2, 0.3))
    assert real.error is None
    assert 0.17 < real.spent["push"] < 1
    assert 0.25 < real.spent["wait"] < 2


def test_workers_of_one_machine_share_its_port_on_both_kernels():
    """Two machines of two: 0.1 s for a message and for a sum. One after the other they take 0.4 s,
    and not 0.2.
    """
    machines = cluster(
        4, node=(0, 0, 1, 1), intra_node_bandwidth_mbit_s=1000.0, bandwidth_mbit_s=0.32
    )
    virtual = results(in_virtual_time(play.through_one_port, machines))
    assert virtual[2:] == [pytest.approx([0.1, 0.3]), pytest.approx([0.2, 0.4])]
    real = results(on_processes(play.through_one_port, machines, 4))
    (first, second), (one, other) = (sorted(rank[k] for rank in real[2:]) for k in (0, 1))
    assert 0.1 <= first < 0.2 <= second
    assert 0.3 <= one < other, "the sums queue behind the messages"
    assert other >= one + 0.095, "and one behind the other"


async def two_steps(ctx):
    for _ in range(2):
        await ctx.compute(int, work=1)
    time.sleep(0.02)  # reads a loss, for example
    await ctx.sleep(0.01)


def lag() -> None:
    time.sleep(0.05)


def test_what_a_device_has_not_done_yet_is_computing():
    """Once for both steps, and with what the algorithm waited for by itself."""
    (ended,) = on_processes(two_steps, REAL, 1, synchronize=lag)
    assert ended.error is None
    assert ended.spent["compute"] >= 0.07


async def watched(ctx):
    """Return this rank's calls of the backend, in order; none may overlap another."""
    asked, busy, everyone = [], threading.Lock(), collectives.world()

    def one_at_a_time(name):
        carry_out = getattr(everyone, name)

        def call(*args):
            assert busy.acquire(blocking=False), "two operations of a rank at once"
            try:
                first = args[0][0] if isinstance(args[0], list) else args[0]
                asked.append((name, first.numel()))
                carry_out(*args).wait()
                return SimpleNamespace(wait=lambda: None)
            finally:
                busy.release()

        return call

    names = ("allreduce", "_allgather_base", "alltoall_base")
    group = SimpleNamespace(**{name: one_at_a_time(name) for name in names})
    collectives.world = lambda: group
    tasks = [
        ctx.spawn(play.summed(ctx, 1.0, key=k, team=(0, 1, 2), size=1000 + k, credit=1))
        for k in (3, 1, 2)
    ]
    await play.computing(ctx, 0.01)
    sums = [(await ctx.join(task))[0] for task in tasks]
    sums.append((await play.summed(ctx, 2.0, team=(0, 1, 2)))[0])
    return sums, asked


def test_a_rank_asks_the_backend_one_thing_at_a_time_and_all_in_one_order():
    """The order of calls that NCCL needs; another order would hang."""
    ended = results(on_processes(watched, REAL, 3))
    assert [sums for sums, _ in ended] == [[3.0, 3.0, 3.0, 6.0]] * 3
    assert ended[0][1] == ended[1][1] == ended[2][1]
    assert len(ended[0][1]) == 4 * 3, (
        "for each sum its two halves, and before it how many all have posted"
    )
