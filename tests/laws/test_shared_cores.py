"""Machines with too few cores for the ranks on them: closed forms of processor sharing, and runs on such machines."""

from dataclasses import fields, replace
from typing import Any

import pytest

from ashl.cluster.network import network
from ashl.cluster.spec import Fitted, GroupSum, Quota, SharedCores, Sums
from ashl.cluster.speed import LEVELS, speed_of
from ashl.runtime.node import Deaf, Node
from ashl.runtime.shared_cores import SharedSim
from ashl.runtime.sim import Sim
from ashl.runtime.simulators import simulator
from ashl.size_only import SizeOnly
from tests.laws.machines import MS, cluster


def test_who_has_slept_does_not_see_what_has_come_before_it_has_a_core() -> None:
    """Two want to compute at 5 ms, on one core: the second waits for 10 ms, and has what it had asked for only then.
    When either loses the core in the middle of its work, it computes all the same."""

    async def main(node: Node) -> dict[str, float]:
        if node.rank < 2:
            await node.sleep(0.005)
            for _ in range(2):
                await node.compute(lambda: None, work=1)
        return {kind: ns / MS for kind, ns in node.ledger.live().items() if ns}

    first, second, _ = played(on_one_machine(1, quantum_s=0.01), main)
    assert first == {"wait": 5, "compute": 30}
    assert second == {"wait": 5, "pull": 10, "compute": 30}


FREE = Sums(latency_s=0.0, s_per_byte=0.0)
DENSE = 4_000
TAG = ("x", 0, 0)


def on_one_machine(cores: float, n: int = 2, **costs: Any) -> Fitted:
    """Workers and a server on it, without any cost but steps of 10 ms and a sum of 8 ms."""
    plain, given = (
        cluster(n),
        {"ends": (FREE,), "before": 1.0, "busy": (), "quantum_s": 1e-6, "resumed_s": (0.0,) * n} | costs,
    )
    return Fitted(
        **{field.name: getattr(plain, field.name) for field in fields(plain)} | {"step_s": 1.0, "compute": (0.01,) * n},
        jitters=(0.0,) * n,
        encode_s=(0.0,) * n,
        latencies=(0.0,) * n,
        pull_latencies=(0.0,) * n,
        up_bytes_s=(None,) * n,
        down_bytes_s=(None,) * n,
        server_bytes_s=None,
        all_reduce=None,
        steps=((1.0,) * len(LEVELS),) * n,
        in_order=False,
        batches=(((1, 1.0),),) * n,
        server_in=FREE,
        server_out=FREE,
        group_sums=(GroupSum(group=n, latency_s=0.008, s_per_byte=0.0),),
        shared=SharedCores(machine=(0,) * (n + 1), cores=(cores,), **given),
    )


def played(machine: Fitted, main: Any) -> list[Any]:
    """What each rank returns."""
    n = len(machine.compute)
    sim = simulator(n + 1, speed_of(machine, 1, 0), network(machine, DENSE), Deaf())
    assert isinstance(sim, SharedSim)
    return sim.run(main, tick=lambda: None)


@pytest.mark.parametrize(("cores", "expected_ms"), [(1, 20), (1.6, 12.5), (2, 10), (3, 10)])
def test_steps_on_one_machine_slow_each_other_down(cores: float, expected_ms: float) -> None:
    async def main(node: Node) -> int:
        if node.rank < 2:
            await node.compute(lambda: None, work=1)
        return node.now_ns

    assert played(on_one_machine(cores), main) == pytest.approx([expected_ms * MS, expected_ms * MS, 0], abs=2000)


def test_cores_of_one_computer_slow_each_other_down() -> None:
    """Two steps of 10 ms, with half and a quarter more to do for each core in use on the other machine: 12.5 ms, by
    which the first one has done 8 1/3. Where that machine stands still for 4 of every 8 ms, it slows nobody then."""

    async def main(node: Node) -> float:
        if node.rank < 2:
            await node.compute(lambda: None, work=1)
        return node.now_ns / MS

    for quotas, expected in (((), [14 + 1 / 6, 12.5]), ((None, Quota(cores=0.5, period_s=0.008)), [12 + 2 / 3, 19.6])):
        machine = on_one_machine(1, quotas=quotas, crowded=(0.5, 0.25))
        assert machine.shared is not None
        machine = replace(machine, shared=replace(machine.shared, machine=(0, 1, 0), cores=(1.0, 1.0)))
        assert played(machine, main)[:2] == pytest.approx(expected, abs=0.002)


def test_a_step_stands_still_where_the_quota_is_used_up() -> None:
    machine = on_one_machine(2, quotas=(Quota(cores=1, period_s=0.008),))

    async def main(node: Node) -> int:
        if node.rank < 2:
            await node.compute(lambda: None, work=1)
        return node.now_ns

    assert played(machine, main) == [18 * MS, 18 * MS, 0]  # 4 ms of work each in the first 4 of every 8 ms


def test_a_step_that_begins_later() -> None:
    """Alone for 4 ms, then both for 12, then the other one alone for 4; what was booked is all of it."""

    async def main(node: Node) -> tuple[int, int]:
        if node.rank < 2:
            await node.sleep(0.004 * node.rank)
            await node.compute(lambda: None, work=1)
        return node.now_ns, node.ledger.live()["compute"]

    for own, expected in zip(played(on_one_machine(1), main), [(16, 16), (20, 16), (0, 0)], strict=True):
        assert [time_ns / MS for time_ns in own] == pytest.approx(expected, abs=0.002)


def test_a_message_costs_both_ends() -> None:
    """3 ms to send and 2 ms to take in, a quarter of it after the message has gone on, beside a step of 10 ms. On one
    core: 2.25 ms of work by 4.5 ms, then the sender's rest, the receiver's part and the step share it in threes."""
    ends = tuple(Sums(latency_s=time_s, s_per_byte=0.0) for time_s in (0.003, 0.003, 0.002))

    async def main(node: Node) -> float:
        if node.rank == 0:
            await node.send(2, TAG, SizeOnly(8))
            await node.compute(lambda: None, work=1)
        elif node.rank == 2:
            await node.recv(TAG)
        return node.now_ns / MS

    for cores, expected in ((1, [15, 0, 8.25]), (4, [10, 0, 3.75])):
        machine = on_one_machine(cores, before=0.75, ends=ends, quantum_s=2e-7)
        assert played(machine, main) == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize(("quantum_s", "expected"), [(1.0, [10, 2, 15]), (0.004, [15, 2, 13])])
def test_a_message_waits_for_the_turn_of_a_step(quantum_s: float, expected: list[float]) -> None:
    """A step has been under way for 2 ms when a message wants the core, for 3 ms to send it and for 2 to take it in.
    It is sent before the rest of a step whose quantum is over, which goes on while it is on its way."""
    ends = tuple(Sums(latency_s=time_s, s_per_byte=0.0) for time_s in (0.003, 0.003, 0.002))

    async def main(node: Node) -> float:
        if node.rank == 0:
            await node.compute(lambda: None, work=1)
        elif node.rank == 1:
            await node.sleep(0.002)
            await node.send(2, TAG, SizeOnly(8))
        else:
            await node.recv(TAG)
        return node.now_ns / MS

    assert played(on_one_machine(1, ends=ends, quantum_s=quantum_s), main) == expected


@pytest.mark.parametrize(("busy", "apply_ms", "expected_ms"), [(0.5, 0, 8), (0.25, 0, 8), (0.5, 2, 10)])
def test_a_sum_costs_its_members(busy: float, apply_ms: float, expected_ms: float) -> None:
    """Of 8 ms each keeps a core busy for that share, both at once on one core, and the rest passes by itself; what else
    is to be done there has a third of the core."""
    machine = replace(on_one_machine(1, busy=((2, busy),)), server_step_s=apply_ms / 1e3)

    async def main(node: Node) -> float:
        if node.rank == 2:
            await node.compute(lambda: None, work=1, kind="apply")
        else:
            await node.all_reduce(SizeOnly(8), (0, 1))
        return node.now_ns / MS

    assert played(machine, main)[:2] == pytest.approx([expected_ms] * 2, abs=0.002)


@pytest.mark.parametrize(("quota", "period_s"), [(0.5, 1e-6), (1.0, 1e-6), (4.0, 1e-6), (0.5, 0.1)])
def test_a_quota_was_in_what_a_sum_took(quota: float, period_s: float) -> None:
    """Of 8 ms each member keeps a core busy for 1 ms, which half of a core does in 4 for both; nothing is added, and it
    ends no sooner where much of a quota is left."""
    machine = on_one_machine(2, busy=((2, 0.125),), quotas=(Quota(cores=quota, period_s=period_s),))

    async def main(node: Node) -> float:
        if node.rank < 2:
            await node.all_reduce(SizeOnly(8), (0, 1))
        return node.now_ns / MS

    assert played(machine, main)[:2] == pytest.approx([8, 8], abs=0.003)


def test_standing_still_costs_what_is_computed_next() -> None:
    """2 ms more for what comes first after a pause, a step or what takes bodies apart, and nothing for the next."""
    machine = replace(on_one_machine(2, resumed_s=(0.002, 0.002)), decode_s=0.003)

    async def main(node: Node) -> float:
        if node.rank < 2:
            await node.sleep(0.001)
            for kind in ("compute", "decode") if node.rank else ("decode", "compute"):
                await node.compute(lambda: None, work=1, kind=kind)
        return node.now_ns / MS

    assert played(machine, main)[:2] == [16, 16]


def test_messages_between_workers_share_a_link() -> None:
    """At 1,000 bytes/s, with a latency of 1 ms: two of 8 bytes that leave a port at once, or come to one, are there
    after 17 ms, and of 24 and 8 bytes the short one is there by then and the long one after 33. What a server takes in
    comes one after the other."""
    cases = [
        ("up_bytes_s", [(0, 1, 8), (0, 2, 8)], [0, 17, 17, 0]),
        ("down_bytes_s", [(1, 0, 8), (2, 0, 8)], [17, 0, 0, 0]),
        ("up_bytes_s", [(0, 1, 24), (0, 2, 8)], [0, 33, 17, 0]),
        ("up_bytes_s", [(0, 1, 24)], [0, 25, 0, 0]),
        ("up_bytes_s", [(0, 3, 8), (0, 3, 8)], [0, 0, 0, 17]),
    ]
    for way, sent, expected in cases:
        links = {way: (1000.0, None, None), "latencies": (0.001,) * 3, "pull_latencies": (0.001,) * 3}
        machine = replace(on_one_machine(4, 3), **links)

        async def main(node: Node, sent: list[tuple[int, int, int]] = sent) -> float:
            for src, dst, nbytes in sent:
                if node.rank == src:
                    await node.send(dst, TAG, SizeOnly(nbytes))
            for _, dst, _ in sent:
                if node.rank == dst:
                    await node.recv(TAG)
            return node.now_ns / MS

        assert played(machine, main) == expected


def test_what_comes_to_a_server_and_what_leaves_it_slow_each_other_down() -> None:
    """8 bytes of a millisecond each are sent at 0, and 8 come at 4 ms: by then half is gone, and while both are under
    way each is 1.5 times as slow, until 10 ms; what comes has done 4 of its bytes by then."""
    way = Sums(latency_s=0.0, s_per_byte=0.001)
    machine = replace(on_one_machine(4), server_in=way, server_out=way, server_crossed_s_per_byte=0.0005)

    async def main(node: Node) -> float:
        if node.rank == 0:
            await node.recv(TAG)
        elif node.rank == 1:
            await node.sleep(0.004)
            await node.send(2, TAG, SizeOnly(8))
        else:
            await node.send(0, TAG, SizeOnly(8))
            await node.recv(TAG)
        return node.now_ns / MS

    assert played(machine, main) == pytest.approx([10, 4, 14], abs=0.002)
    assert played(replace(machine, shared=None), main) == pytest.approx([10, 4, 14], abs=0.002)


def test_a_machine_each_is_as_no_machine() -> None:
    """Whose messages are alone at a server's port, which may be slower both ways by next to nothing."""
    way = Sums(latency_s=0.001, s_per_byte=0.001)
    machine = replace(on_one_machine(4), shared=None, server_in=way, server_out=way, latencies=(0.001, 0.002))

    async def main(node: Node) -> float:
        await node.sleep(node.rank % 2)
        for k in range(3):
            if node.rank < 2:
                await node.compute(lambda: None, work=1 + k)
                await node.send(2, TAG, SizeOnly(8))
                await node.recv(TAG)
            else:
                for _ in range(2):
                    await node.send((await node.recv(TAG)).src, TAG, SizeOnly(4))
        return node.now_ns / MS

    nearly = replace(machine, server_crossed_s_per_byte=1e-15)
    plain = Sim(3, speed_of(machine, 1, 0), network(machine, DENSE), Deaf()).run(main, tick=lambda: None)
    assert played(nearly, main) == pytest.approx(plain, abs=1e-4)
