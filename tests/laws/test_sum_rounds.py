"""Sums by ring, halving, tree and hierarchy: their rounds, and the time and bytes of their closed
forms.
"""

from math import ceil, log2

import pytest
import torch

from ashl.cluster.all_reduce_rounds import BY_NAME, rounds_of
from ashl.cluster.network import make_network
from ashl.cluster.spec import Event
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


def delivered(algorithm, node, xs):
    """Carry the vectors of all members through the rounds; return what each member ends with."""
    pieces, rounds = rounds_of(algorithm, node)
    held = [x.view(pieces, -1).clone() for x in xs]
    for one in rounds:
        sent = [
            held[src][start:stop].clone()
            for src, start, stop in zip(one.src, one.start, one.stop, strict=True)
        ]
        for dst, start, stop, part in zip(one.dst, one.start, one.stop, sent, strict=True):
            held[dst][start:stop] = held[dst][start:stop] + part if one.adds else part
    return [own.flatten() for own in held]


@pytest.mark.parametrize("algorithm", BY_NAME)
def test_after_its_rounds_every_member_has_the_sum(algorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    for node in LAYOUTS:
        xs = [torch.randn(840, generator=generator, dtype=torch.float64) for _ in node]
        for total in delivered(algorithm, node, xs):
            torch.testing.assert_close(total, torch.stack(xs).sum(0))


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
        costs = make_network(cluster(n, latency_s=0.003), 1, algorithm)
        assert costs.all_reduce_ns(group, S, 0) == pytest.approx(form, abs=2 * n), algorithm
    sent = make_network(cluster(n), 1, "halving").all_reduce_costs.initial_cost(group, S).sent
    if n == p:
        assert sent == [2 * (n - 1) * S // n] * n
        assert make_network(cluster(n), 1).all_reduce_ns(group, S, 0) == make_network(
            cluster(n), 1, "halving"
        ).all_reduce_ns(group, S, 0)


@pytest.mark.parametrize(("m", "k"), [(1, 4), (2, 4), (4, 1), (3, 2)])
def test_a_hierarchy_takes_the_sum_of_its_parts(m, k) -> None:
    """Inside at ten times the rate and a third of the latency; a machine's port is shared by all
    who are on it.
    """
    links = {"latency_s": 0.003, "intra_node_latency_s": 0.001, "intra_node_bandwidth_mbit_s": 10.0}
    costs = make_network(
        cluster(m * k, node=tuple(i // k for i in range(m * k)), **links), 1, "hierarchical"
    )
    a, sb = LATENCY_NS, S * NS_PER_BYTE
    inside = 2 * (k - 1) * a // 3 + 2 * (k - 1) * sb // (10 * k)
    assert (
        costs.all_reduce_ns(tuple(range(m * k)), S, 0)
        == inside + 2 * (m - 1) * a + 2 * (m - 1) * sb // m
    )
    known = costs.all_reduce_costs.initial_cost(tuple(range(m * k)), S)
    assert (
        known.sent
        == known.received
        == [2 * (k - 1) * S // k + 2 * (m - 1) * S // (m * k)] * (m * k)
    )


def test_each_round_takes_as_long_as_its_slowest_link() -> None:
    a, sb = LATENCY_NS, S * NS_PER_BYTE
    slow_leaf = cluster(4, link=(1.0, 3.0, 1.0, 1.0), latency_s=0.003)
    assert make_network(slow_leaf, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 0) == 2 * (3 + 1) * (
        a + sb
    )
    assert make_network(slow_leaf, 1, "halving").all_reduce_ns((0, 1, 2, 3), S, 0) == 2 * (
        6 * a + 9 * sb // 4
    )
    assert make_network(slow_leaf, 1, "tree").all_reduce_ns((0, 2, 3), S, 0) == 4 * (
        a + sb
    )  # without it
    slower = cluster(4, latency_s=0.003, events=(Event(time_s=1.0, worker=3, link=2.0),))
    assert make_network(slower, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 0) == 4 * (a + sb)
    assert make_network(slower, 1, "tree").all_reduce_ns((0, 1, 2, 3), S, 2 * 10**9) == 2 * (
        2 + 1
    ) * (a + sb)
    exchange = cluster(4, exchange_s=0.2, link=(1.0, 3.0, 1.0, 1.0))
    assert (
        make_network(exchange, S, "tree").all_reduce_ns((0, 1, 2, 3), S, 0)
        == 2 * (3 + 1) * 100 * MS
    )
    assert make_network(exchange, S, "ring").all_reduce_ns((0, 1, 2, 3), S, 0) == make_network(
        exchange, S
    ).all_reduce_ns((0, 1, 2, 3), S, 0)


def test_auto_is_whichever_takes_least() -> None:
    def picked(nbytes, n=8, **links):
        costs = make_network(cluster(n, latency_s=0.003, **links), 1, "auto")
        group = tuple(range(n))
        each = [
            make_network(costs.cluster, 1, name).all_reduce_ns(group, nbytes, 0)
            for name in costs.all_reduce_costs.list_candidates(group)
        ]
        assert costs.all_reduce_ns(group, nbytes, 0) == min(each)
        return costs.all_reduce_costs.initial_cost(group, nbytes).algorithm

    assert picked(S) == "halving"
    assert picked(S, 7) == "ring"
    assert (
        picked(8, 4, link=(1.0, 1.0, 1.0, 9.0)) == "tree"
    )  # its last leaf takes part in two rounds
    assert (
        picked(
            S,
            n=6,
            node=(0, 0, 0, 1, 1, 1),
            intra_node_bandwidth_mbit_s=100.0,
            intra_node_latency_s=0.0,
        )
        == "hierarchical"
    )
