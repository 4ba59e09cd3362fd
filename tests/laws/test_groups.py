"""The group generator of partial all-reduce, without any rank.

For all orders of requests groups are atomic, keep their order and all end; each scheduler keeps its
guarantees.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.data.rng import Purpose, draw_subset, permutation
from ashl.option import option
from ashl.runtime.plain_state import decode, encode
from ashl.sync.ripples_static import phase
from ashl.topology import group_generator as gg
from ashl.topology.group_generator import GroupRule, workers_by_node
from tests.conf_option import conf_option

RULES = ("random", "smart", "static", "first_come")


def rule_of(scheduler: str, **fields: Any) -> Any:
    return conf_option("sync", f"ripples_{scheduler}", **fields)


def drawn_rule(rng: random.Random, scheduler: str, n: int) -> Any:
    if scheduler == "static":
        return rule_of("static")
    fields: dict[str, Any] = {"group_size": rng.randint(2, n)}
    if scheduler == "smart":
        fields |= {"threshold": rng.randint(1, 5), "inter_intra": rng.random() < 0.5}
    return rule_of(scheduler, **fields)


@dataclass
class Played:
    """Workers that ask at random times and different rates, and groups of random duration."""

    rule: Any
    state: gg.Groups
    running: list[gg.Group] = field(default_factory=list)
    started: list[gg.Group] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def take(self, started: list[gg.Group]) -> None:
        for group in started:
            assert not set(group.members) & {w for other in self.running for w in other.members}, (
                "two at a time"
            )
            self.running.append(group)
            self.started.append(group)

    def can_ask(self) -> list[int]:
        busy = (
            {w for group in self.running for w in group.members}
            | set(self.state.waiting)
            | set(self.left)
        )
        return [worker for worker in range(self.state.num_workers) if worker not in busy]

    def step(self, rng: random.Random) -> None:
        """One thing that can happen."""
        moves: list[tuple[str, Any]] = [("ask", worker) for worker in self.can_ask()]
        moves += [("done", group) for group in self.running]
        assert moves, f"nobody can go on: {self.state}"
        kind, what = rng.choice(moves)
        if kind == "ask":
            self.take(gg.add_request(self.state, self.rule, what))
        else:
            self.running.remove(what)
            self.take(gg.complete_group(self.state, self.rule, what))
        self.check()

    def check(self) -> None:
        """The incremental state equals a recomputation from all workers, and the state of a
        checkpoint.
        """
        state, everyone = self.state, range(self.state.num_workers)
        empty = [worker for worker in everyone if not state.buffers[worker]]
        for least in range(max(state.requests) + 2):
            assert state.workers_without_group(least) == [
                worker for worker in empty if state.requests[worker] >= least
            ]
        asked = sorted(state.waiting, key=lambda worker: state.waiting[worker])
        assert state.idle_workers == [worker for worker in asked if worker in empty]
        begun = {group.id for group in self.running}
        pending = {
            group.id: group for buffer in state.buffers for group in buffer if group.id not in begun
        }
        ready = {w: state.buffers[w][0].id for w in state.waiting if state.buffers[w]}
        assert state._missing == {
            number: sum(ready.get(member) != number for member in group.members)
            for number, group in pending.items()
        }
        assert all(state._missing.values()), "what can begin has begun"
        assert decode(encode(state)) == state


def play(seed: int, scheduler: str, steps: int = 60) -> Played:
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    nodes = [rng.randrange(3) for _ in range(n)]
    played = Played(drawn_rule(rng, scheduler, n), gg.open_groups(nodes, seed))
    for _ in range(steps):
        played.step(rng)
    gg.close_groups(played.state)
    for _ in range(10_000):
        played.left += gg.release_idle(played.state)
        if len(played.left) == n:
            return played
        played.step(rng)
    raise AssertionError(f"the drain does not end: {played.state}")


@pytest.mark.parametrize("scheduler", RULES)
@given(seed=st.integers(0, 10**6))
def test_whoever_asks_whenever_groups_are_atomic_in_order_and_drained(
    scheduler: str, seed: int
) -> None:
    played = play(seed, scheduler)
    assert not played.running
    assert not any(played.state.buffers)
    assert sorted(group.id for group in played.started) == list(range(played.state.num_groups)), (
        "each group ran, once"
    )
    for worker in range(played.state.num_workers):
        ids = [group.id for group in played.started if worker in group.members]
        assert ids == sorted(ids), (
            "groups that share a worker run in the order in which they were made"
        )
    if scheduler != "random":
        assert played.state.conflicts == 0


def test_a_conflict_is_a_group_that_meets_one_of_another_draw() -> None:
    rule, state = rule_of("random", group_size=3), gg.open_groups([0] * 3, 0)
    assert gg.add_request(state, rule, 0) == []
    assert (state.num_groups, state.conflicts) == (1, 0)
    assert gg.add_request(state, rule, 1) == []
    assert gg.add_request(state, rule, 2) == [gg.Group(0, (0, 1, 2))]
    assert gg.add_request(state, rule, 0) == [], "before the group has said that it is done"
    assert state.num_groups == 1
    assert gg.complete_group(state, rule, gg.Group(0, (0, 1, 2))) == []
    assert state.num_groups == 2, "who asked too early is served now"
    pairs = rule_of("random", group_size=2)
    state = gg.open_groups([0] * 3, 0)
    for worker in range(3):
        gg.add_request(state, pairs, worker)
    assert state.conflicts == state.num_groups - 1, "two pairs of three workers share one"


# --- what the schedulers promise
# --------------------------------------------------------------------------------------


def matrix(n: int, groups: list[tuple[int, ...]]) -> np.ndarray:
    """W of the averages of disjoint groups."""
    w = np.eye(n)
    for group in groups:
        w[np.ix_(group, group)] = 1 / len(group)
    return w


def second(w: np.ndarray) -> float:
    """The second largest singular value: what is left of the distance from the mean."""
    return float(np.linalg.svd(w, compute_uv=False)[1])


@option
class Alone(GroupRule):
    """Everybody averages with itself."""

    group_size: int | None

    def draw(self, state: gg.Groups, asker: int) -> list[tuple[int, ...]]:
        return [(asker,)]


def test_the_authors_static_table() -> None:
    """Four workers on a machine, two machines."""
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(phase(nodes, 0)) == {(0, 4), (1,), (2, 3), (5,), (6, 7)}
    assert set(phase(nodes, 2)) == {(1, 5), (2,), (0, 3), (6,), (4, 7)}
    assert phase(nodes, 1) == phase(nodes, 3) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("n", [8, 16, 32])
def test_the_static_schedule_contracts_as_the_authors_does(n: int) -> None:
    nodes = [rank // 4 for rank in range(n)]
    product = reduce(np.matmul, (matrix(n, phase(nodes, k)) for k in range(4)))
    assert second(product) == pytest.approx(0.6495, abs=1e-3)


@given(nodes=st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_static_phases_are_partitions_whose_union_connects(nodes: list[int]) -> None:
    n = len(nodes)
    phases = [phase(nodes, k) for k in range(4)]
    assert all(sorted(itertools.chain(*groups)) == list(range(n)) for groups in phases)
    listed = set(rule_of("static").groups(nodes))
    assert listed == {group for groups in phases for group in groups if len(group) > 1}
    reached = {0}
    for _ in range(n):
        reached |= {w for group in listed if reached & set(group) for w in group}
    assert reached == set(range(n))


@given(length=st.integers(0, 50), count=st.integers(0, 50), step=st.integers(0, 99))
def test_the_chosen_are_the_first_of_a_permutation(length: int, count: int, step: int) -> None:
    whole = permutation(length, 7, Purpose.GROUPS, step=step).tolist()
    assert draw_subset(length, count, 7, Purpose.GROUPS, step=step) == whole[:count]


def test_random_groups_are_uniform() -> None:
    """Each of the 10 pairs that may join worker 2, about as often."""
    rule, state = rule_of("random", group_size=3), gg.open_groups([0] * 6, 7)
    seen = Counter(rule.draw(replace(state, num_draws=draw), 2)[0] for draw in range(2000))
    assert len(seen) == 10
    assert all(2 in group and 140 < count < 260 for group, count in seen.items())


def standing(nodes: list[int], seed: int, requests: list[int], busy: set[int]) -> gg.Groups:
    """A generator with these request counts of its workers; some have a group already."""
    state, alone = gg.open_groups(nodes, seed), Alone(group_size=None, local_steps=1)
    for worker, times in enumerate(requests):
        for _ in range(times):
            (group,) = gg.add_request(state, alone, worker)
            gg.complete_group(state, alone, group)
        if worker in busy:
            gg.add_request(state, alone, worker)
    state.num_draws = 0
    return state


@given(
    n=st.integers(1, 40),
    k=st.integers(2, 12),
    seed=st.integers(0, 999),
    threshold=st.integers(1, 5),
    data=st.data(),
)
def test_a_division_takes_all_who_are_free_and_keep_up(
    n: int, k: int, seed: int, threshold: int, data: Any
) -> None:
    """Disjoint groups of k, or as even as it goes; nobody whose requests are the threshold
    behind.
    """
    rule = rule_of("smart", group_size=k, threshold=threshold, inter_intra=False)
    requests = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    busy = data.draw(st.sets(st.integers(0, n - 1)))
    asker = data.draw(
        st.sampled_from(sorted(set(range(n)) - busy)) if len(busy) < n else st.just(-1)
    )
    if asker < 0:
        return
    state = standing([0] * n, seed, requests, busy)
    groups = rule.draw(state, asker)
    everyone = list(itertools.chain(*groups))
    expected = {
        w
        for w in range(n)
        if w not in busy and (w == asker or requests[asker] - requests[w] < threshold)
    }
    assert sorted(everyone) == sorted(expected), "disjoint, and each once"
    sizes = sorted(map(len, groups))
    assert sizes[-1] <= k
    assert sizes[-1] - sizes[0] <= 1
    assert len(expected) % k or set(sizes) == {k}


@given(nodes=st.lists(st.integers(0, 3), min_size=2, max_size=20), seed=st.integers(0, 999))
def test_a_division_in_two_rounds(nodes: list[int], seed: int) -> None:
    """First one head of each machine meet and the others stay inside theirs, then each machine as a
    whole.
    """
    rule, n = rule_of("smart", inter_intra=True), len(nodes)
    groups = rule.draw(gg.open_groups(nodes, seed), 0)
    teams = workers_by_node(nodes, range(n))
    if len(teams) == 1:
        assert groups == gg.split_evenly(gg.shuffle(gg.open_groups(nodes, seed), range(n)), 3)
        return
    whole = [tuple(team) for team in teams if len(team) > 1]
    first, then = groups[: len(groups) - len(whole)], groups[len(groups) - len(whole) :]
    assert then == whole
    assert sorted(itertools.chain(*first)) == list(range(n))
    heads, *inside = first
    assert sorted(nodes[head] for head in heads) == sorted(set(nodes))
    assert all(len({nodes[w] for w in group}) == 1 and len(group) <= 3 for group in inside)


def test_a_straggler_does_not_hold_up_the_second_round() -> None:
    """It asks itself, so it is in the first one; the others of its machine average without it."""
    rule = rule_of("smart", inter_intra=True, threshold=4)
    state = standing([0, 0, 0, 1, 1, 1], 0, [9, 9, 5, 9, 9, 9], set())
    groups = rule.draw(state, 2)
    assert groups[-2:] == [(0, 1), (3, 4, 5)]
    assert any(2 in group for group in groups)


def test_a_division_of_all_mixes_as_enumerated() -> None:
    """All orders of four workers cut into pairs: ρ = 1 − (n/k)(k − 1)/(n − 1) = 1/3."""
    every = [matrix(4, gg.split_evenly(order, 2)) for order in itertools.permutations(range(4))]
    assert second(sum(every) / len(every)) == pytest.approx(1 / 3)


def test_first_come_groups_close_with_k() -> None:
    rule, state = rule_of("first_come", group_size=3), gg.open_groups([0] * 5, 0)
    for worker in (4, 1):
        assert gg.add_request(state, rule, worker) == []
    assert [group.members for group in gg.add_request(state, rule, 2)] == [(1, 2, 4)]
