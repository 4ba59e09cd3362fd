"""The cores of a machine: closed forms of processor sharing, of queues for them, and of quotas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.cluster.cores import Cores

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


def test_a_quota_that_is_no_whole_number_ends() -> None:
    """Its use ends within a nanosecond of where it should, late in a run, too."""
    how = {"quota_ns": 55_000_000.00000001, "period_ns": 1e8}
    assert ends(1, [(10**9, 10**8)], **how) == [10**9 + 10**8 + 45_000_000]


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
