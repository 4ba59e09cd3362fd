"""Machines with too few cores for the ranks on them: closed forms of processor sharing, and runs on such machines."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.cluster.cores import Cores
from ashl.cluster.network import network
from ashl.cluster.spec import Fitted, GroupSum, Quota, SharedCores, Sums
from ashl.cluster.speed import LEVELS, speed_of
from ashl.runtime.node import Node
from ashl.runtime.shared_cores import SharedSim
from ashl.runtime.sim import Sim
from ashl.runtime.simulators import simulator
from ashl.size_only import SizeOnly
from tests.laws.machines import MS, cluster
from tests.laws.test_network import Deaf

Begun = list[tuple[int, int]]  # when, and the work
TASKS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 5_000)), min_size=1, max_size=12)


def ends(count: float, begun: Begun, **how: float) -> list[int]:
    """When each task ends."""
    cores, waiting, found = (
        Cores[int](count, **how),
        sorted(range(len(begun)), key=lambda k: begun[k][0]),
        dict[int, int](),
    )
    while len(found) < len(begun):
        due = cores.next_ns()
        if waiting and (due is None or begun[waiting[0]][0] <= due):
            k = waiting.pop(0)
            cores.begin(k, begun[k][1], begun[k][0])
        else:
            assert due is not None
            if (ended := cores.end(due)) is not None:
                found[ended] = due
                cores.give()
    return [found[k] for k in range(len(begun))]


def test_tasks_share_cores_alike() -> None:
    assert ends(1, [(0, 10), (0, 10)]) == [20, 20]
    assert ends(2, [(0, 10), (0, 10), (0, 10)]) == [15, 15, 15]
    assert ends(1, [(0, 10), (4, 10)]) == [16, 20]  # alone for 4, then both for 12, then the second alone for 4
    assert ends(1.5, [(0, 900), (100, 300), (100, 10_000)]) == [1367, 700, 10_567]
    assert ends(1, [(0, 10**12), (10**12 - 1, 1)]) == [10**12 + 1, 10**12 + 1]


def test_of_more_tasks_than_slots_some_wait() -> None:
    assert ends(2, [(0, 10), (0, 20), (0, 5)], slots=2) == [10, 20, 15]  # the third when the first has ended
    assert ends(1.5, [(0, 9), (0, 9), (0, 9)], slots=2) == [12, 12, 21]
    assert ends(1, [(0, 10), (0, 2)], slots=1, quantum_ns=4) == [12, 6]  # after 4 the other one has its turn
    assert ends(1, [(0, 10), (20, 2)], slots=1, quantum_ns=4) == [10, 22]


def test_a_quota_is_used_up_and_comes_anew() -> None:
    quota = {"quota_ns": 3, "period_ns": 10}
    assert ends(1, [(0, 10)], **quota) == [31]
    assert ends(1, [(0, 3), (10, 3), (24, 3)], **quota) == [3, 13, 27]
    assert ends(1, [(5, 2), (8, 2), (30, 4)], **quota) == [7, 16, 36]  # from 5 on; one is left of the first at 8
    assert ends(1, [(0, 1), (9, 6)], **quota) == [1, 21]  # of two that are left at 9 one goes into the next period
    assert ends(1, [(0, 1), (12, 5)], **quota) == [1, 22]  # and nothing where none is under way,
    assert ends(1, [(0, 1), (12, 5)], **quota, kept_ns=1) == [1, 21]  # but for what is kept
    assert ends(2, [(0, 4), (0, 4)], quota_ns=4, period_ns=10) == [12, 12]  # both use it up by 2
    assert ends(2, [(0, 2), (0, 9)], quota_ns=15, period_ns=10) == [2, 9]  # never used up
    assert ends(1, [(0, 95), (100, 3)], quota_ns=9, period_ns=10) == [108, 106]


def test_what_is_used_beyond_a_quota_is_taken_from_the_next() -> None:
    """3 of every 10, and that they are used up is seen 2 later: who does little at a time never stands still."""
    quota = {"quota_ns": 3, "period_ns": 10, "late_ns": 2}
    assert ends(1, [(0, 5), (10, 3), (20, 3)], **quota) == [5, 13, 23]
    assert ends(1, [(0, 10)], **quota) == [22]  # 5 by 5, 3 by 13, and 2 more from 20 on
    assert ends(1, [(0, 5), (10, 4), (40, 5)], **quota) == [5, 21, 45]  # where nothing is done debts are paid
    assert ends(1, [(0, 300)], **quota) == [991]  # as much in the long run
    assert ends(1, [(0, 9)], quota_ns=2, period_ns=10, late_ns=6) == [41]  # 8 by 8, as much as four periods give


@given(st.integers(1, 5_000), st.integers(1, 50), st.integers(0, 50))
def test_a_quota_is_as_slow_as_its_share(work_ns: int, quota_ns: int, more_ns: int) -> None:
    whole, rest = divmod(work_ns, quota_ns)
    due = (whole - (not rest)) * (quota_ns + more_ns) + (rest or quota_ns)
    assert ends(1, [(0, work_ns)], quota_ns=quota_ns, period_ns=quota_ns + more_ns) == [due]


def test_who_was_served_for_a_quantum_waits_behind_who_comes_within_as_long() -> None:
    """The first of them is served until 4, and due again at 8: the one of 7 is before it, and the one of 9 is not."""
    assert ends(1, [(0, 10), (3, 4), (7, 1), (9, 1)], slots=1, quantum_ns=4) == [16, 8, 9, 14]
    assert ends(1, [(0, 10), (3, 4), (9, 1)], slots=1, quantum_ns=4) == [15, 8, 13]


@pytest.mark.parametrize(
    ("quantum_ns", "expected"),
    [
        (6, [("a", 4), ("a", 6), ("b", 9)]),  # ... of 4, and of 2 right after that
        (5, [("a", 4), ("b", 8), ("a", 9)]),  # of which 1 is left when its quantum is over
        (4, [("a", 4), ("b", 7), ("a", 9)]),
    ],
)
def test_who_goes_on_keeps_the_core_for_a_quantum(quantum_ns: float, expected: list[tuple[str, int]]) -> None:
    cores, found = Cores[str](1, slots=1, quantum_ns=quantum_ns), list[tuple[str, int]]()
    cores.begin("a", 4, 0)
    cores.begin("b", 3, 1)
    while (due := cores.next_ns()) is not None:
        if (ended := cores.end(due)) is not None:
            found.append((ended, due))
            if len(found) == 1:
                cores.begin("a", 2, due)
            cores.give()
    assert found == expected


@pytest.mark.parametrize("spread", [0.0, 0.25, 0.9])
def test_quanta_are_spread_evenly_about_their_mean(spread: float) -> None:
    """Two that take turns have about half of the core each, in turns of every length between the bounds."""
    cores, turns, since_ns = Cores[str](1, slots=1, quantum_ns=1000, spread=spread), list[int](), 0
    for task in "ab":
        cores.begin(task, 10**6, 0)
    while cores.end(due := cores.next_ns() or 0) is None:
        turns.append(due - since_ns)
        since_ns = due
    assert turns[::2] == pytest.approx([1000] * len(turns[::2]), abs=1000 * spread)
    for every in (1, 2):
        lengths = sorted(turns[::every])
        even = [1000 * (1 + spread * (2 * (k + 0.5) / len(lengths) - 1)) for k in range(len(lengths))]
        assert lengths == pytest.approx(even, abs=20 * spread)


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


@given(TASKS, st.sampled_from([{}, {"slots": 1}, {"slots": 1, "quantum_ns": 700, "spread": 0.5}]))
def test_one_core_loses_no_work(begun: Begun, how: dict[str, float]) -> None:
    """It is never idle while there is some: the last task ends when a queue would have done all."""
    free = 0
    for time_ns, work_ns in sorted(begun):
        free = max(free, time_ns) + work_ns
    assert max(ends(1, begun, **how)) == pytest.approx(free, abs=len(begun))


@given(TASKS, st.integers(0, 3))
def test_enough_cores_are_as_many_machines(begun: Begun, more: int) -> None:
    assert ends(len(begun) + more, begun) == [time_ns + work_ns for time_ns, work_ns in begun]


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


@pytest.mark.parametrize("quota", [0.5, 1.0, 4.0])
def test_a_quota_was_in_what_a_sum_took(quota: float) -> None:
    """Of 8 ms each member keeps a core busy for 1 ms, which half of a core does in 4 for both; nothing is added."""
    machine = on_one_machine(2, busy=((2, 0.125),), quotas=(Quota(cores=quota, period_s=1e-6),))

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
    """A server's port serves one after the other, and who is served both ways at once by next to nothing slower."""
    way = Sums(latency_s=0.001, s_per_byte=0.001)
    machine = replace(on_one_machine(4), shared=None, server_in=way, server_out=way, latencies=(0.001, 0.002))

    async def main(node: Node) -> float:
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
