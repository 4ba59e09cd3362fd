"""Sums by ring, halving, tree and hierarchy: alike on all members, in the time and bytes of their closed forms."""

import queue
import threading
from collections import defaultdict
from math import ceil, log2
from types import SimpleNamespace

import pytest
import torch

from ashl.cluster.network import network
from ashl.cluster.spec import Event
from ashl.cluster.sum_rounds import BY_NAME
from ashl.runtime.sum_messages import OwnSums
from ashl.runtime.sums import sum_in_rank_order
from tests.laws.machines import MS, cluster

NS_PER_BYTE = 8000  # at 1 Mbit/s
S, LATENCY_NS = 5040 * 8, 3 * MS
LAYOUTS = [
    (0,),
    (0, 1),
    (0, 0, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 1, 1),
    (0, 0, 1, 1, 2, 2),
    (0,) * 7,
    tuple(range(7)),
    (0, 0, 0, 0, 1, 1, 1, 1),
]


class Wire:
    """A process group as far as it is needed, between the threads of this process."""

    def __init__(self) -> None:
        self.queues: defaultdict[tuple[int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.here = threading.local()

    def send(self, bodies, dst, tag):
        self.queues[self.here.rank, dst].put(bodies[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, boxes, src, tag):
        me, (box,) = self.here.rank, boxes
        return SimpleNamespace(wait=lambda: box.copy_(self.queues[src, me].get(timeout=10).view(box.shape)))


def summed(algorithm, node, exact, xs, op="sum"):
    """What every member has then, and what it sent and received."""
    wire, n = Wire(), len(node)
    ends = [None] * n

    def member(rank: int) -> None:
        wire.here.rank = rank
        own = OwnSums(rank, algorithm, node, exact)
        ends[rank] = own.all_reduce(xs[rank], tuple(range(n)), op, xs[rank].nbytes, None, 0, wire)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize("algorithm", BY_NAME)
def test_an_exact_sum_is_the_one_in_rank_order_whichever_way_it_travels(algorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    for node in LAYOUTS:
        for d, dtype in ((1, torch.float32), (53, torch.float32), (53, torch.bfloat16)):
            xs = [torch.randn(d, generator=generator).to(dtype) for _ in node]
            ends = summed(algorithm, node, True, xs)
            assert all(torch.equal(total, sum_in_rank_order(xs)) for total, _ in ends), (node, d, dtype)


@pytest.mark.parametrize("algorithm", BY_NAME)
def test_a_native_sum_is_alike_on_all_and_travels_as_it_costs(algorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    for node in LAYOUTS:
        xs = [torch.randn(840, generator=generator) for _ in node]
        ends, group = summed(algorithm, node, False, xs), tuple(range(len(node)))
        assert all(torch.equal(total, ends[0][0]) for total, _ in ends)
        assert torch.allclose(ends[0][0], torch.stack(xs).sum(0), atol=1e-5)
        machines = cluster(len(node), node=node, inner_bandwidth_mbit_s=1.0)
        known = network(machines, 1, algorithm).summing.known(group, xs[0].nbytes)
        assert [moved for _, moved in ends] == list(zip(known.sent, known.received, strict=True))
    ends = summed(algorithm, (0, 0, 1), True, [torch.tensor([3.0, 0]), torch.tensor([1.0, 2]), torch.zeros(2)], "max")
    assert all(top.tolist() == [3, 2] for top, _ in ends)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 8, 12])
def test_closed_forms_on_equal_machines(n) -> None:
    a, sb, group = LATENCY_NS, S * NS_PER_BYTE, tuple(range(n))
    p = 1 << int(log2(n))
    forms = {
        "ring": 2 * (n - 1) * a + 2 * (n - 1) * sb // n,
        "tree": 2 * ceil(log2(n)) * (a + sb),
        "star": 2 * (a + (n - 1) * sb) if n > 1 else 0,
        "halving": 2 * int(log2(p)) * a + 2 * (p - 1) * sb // p + (2 * (a + sb) if n > p else 0),
    }
    for algorithm, form in forms.items():
        costs = network(cluster(n, latency_s=0.003), 1, algorithm)
        assert costs.all_reduce_ns(group, S, 0) == pytest.approx(form, abs=2 * n), algorithm
    sent = network(cluster(n), 1, "halving").summing.known(group, S).sent
    if n == p:
        assert sent == [2 * (n - 1) * S // n] * n
        assert network(cluster(n), 1).all_reduce_ns(group, S, 0) == network(cluster(n), 1, "halving").all_reduce_ns(
            group, S, 0
        )


@pytest.mark.parametrize(("m", "k"), [(1, 4), (2, 4), (4, 1), (3, 2)])
def test_a_hierarchy_takes_the_sum_of_its_parts(m, k) -> None:
    """Inside at ten times the rate and a third of the latency; a machine's port is shared by all who are on it."""
    links = {"latency_s": 0.003, "inner_latency_s": 0.001, "inner_bandwidth_mbit_s": 10.0}
    costs = network(cluster(m * k, node=tuple(i // k for i in range(m * k)), **links), 1, "hierarchical")
    a, sb = LATENCY_NS, S * NS_PER_BYTE
    inside = 2 * (k - 1) * a // 3 + 2 * (k - 1) * sb // (10 * k)
    assert costs.all_reduce_ns(tuple(range(m * k)), S, 0) == inside + 2 * (m - 1) * a + 2 * (m - 1) * sb // m
    known = costs.summing.known(tuple(range(m * k)), S)
    assert known.sent == known.received == [2 * (k - 1) * S // k + 2 * (m - 1) * S // (m * k)] * (m * k)


def test_each_round_takes_as_long_as_its_slowest_link() -> None:
    a, sb = LATENCY_NS, S * NS_PER_BYTE
    slow_leaf = cluster(4, link=(1.0, 3.0, 1.0, 1.0), latency_s=0.003)
    assert network(slow_leaf, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 0) == 2 * (3 + 1) * (a + sb)
    assert network(slow_leaf, 1, "halving").all_reduce_ns((0, 1, 2, 3), S, 0) == 2 * (6 * a + 9 * sb // 4)
    assert network(slow_leaf, 1, "tree").all_reduce_ns((0, 2, 3), S, 0) == 4 * (a + sb)  # without it
    slower = cluster(4, latency_s=0.003, events=(Event(time_s=1.0, worker=3, link=2.0),))
    assert network(slower, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 0) == 4 * (a + sb)
    assert network(slower, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 2 * 10**9) == 2 * (2 + 1) * (a + sb)
    exchange = cluster(4, exchange_s=0.2, link=(1.0, 3.0, 1.0, 1.0))
    assert network(exchange, S, "tree").all_reduce_ns((0, 1, 2, 3), S, 0) == 2 * (3 + 1) * 100 * MS
    assert network(exchange, S, "ring").all_reduce_ns((0, 1, 2, 3), S, 0) == network(exchange, S).all_reduce_ns(
        (0, 1, 2, 3), S, 0
    )


def test_auto_is_whichever_takes_least() -> None:
    def picked(nbytes, n=8, **links):
        costs = network(cluster(n, latency_s=0.003, **links), 1, "auto")
        group = tuple(range(n))
        each = [
            network(costs.cluster, 1, name).all_reduce_ns(group, nbytes, 0) for name in costs.summing.candidates(group)
        ]
        assert costs.all_reduce_ns(group, nbytes, 0) == min(each)
        return costs.summing.known(group, nbytes).algorithm

    assert picked(S) == "halving"
    assert picked(S, 7) == "ring"
    assert picked(8, 4, link=(1.0, 1.0, 1.0, 9.0)) == "tree"  # whose last leaf takes part in two rounds
    assert picked(S, n=6, node=(0, 0, 0, 1, 1, 1), inner_bandwidth_mbit_s=100.0, inner_latency_s=0.0) == "hierarchical"
