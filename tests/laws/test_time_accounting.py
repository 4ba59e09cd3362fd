"""A worker's time: after every sequence of events its classes add up to the time of the end."""

from hypothesis import given
from hypothesis import strategies as st

from ashl.runtime.time_accounting import KINDS, TimeAccounting

times = st.integers(0, 10**6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), st.sampled_from(KINDS), times),
        st.tuples(st.just("blocked"), times, times, times),
        st.tuples(st.just("pushed"), times, times),
        st.tuples(st.just("traffic"), times, st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("cut")),
    ),
    max_size=40,
)


def replayed(actions) -> tuple[TimeAccounting, list]:
    """A ledger after these actions, on a clock that only moves on, and the rounds that were cut."""
    time_accounting, rounds = TimeAccounting(), []
    now = 0
    for name, *values in actions:
        if name == "cut":
            rounds.append(time_accounting.end_round())
        elif name == "mark":
            time_accounting.attribute_until(values[0], values[1])
        elif name == "blocked":
            now = max(now, time_accounting.cursor) + values[0]
            time_accounting.attribute_blocked(now, values[1], values[2])
        elif name == "pushed":
            waited = time_accounting.current_totals()["wait"]
            time_accounting.reclassify_as_push(*values)
            assert (
                0
                <= waited - time_accounting.current_totals()["wait"]
                <= max(0, values[1] - values[0])
            )
        else:
            time_accounting.record_traffic(*values)
    return time_accounting, rounds


@given(actions)
def test_live_totals_reach_to_the_cursor(actions) -> None:
    time_accounting, _ = replayed(actions)
    assert sum(time_accounting.current_totals().values()) == time_accounting.cursor


@given(actions)
def test_rounds_follow_each_other_without_a_gap(actions) -> None:
    _, rounds = replayed(actions)
    cursor = 0
    for spans, start, end in rounds:
        assert start == cursor
        for kind, begin, until in spans:
            assert kind in KINDS
            assert begin == cursor < until
            cursor = until
        assert end == cursor


@given(actions)
def test_settled_totals_are_those_of_all_spans(actions) -> None:
    time_accounting, _ = replayed(actions)
    expected, cursor = time_accounting.current_totals(), time_accounting.cursor
    time_accounting.fold_pending()
    assert time_accounting.totals == expected
    assert sum(time_accounting.totals.values()) == cursor


@given(actions, st.integers(0, 2 * 10**6))
def test_closing_cuts_off_what_lies_past_the_end(actions, extra) -> None:
    """The end may be at any time that is not in a folded round.

    A worker learns of the end at most two rounds late.
    """
    time_accounting, rounds = replayed(actions)
    folded = rounds[-2][2] if len(rounds) > 1 else 0
    end = folded + extra
    before = {kind: total for kind, total in time_accounting.current_totals().items()}
    time_accounting.close(end)
    time_accounting.fold_pending()
    assert sum(time_accounting.totals.values()) == end
    assert min(time_accounting.totals.values()) >= 0
    assert all(time_accounting.totals[kind] <= before[kind] for kind in KINDS if kind != "wait")


@given(actions, times)
def test_traffic_counts_when_it_began_by_the_end(actions, end) -> None:
    """Rounds that were folded two rounds ago are final."""
    time_accounting, rounds = replayed(actions)
    sent, cuts = [], 0
    for name, *values in actions:
        cuts += name == "cut"
        if name == "traffic":
            sent.append((cuts, *values))
    assert time_accounting.bytes_so_far() == (
        sum(up for *_, up, _ in sent),
        sum(down for *_, down in sent),
    )
    time_accounting.close(end)
    time_accounting.fold_pending()
    kept = [(up, down) for cut, start, up, down in sent if start <= end or cut <= len(rounds) - 2]
    assert (time_accounting.bytes_up, time_accounting.bytes_down) == (
        sum(up for up, _ in kept),
        sum(down for _, down in kept),
    )


@given(actions)
def test_a_round_that_was_cut_stays_as_it_was_then(actions) -> None:
    time_accounting, kept = TimeAccounting(), []
    methods = {
        "mark": time_accounting.attribute_until,
        "blocked": time_accounting.attribute_blocked,
        "pushed": time_accounting.reclassify_as_push,
        "traffic": time_accounting.record_traffic,
        "cut": time_accounting.end_round,
    }
    for name, *values in actions:
        found = methods[name](*values)
        if name == "cut":
            kept.append((found[0], [*found[0]]))
    assert all(spans == then for spans, then in kept)


def test_blocked_time_is_pushing_then_waiting_then_pulling() -> None:
    time_accounting = TimeAccounting()
    time_accounting.attribute_until("compute", 10)
    time_accounting.attribute_blocked(50, push_end_ns=20, pull_start_ns=45)
    spans, _, _ = time_accounting.end_round()
    assert spans == [("compute", 0, 10), ("push", 10, 20), ("wait", 20, 45), ("pull", 45, 50)]


def test_what_was_asked_for_early_was_never_waited_for() -> None:
    """A transfer that began before the worker blocked: there is a push or a pull, and no
    waiting.
    """
    time_accounting = TimeAccounting()
    time_accounting.attribute_until("compute", 10)
    time_accounting.attribute_blocked(30, push_end_ns=0, pull_start_ns=5)
    assert time_accounting.end_round()[0] == [("compute", 0, 10), ("pull", 10, 30)]


def test_what_a_collective_waited_is_neither_moved_nor_hidden() -> None:
    """80 of 100 ns were waiting for the last member; the rest is as exposed as before."""
    time_accounting = TimeAccounting()
    time_accounting.record_collective(0, 100, main=True)
    time_accounting.fold_pending()
    time_accounting.reclassify_as_wait(80)
    assert (
        time_accounting.totals["push"],
        time_accounting.totals["pull"],
        time_accounting.totals["wait"],
    ) == (
        10,
        10,
        80,
    )
    assert time_accounting.collective_ns == 20
