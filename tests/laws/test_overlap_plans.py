"""Plans of messages, against what was computed elsewhere and against trying all of them."""

from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.overlap.layerwise import hidden_ratios
from ashl.overlap.merged import plan_by_bytes, plan_greedily, plan_optimally
from ashl.overlap.timeline import (
    FORWARD,
    Bucket,
    StepTimeline,
    buckets_of_tensors,
    merge_buckets,
    untimed_timeline,
)


class Counted(StepTimeline):
    """Counts how many messages are weighed."""

    weighed: ClassVar[list[int]] = []

    def end_message(self, end: float, done: float, last: int, cost: float) -> tuple[float, float]:
        self.weighed.append(last)
        return super().end_message(end, done, last, cost)


costs = st.integers(0, 20)
layers = st.lists(st.tuples(costs, st.integers(1, 20)), min_size=1, max_size=8)


def chain(forward: int, drawn: list[tuple[int, int]], latency: int, rate: int = 1) -> StepTimeline:
    """Make groups from (backward, size), the last one first."""
    ready = tuple(forward + total for total in accumulate(backward for backward, _ in drawn))
    return StepTimeline(ready, tuple(size for _, size in drawn), lambda size: latency + rate * size)


def every_plan(groups: int) -> list[tuple[int, ...]]:
    plans = []
    for cuts in product((False, True), repeat=groups - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), groups]
        plans.append(tuple(b - a for a, b in pairwise(places)))
    return plans


@given(costs, layers, costs)
def test_optimal_is_the_best_of_all_plans_and_greedy_between(forward, drawn, latency) -> None:
    any_chain = chain(forward, drawn, latency)
    n = len(drawn)
    best = any_chain.end_ns(plan_optimally(any_chain))
    assert best == min(any_chain.end_ns(plan) for plan in every_plan(n))
    published = any_chain.end_ns(plan_greedily(any_chain))
    assert best <= published <= min(any_chain.end_ns((1,) * n), any_chain.end_ns((n,)))


@pytest.mark.limit("overlap=merged", "overlap=wfbp")
@given(costs, layers)
def test_without_latency_merging_gains_nothing_and_with_much_of_it_one_message_is_best(
    forward, drawn
) -> None:
    free, dear = chain(forward, drawn, 0), chain(forward, drawn, 10_000)
    assert (
        free.end_ns(plan_optimally(free))
        == free.end_ns(plan_greedily(free))
        == free.end_ns((1,) * len(drawn))
    )
    assert plan_optimally(dear) == plan_greedily(dear) == (len(drawn),)


slowing = st.tuples(st.floats(0, 0.95), st.floats(1, 3))


@pytest.mark.parametrize("slower", [(0.0, 1.0), (0.3, 1.2)])
def test_many_groups_are_planned_at_once(slower) -> None:
    """Few plans of the first groups remain, even if many end at different times."""
    sizes = [1000 * (1 + 37 * k % 101) for k in range(48)]
    ready = tuple(accumulate(100_000 + 1009 * (k * k % 97) for k in range(48)))
    many = Counted(
        ready,
        tuple(sizes),
        lambda size: 20_000 + 2 * size,
        pace_reduction=slower[0],
        collective_slowdown=slower[1],
    )
    Counted.weighed.clear()
    assert len(plan_optimally(many)) > 1
    assert len(Counted.weighed) <= 16 * len(sizes) ** 2 / 2


@given(costs, layers, costs, slowing, slowing, st.data())
def test_the_more_sums_and_computing_slow_each_other_down_the_longer_a_step(
    forward, drawn, latency, some, more, data
) -> None:
    """The error is at most the loss of computing beside all collectives, and theirs beside all of
    it.
    """
    messages = data.draw(st.sampled_from(every_plan(len(drawn))))
    plain = chain(
        1000 * forward, [(1000 * backward, 1000 * size) for backward, size in drawn], 1000 * latency
    )
    least, most = (
        replace(
            plain, pace_reduction=pick(some[0], more[0]), collective_slowdown=pick(some[1], more[1])
        )
        for pick in (min, max)
    )
    assert plain.end_ns(messages) <= least.end_ns(messages) <= most.end_ns(messages)
    serial = plain.ready_ns[-1] + sum(plain.cost_ns(size) for size in grouped(plain, messages))
    assert most.end_ns(messages) <= serial * (1 + most.pace_reduction * most.collective_slowdown)


def grouped(of: StepTimeline, messages: tuple[int, ...]) -> list[int]:
    ends = list(accumulate(messages))
    return [sum(of.nbytes[end - count : end]) for end, count in zip(ends, messages, strict=True)]


def test_messages_by_bytes_are_full_once_they_reach_their_cap() -> None:
    mib = 2**20
    sizes = StepTimeline((0,) * 5, (mib // 2, mib, 20 * mib, 20 * mib, 1), lambda size: 0)
    assert plan_by_bytes(sizes) == (2, 2, 1)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=1, max_size=12))
def test_layer_groups_cover_the_model_and_none_is_tiny(drawn) -> None:
    shapes, work = [(size,) for size, _ in drawn], [share for _, share in drawn]
    parts = buckets_of_tensors(shapes, work)
    assert parts[0].stop == sum(size for size, _ in drawn)
    assert parts[-1].start == 0
    assert all(later.stop == part.start for part, later in pairwise(parts))
    shares = [b - a for a, b in pairwise([FORWARD, *(part.ready for part in parts)])]
    assert min(shares) >= (1 - FORWARD) * 0.01 - 1e-12
    assert parts[-1].ready == 1
    whole = merge_buckets(parts, (len(parts),))
    assert whole == (Bucket(0, parts[0].stop, ready=1.0, needed=0.0),)
    assert all(0 <= part.needed <= FORWARD for part in parts)
    assert sum(untimed_timeline(parts).nbytes) == 4 * parts[0].stop


def test_a_hundredth_of_backward_is_a_group_of_its_own() -> None:
    """A smaller remainder joins the layer below it, or the first one."""
    parts = buckets_of_tensors([(2,), (3,), (5,), (7,)], [0.5, 98, 0.5, 1])
    assert [(part.start, part.stop) for part in parts] == [(10, 17), (0, 10)]


@given(costs, layers, costs, st.integers(1, 10))
def test_an_adaptive_message_keeps_the_most_that_is_hidden(forward, drawn, latency, most) -> None:
    """A step takes as long as with the least share in all; one element more of any message and it
    would be seen.
    """
    plain = chain(forward, [(backward, 40 * size) for backward, size in drawn], latency)
    elements = [size // 4 for size in plain.nbytes]

    def body(first: int, last: int, share: float) -> int:
        return latency + round(share * sum(elements[first:last]))

    own = replace(plain, ratio=0.1, body_ns=body)
    each = (1,) * len(drawn)
    shares = hidden_ratios(own, each, 0.1, most / 10)
    assert own.end_ns(each, shares) == own.end_ns(each)
    assert shares[-1] == 0.1
    end = 0
    for k, share in enumerate(shares):
        begin, size = max(end, own.ready_ns[k]), elements[k]
        end = begin + body(k, k + 1, share)
        assert 0.1 <= share <= most / 10
        if k + 1 < len(shares) and share + 1 / size <= most / 10:
            assert begin + body(k, k + 1, share + 1 / size) > own.ready_ns[k + 1]


@given(costs, layers, costs, costs)
def test_greedy_is_the_rule_of_omgs(forward, drawn, latency, select) -> None:
    """Merge l into l − 1 iff b(l − 1) + t_sel(s_l + s_(l−1)) − t_sel(s_l) − t_sel(s_(l−1)) − (τ_l −
    done_l) is less than t_c(l) + t_c(l − 1) − t_c(both), with selection in line with backward.
    """
    totals = accumulate(backward + select * size for backward, size in drawn)
    sizes = tuple(size for _, size in drawn)
    own = StepTimeline(
        tuple(forward + total for total in totals), sizes, lambda size: latency + size
    )
    plan, free, held = [], 0, [0]
    for group in range(1, len(sizes)):
        done, size = own.ready_ns[group - 1], sum(sizes[place] for place in held)
        start = max(free, done)
        wait = own.ready_ns[group] - done - (start - done)
        if wait < own.cost_ns(size) + own.cost_ns(sizes[group]) - own.cost_ns(size + sizes[group]):
            held.append(group)
        else:
            plan.append(len(held))
            free, held = start + own.cost_ns(size), [group]
    assert plan_greedily(own) == (*plan, len(held))


@given(costs, layers, costs, slowing, st.integers(0, 10))
def test_optimal_is_the_best_of_all_plans_under_contention(
    forward, drawn, latency, slower, start
) -> None:
    """The last sum has none of the extra cost of a start, so one message has none of it."""
    plain = replace(
        chain(forward, drawn, latency), pace_reduction=slower[0], collective_slowdown=slower[1]
    )
    dear, n = replace(plain, start_ns=start), len(drawn)
    assert dear.end_ns(plan_optimally(dear)) == min(map(dear.end_ns, every_plan(n)))
    assert dear.end_ns((n,)) == plain.end_ns((n,))
    assert plan_greedily(dear) == plan_greedily(plain), "as published"
