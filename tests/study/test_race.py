"""Who is dropped at a rung, by hand."""

from itertools import pairwise

import pytest

from ashl.study.race import Standing, half_time, rungs, verdicts


def losses(*values: float) -> dict[int, Standing]:
    return {seed: Standing(value, None) for seed, value in enumerate(values)}


def test_rungs_lead_up_to_the_longest_run() -> None:
    moments = rungs([None, 8.0, 64.0])
    assert (moments[0], moments[-2]) == (4.0, 32.0)
    assert all(later == pytest.approx(2**0.5 * earlier) for earlier, later in pairwise(moments))


def test_what_a_rung_is_held_against() -> None:
    now = {"a": losses(1.0)}
    assert half_time([]) == {}
    assert half_time([now, {}]) is now, "two rungs back is half the time"
    assert half_time([{}] * 4) is None, "from a quarter of the longest run on: the best at the same time"


def test_clearly_behind_is_dropped_and_a_close_one_is_not() -> None:
    standings = {"best": losses(1.0, 1.1, 0.9), "close": losses(1.02, 1.05, 0.95), "far": losses(2.0, 2.2, 2.1)}
    found = verdicts(standings, None, 1.0)
    assert found.keys() == {"far"}
    assert "loss higher by 1.1" in found["far"]


def test_early_on_only_who_needs_more_than_twice_the_time_is_dropped() -> None:
    now = {"best": losses(1.0, 1.0), "slower": losses(1.5, 1.6), "slowest": losses(2.5, 2.6)}
    before = {"best": losses(2.0, 2.0), "slower": losses(2.2, 2.2), "slowest": losses(3.0, 3.0)}
    found = verdicts(now, before, 1.0)
    assert found.keys() == {"slowest"}
    assert "than the best had in half the time" in found["slowest"]
    assert not verdicts(now, {}, 1.0), "at the first rung nobody stood anywhere before"


def test_pairing_by_seed_tells_what_spreads_would_hide() -> None:
    """Every seed is worse by 0.1, though seeds differ by far more."""
    standings = {"best": losses(1.0, 2.0, 3.0), "behind": losses(1.1, 2.1, 3.1), "third": losses(1.0, 2.5, 3.0)}
    assert verdicts(standings, None, 1.0).keys() == {"behind"}


def test_with_one_seed_the_order_decides() -> None:
    standings = {name: losses(value) for name, value in (("a", 1.0), ("b", 1.1), ("c", 1.2), ("d", 1.3))}
    found = verdicts(standings, None, 1.0)
    assert found.keys() == {"c", "d"}, "the better third stays, and the best of the rest counts as behind too"


def test_what_diverged_is_dropped() -> None:
    standings = {"a": losses(1.0, 1.0), "b": losses(float("inf"), 1.0), "c": losses(1.0, 1.01)}
    assert verdicts(standings, None, 1.0)["b"] == "diverged or failed"


def test_who_reached_the_target_late_stays_and_who_never_did_goes() -> None:
    reached = {seed: Standing(0.1, 3.0 + seed) for seed in range(2)}
    slower = {seed: Standing(0.2, 7.0) for seed in range(2)}
    never = {0: Standing(0.05, 9.0), 1: Standing(0.05, None)}
    standings = {"fast": reached, "slower": slower, "never": never}
    assert "never" not in verdicts(standings, None, 4.5), "1.2 times the slowest seed's time has not come yet"
    found = verdicts(standings, None, 8.0)
    assert found.keys() == {"never"}
    assert "had not reached the target by 8 s, which the best did within 4 s" in found["never"]
