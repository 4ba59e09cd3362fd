"""Costs of transfers in virtual time: declared exchanges, and links with the NICs of both ends."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.cluster.network import make_network
from ashl.cluster.spec import Cluster, Event
from ashl.cluster.speed import Speed
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sim import Sim
from ashl.size_only import SizeOnly
from tests.kernels import Quiet
from tests.laws.machines import MS, cluster

NBYTES = 125_000  # a second at 1 Mbit/s
TAG = ("x", 0, 0)


def arrivals(
    machines: Cluster, sends: Sequence[tuple[int, int, int]], nbytes: int = NBYTES
) -> list[tuple[int, int]]:
    """Post a transfer for each of `sends`: (when in ns, from, to); returns (sender, arrival in ns)
    as they arrive.
    """
    ranks = machines.num_workers + 1
    seen: list[tuple[int, int]] = []

    async def main(ctx: RankContext) -> None:
        for time_ns, _, dst in sorted(send for send in sends if send[1] == ctx.rank):
            await ctx.sleep((time_ns - ctx.now_ns) / 1e9)
            await ctx.send(dst, TAG, SizeOnly(nbytes))
        for _ in [send for send in sends if send[2] == ctx.rank]:
            message = await ctx.recv(TAG)
            seen.append((message.src, ctx.now_ns))

    sim = Sim(ranks, Speed(machines, 1, 0), make_network(machines, 4 * 1000), Quiet())
    sim.run(main, tick=lambda: None)
    return seen


@given(st.integers(1, 12))
def test_incast_at_a_server_of_the_workers_bandwidth(n: int) -> None:
    """The time of n equal pushes at once to one NIC is n transfers; they arrive one after the
    other.
    """
    seen = arrivals(cluster(n, server_bandwidth_mbit_s=1.0), [(0, i, n) for i in range(n)])
    assert seen == [(i, (i + 1) * 1000 * MS) for i in range(n)]


@given(st.integers(1, 12), st.integers(1, 12))
def test_incast_at_a_faster_port(n: int, faster: int) -> None:
    """The port takes n/faster transfers' time, but none comes in before its sender is done."""
    machines = cluster(n, server_bandwidth_mbit_s=float(faster))
    last = arrivals(machines, [(0, i, n) for i in range(n)])[-1][1]
    assert last == pytest.approx(max(1000 * MS, n / faster * 1000 * MS), abs=n)


def test_a_server_that_is_never_the_bottleneck() -> None:
    assert arrivals(cluster(5), [(0, i, 5) for i in range(5)]) == [(i, 1000 * MS) for i in range(5)]


def test_a_server_that_answers_all_at_once_queues_at_its_own_port() -> None:
    seen = arrivals(cluster(3, server_bandwidth_mbit_s=1.0), [(0, 3, i) for i in range(3)])
    assert sorted(time for _, time in seen) == [1000 * MS, 2000 * MS, 3000 * MS]


@given(st.floats(1, 8), st.floats(1, 8), st.floats(0, 0.5))
def test_head_and_tail_overlap(slow: float, slower: float, latency: float) -> None:
    """Uncontended: latency (of the slower link) and the bytes through the slower of the two ports,
    not through both.
    """
    seen = arrivals(cluster(2, link=(slow, slower), latency_s=latency), [(0, 0, 1)])
    assert seen[0][1] == pytest.approx(max(slow, slower) * (latency + 1.0) * 1e9, abs=2)


def test_a_sender_sends_one_thing_at_a_time_and_both_directions_at_once() -> None:
    there_and_back = [(0, 0, 1), (0, 0, 1), (0, 1, 0)]
    assert sorted(arrivals(cluster(2), there_and_back)) == [
        (0, 1000 * MS),
        (0, 2000 * MS),
        (1, 1000 * MS),
    ]


def test_a_port_serves_in_the_order_in_which_heads_arrive() -> None:
    machines = cluster(2, link=(5.0, 1.0), latency_s=0.1, server_bandwidth_mbit_s=1.0)
    early_but_far, late_but_near = (0, 0, 2), (200 * MS, 1, 2)  # heads at 500 and at 300 ms
    assert arrivals(machines, [early_but_far, late_but_near])[0] == (1, 1300 * MS)


def test_inner_links_are_ports_of_their_own() -> None:
    """A transfer inside a machine is faster, and is not held up by what leaves the machine."""
    machines = cluster(3, node=(0, 0, 1), intra_node_bandwidth_mbit_s=10.0)
    assert sorted(arrivals(machines, [(0, 0, 2), (0, 0, 1)])) == [(0, 100 * MS), (0, 1000 * MS)]
    both = arrivals(
        cluster(2, node=(0, 0), intra_node_bandwidth_mbit_s=10.0), [(0, 0, 1), (0, 1, 0)]
    )
    assert both == [(0, 100 * MS), (1, 100 * MS)], "each worker has its own"


def test_a_link_inside_a_machine_has_a_latency_of_its_own() -> None:
    """Where none is declared, the one of all links."""
    for declared, found in ((0.001, 1), (None, 50)):
        near = {
            "node": (0, 0, 1),
            "intra_node_bandwidth_mbit_s": 1e6,
            "intra_node_latency_s": declared,
        }
        seen = arrivals(cluster(3, latency_s=0.05, **near), [(0, 0, 1), (0, 1, 2)], nbytes=0)
        assert sorted(seen) == [(0, found * MS), (1, 50 * MS)]


TWO_BY_TWO = {
    "node": (0, 0, 1, 1),
    "intra_node_bandwidth_mbit_s": 1e6,
}  # two machines; inside them nothing takes long


def test_workers_of_one_machine_share_its_port() -> None:
    """Two that push at once to a server on another machine take twice the bytes over the bandwidth,
    and so do its two answers; a worker on another machine is not held up.
    """
    machines = cluster(3, node=(0, 0, 1), intra_node_bandwidth_mbit_s=10.0)
    assert arrivals(machines, [(0, i, 3) for i in range(3)]) == [
        (0, 1000 * MS),
        (2, 1000 * MS),
        (1, 2000 * MS),
    ]
    assert [time for _, time in arrivals(machines, [(0, 3, 0), (0, 3, 1)])] == [
        1000 * MS,
        2000 * MS,
    ]
    assert [time for _, time in arrivals(machines, [(0, 0, 2), (0, 1, 2)])] == [
        1000 * MS,
        2000 * MS,
    ]
    alone = cluster(3, node=(0, 1, 2), intra_node_bandwidth_mbit_s=10.0)
    assert arrivals(alone, [(0, i, 3) for i in range(3)]) == arrivals(
        cluster(3), [(0, i, 3) for i in range(3)]
    )


def test_a_workers_link_factor_is_how_long_its_bytes_hold_the_machines_port() -> None:
    machines = cluster(2, node=(0, 0), intra_node_bandwidth_mbit_s=10.0, link=(3.0, 1.0))
    assert arrivals(machines, [(0, 0, 2), (0, 1, 2)]) == [(0, 3000 * MS), (1, 4000 * MS)]


def test_groups_whose_rings_leave_the_same_machine_go_one_after_the_other() -> None:
    """Partial all-reduce of (0, 2) and of (1, 3) over two machines of two: each takes a second;
    both together two. With a machine for each worker they take one, and a message that leaves the
    machine waits until its port is free.
    """
    ends: dict[tuple[int, ...], int] = {}

    async def main(ctx: RankContext) -> None:
        group = (0, 2) if ctx.rank in (0, 2) else (1, 3)
        if ctx.rank == 0:
            await ctx.sleep(0.001)
        elif ctx.rank == 4:
            await ctx.recv(TAG)
            ends[(4,)] = ctx.now_ns
            return
        await ctx.all_reduce(SizeOnly(NBYTES), group)
        ends[group] = ctx.now_ns

    async def pushing(ctx: RankContext) -> None:
        if ctx.rank == 0:
            ctx.spawn(push(ctx))
        await main(ctx)

    async def push(ctx: RankContext) -> None:
        await ctx.sleep(0.5)
        await ctx.send(4, TAG, SizeOnly(NBYTES))

    for places, end_s in (((0, 0, 1, 1), 2.0), ((0, 1, 2, 3), 1.001)):
        machines = cluster(4, **TWO_BY_TWO | {"node": places})
        Sim(5, Speed(machines, 1, 0), make_network(machines, 4000), Quiet()).run(
            pushing, tick=lambda: None
        )
        assert ends == {
            (1, 3): 1000 * MS,
            (0, 2): round(end_s * 1e9),
            (4,): round((end_s + 1.0) * 1e9),
        }


def test_an_event_changes_a_link_from_its_time_on() -> None:
    machines = cluster(1, events=(Event(time_s=2.0, worker=0, link=3.0),))
    times = [
        time for _, time in arrivals(machines, [(0, 0, 1), (1999 * MS, 0, 1), (5000 * MS, 0, 1)])
    ]
    assert times == [1000 * MS, 2999 * MS, 8000 * MS]


links = st.lists(st.floats(1, 8), min_size=2, max_size=5).map(tuple)


@given(links, st.floats(0.001, 2), st.integers(1, 4000))
def test_declared_exchanges(link, exchange_s, nbytes) -> None:
    """Time link · exchange_s/2 · bytes/dense in each direction; between two workers the larger
    factor holds; no queues.
    """
    n = len(link)
    machines = cluster(n, link=link, exchange_s=exchange_s)
    share = exchange_s / 2 * nbytes / 4000 * 1e9
    pushes = dict(arrivals(machines, [(0, i, n) for i in range(n)], nbytes))
    assert pushes == {i: pytest.approx(link[i] * share, abs=1) for i in range(n)}
    pulls = arrivals(machines, [(0, n, i) for i in range(n)], nbytes)
    assert sorted(time for _, time in pulls) == sorted(pushes.values())
    assert arrivals(machines, [(0, 0, 1)], nbytes) == [(0, max(pushes[0], pushes[1]))]


@given(links, st.floats(0.001, 2))
def test_a_declared_all_reduce(link, exchange_s) -> None:
    n = len(link)
    net = make_network(cluster(n, link=link, exchange_s=exchange_s), 4000)
    expected = exchange_s * max(link) * (n - 1) / n * 1e9
    assert net.all_reduce_ns(tuple(range(n)), 4000, 0) == pytest.approx(expected, abs=1)
    assert net.all_reduce_ns((0,), 4000, 0) == 0


def message_by_message(machines: Cluster, group: tuple[int, ...], nbytes: int, rounds: int) -> int:
    """When the last member of a ring, machine by machine, has had its last chunk, each sent as soon
    as the one before it came: plain sends and receives.
    """
    ends = []
    places = machines.node or range(machines.num_workers or 0)
    group = tuple(sorted(group, key=lambda rank: (places.index(places[rank]), rank)))

    async def main(ctx: RankContext) -> None:
        if ctx.rank in group:
            place = group.index(ctx.rank)
            after, before = group[(place + 1) % len(group)], group[place - 1]
            for step in range(rounds):
                await ctx.send(after, ("chunk", 0, step), SizeOnly(nbytes // len(group)))
                await ctx.recv(("chunk", 0, step), src=before)
            ends.append(ctx.now_ns)

    machine = Sim(
        machines.num_workers, Speed(machines, 1, 0), make_network(machines, 4000), Quiet()
    )
    machine.run(main, tick=lambda: None)
    return max(ends)


def collected(machines: Cluster, group: tuple[int, ...], nbytes: int, gather: bool) -> set[int]:
    """When the members have the result of a collective."""
    ends = set()

    async def main(ctx: RankContext) -> None:
        if ctx.rank in group:
            if gather:
                await ctx.all_gather(SizeOnly(nbytes // len(group)), group)
            else:
                await ctx.all_reduce(SizeOnly(nbytes), group)
            ends.add(ctx.now_ns)

    machine = Sim(
        machines.num_workers, Speed(machines, 1, 0), make_network(machines, 4000), Quiet()
    )
    machine.run(main, tick=lambda: None)
    return ends


def test_bodies_of_many_lengths_travel_as_long_as_the_longest() -> None:
    """They were counted and timed as if each went by its own length, and what goes is padded."""
    spent = []
    for sizes in ((10, 20, 300), (300, 300, 300)):

        async def main(ctx: RankContext, sizes: tuple[int, ...] = sizes) -> int:
            parts = await ctx.all_gather(SizeOnly(sizes[ctx.rank]), (0, 1, 2))
            assert [part.nbytes for part in parts] == list(sizes)
            return ctx.now_ns

        machine = Sim(3, Speed(cluster(3), 1, 0), make_network(cluster(3), 4000), Quiet())
        ends = machine.run(main, tick=lambda: None)
        spent.append((ends, [ctx.time_accounting.bytes_up for ctx in machine.contexts]))
    assert spent[0] == spent[1]
    assert spent[0][1] == [600] * 3


@st.composite
def rings(draw: st.DrawFn) -> tuple[Cluster, tuple[int, ...]]:
    n = draw(st.integers(2, 7))
    equal = draw(st.booleans())
    link = (draw(st.floats(1, 8)),) * n if equal else tuple(draw(st.floats(1, 8)) for _ in range(n))
    nodes = draw(st.none() | st.tuples(*[st.integers(0, 2)] * n))
    own = {
        "intra_node_bandwidth_mbit_s": draw(st.floats(0.5, 20)),
        "intra_node_latency_s": draw(st.none() | st.floats(0, 2)),
    }
    inner = {"node": nodes, **own} if nodes else {}
    group = tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=2))))
    return cluster(n, link=link, latency_s=draw(st.floats(0, 2)), **inner), group


@given(rings())
def test_a_collective_takes_as_long_as_the_messages_of_its_ring(drawn) -> None:
    """Times agree to the nanosecond, on equal and unequal links, inside nodes and between them."""
    machines, group = drawn
    g, nbytes = len(group), 420_000  # any ring divides it
    assert collected(machines, group, nbytes, False) == {
        message_by_message(machines, group, nbytes, 2 * (g - 1))
    }
    assert collected(machines, group, nbytes, True) == {
        message_by_message(machines, group, nbytes, g - 1)
    }
