"""Plans of sums that go on under the next forward pass: laws on random chains, and what a tuner
chooses.
"""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ashl.overlap.dear import DeAR
from ashl.overlap.merged import plan_optimally
from ashl.overlap.next_forward import step_with_pulls_ns
from ashl.overlap.priority import Priority, arrival_ns
from ashl.overlap.slices import Slices
from ashl.overlap.timeline import StepTimeline

cost = st.integers(0, 20)
layers = st.lists(st.tuples(cost, st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=7)


def chain(drawn: list[tuple[int, int, int]], latency: int = 0, scale: int = 1) -> StepTimeline:
    """Make groups from (forward, backward, size), the last one first; sizes are in slices of two
    bytes of time each.
    """
    forwards = [scale * forward for forward, _, _ in drawn]
    ready = accumulate((scale * backward for _, backward, _ in drawn), initial=sum(forwards))
    needed = [sum(forwards[k + 1 :]) for k in range(len(drawn))]
    sizes = tuple(size for _, _, size in drawn)
    return StepTimeline(
        tuple(ready)[1:],
        sizes,
        lambda size: scale * 2 * (latency + size),
        lambda size: scale * (latency + size),
        tuple(needed),
    )


def priority(of: StepTimeline, slices: int = 1, credit: int = 1) -> int:
    return of.period_ns(
        arrival_ns(of, (1,) * len(of.nbytes), slices, credit), (1,) * len(of.nbytes)
    )


def dear(of: StepTimeline) -> int:
    return step_with_pulls_ns(of, (1,) * len(of.nbytes), of.half_ns)


def tails(of: StepTimeline) -> list[tuple[int, int, int]]:
    """(q_k, R_k, S_k) of each group, in time the forward time in R and out of q."""
    spent = list(accumulate(of.cost_ns(size) for size in reversed(of.nbytes)))[::-1]
    return [
        (-needed, ready, sent)
        for needed, ready, sent in zip(of.needed_ns, of.ready_ns, spent, strict=True)
    ]


@given(layers)
def test_small_slices_come_within_one_slice_of_what_no_order_can_beat(drawn) -> None:
    """Return max (q + R + S): one machine with release dates and tails, which may not interrupt a
    slice.
    """
    any_chain = chain(drawn)
    ideal = max(map(sum, tails(any_chain)))
    assert ideal <= priority(any_chain) <= ideal + 2
    assert ideal <= any_chain.end_ns((1,) * len(drawn))


@given(layers)
def test_dear_takes_its_closed_form_and_no_more_than_twice_half_hidden(drawn) -> None:
    any_chain = chain(drawn)
    halves = [(q, r, s // 2) for q, r, s in tails(any_chain)]
    assert dear(any_chain) == max(r + s for _, r, s in halves) + max(q + s for q, _, s in halves)
    assert max(map(sum, tails(any_chain))) <= dear(any_chain)


@given(layers, cost, st.integers(1, 3))
def test_slices_that_return_at_once_take_their_closed_form(drawn, latency, size) -> None:
    """Two machines one after the other: max over i ≤ j of R_i + u_i + ... + u_j + d_j +
    ... + d_m.
    """
    any_chain = chain([(forward, backward, 4 * size) for forward, backward, size in drawn], latency)
    any_chain = replace(any_chain, answer_ns=7 + any_chain.half_ns(sum(any_chain.nbytes)))
    cuts = [
        (ready, min(4 * size, nbytes - start))
        for ready, nbytes in zip(any_chain.ready_ns, any_chain.nbytes, strict=True)
        for start in range(0, nbytes, 4 * size)
    ]
    up, down = (
        [cost_ns(nbytes) for _, nbytes in cuts]
        for cost_ns in (any_chain.cost_ns, any_chain.half_ns)
    )
    last = [
        ready + sum(up[i : j + 1]) + sum(down[j:])
        for i, (ready, _) in enumerate(cuts)
        for j in range(i, len(cuts))
    ]
    assert Slices(slice=size).step_ns(any_chain) == max(last) + 7
    auto = Slices(slice="auto").with_plan(any_chain)
    assert auto.step_ns(any_chain) <= any_chain.end_ns((1,) * len(drawn)) + any_chain.answer_ns, (
        "one slice a group"
    )


@given(layers, cost)
def test_bounds(drawn, latency) -> None:
    any_chain, n = chain(drawn, latency), len(drawn)
    each = any_chain.end_ns((1,) * n)
    forward, whole = sum(f for f, _, _ in drawn), any_chain.ready_ns[-1]
    unsliced = priority(any_chain, 100, 1)
    first = any_chain.cost_ns(any_chain.nbytes[-1])
    assert max(each - forward, whole + first) <= unsliced
    assert unsliced <= each + max(map(any_chain.cost_ns, any_chain.nbytes)), (
        "late by one that cannot be interrupted"
    )


@pytest.mark.limit("overlap=priority")
@given(layers, cost)
def test_without_a_forward_pass_nothing_crosses_the_barrier(drawn, latency) -> None:
    still = chain([(0, backward, size) for _, backward, size in drawn], latency)
    assert priority(still, 100, 1) == still.end_ns((1,) * len(drawn))


@pytest.mark.limit("overlap=dear", "overlap=priority")
@given(st.tuples(cost, cost, st.integers(1, 20)), cost)
def test_one_group_cannot_be_hidden(layer, latency) -> None:
    single = chain([layer], latency)
    assert priority(single, 100, 1) == dear(single) == single.end_ns((1,))


@given(layers, cost, st.integers(2, 9))
def test_costs_times_a_number_take_that_many_times_as_long(drawn, latency, scale) -> None:
    small, large = chain(drawn, latency), chain(drawn, latency, scale)
    for took in (priority, dear):
        assert took(large) == scale * took(small)


@given(layers, cost)
def test_what_is_tuned_is_no_slower_than_what_it_is_tuned_from(drawn, latency) -> None:
    any_chain = chain([(f, b, 4000 * size) for f, b, size in drawn], 4000 * latency)
    each = (1,) * len(drawn)
    tuned = DeAR(plan="tuned").with_plan(any_chain)
    assert sum(tuned.plan) == len(drawn)
    assert tuned.step_ns(any_chain) <= min(
        step_with_pulls_ns(any_chain, n, any_chain.half_ns) for n in (each, (len(drawn),))
    )
    auto = Priority(plan="tuned", slice="auto", credit="auto").with_plan(any_chain)
    largest = max(any_chain.nbytes)
    barrier = any_chain.end_ns(plan_optimally(any_chain))
    assert auto.step_ns(any_chain) <= 1.001 * min(priority(any_chain, largest), barrier)
