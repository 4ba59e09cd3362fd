"""Settings that a race drops, computed by hand."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from ashl.study.grid import grid_lines, make_grid
from ashl.study.race import (
    CurveReader,
    LearningCurve,
    Race,
    RunState,
    comparison_times,
    rank_of,
    settings_to_drop,
)
from ashl.study.sweep import protected_setting

END_S = 16.0


def course(
    *losses: float, now_s: float = END_S, reached_s: float | None = None, ended: bool = True
) -> LearningCurve:
    """A run that was evaluated at equal distances."""
    return LearningCurve(
        [now_s * (k + 1) / len(losses) for k in range(len(losses))], losses, reached_s, ended
    )


def team(*runs: LearningCurve) -> dict[int, LearningCurve]:
    return dict(enumerate(runs))


def dropped(
    field: dict[str, dict[int, LearningCurve]], seeds: int = 2, stays: Sequence[str] = ()
) -> dict[str, str]:
    return {
        name: reason for name, (_, reason) in settings_to_drop(field, END_S, seeds, stays).items()
    }


def test_moments_lead_up_to_the_longest_run() -> None:
    found = comparison_times(64.0)
    assert (found[0], found[-3], found[-1]) == (4.0, 32.0, 64.0)
    assert all(later == pytest.approx(2**0.5 * earlier) for earlier, later in pairwise(found))


def test_how_a_run_stands() -> None:
    going = course(4.0, 3.0, now_s=8.0, ended=False)
    assert going.state_at_time(5.0) == RunState(4.0, None)
    assert going.state_at_time(9.0) is None, "it has not come so far"
    assert going.state_at_time(3.0) is None, "nobody has looked yet"
    done = course(4.0, 3.0, now_s=8.0, reached_s=8.0)
    assert done.state_at_time(20.0) == RunState(3.0, 8.0)
    assert done.state_at_time(7.0) == RunState(4.0, None)


def test_twice_as_slow_is_dropped_and_a_close_one_is_not() -> None:
    best = course(2.0, 1.5, 1.2, 1.0)
    close = course(2.1, 1.7, 1.4, 1.2)
    slow = course(3.0, 2.9, 2.8, 2.7, now_s=8.0, ended=False)
    found = dropped({"best": team(best), "close": team(close), "slow": team(slow)})
    assert found.keys() == {"slow"}
    assert "than the best had in half the time" in found["slow"]


def test_with_one_seed_the_order_decides() -> None:
    field = {
        name: team(course(3.0, value))
        for name, value in (("a", 1.0), ("b", 1.1), ("c", 1.2), ("d", 1.3))
    }
    assert dropped(field, seeds=1).keys() == {"c", "d"}, "the better half stays"
    assert not dropped(field, seeds=2), "of several seeds one alone does not decide so little"


def test_what_diverged_is_dropped_and_the_baseline_never() -> None:
    failed = LearningCurve([1.0], [9.0], None, True, failed=True)
    field = {"a": team(course(1.0, 1.0)), "b": team(failed), "c": team(failed)}
    assert dropped(field, stays=["c"]) == {"b": "diverged or failed"}


def test_who_reached_the_target_late_stays_and_who_never_did_goes() -> None:
    reached = team(
        course(1.0, 0.1, now_s=3.0, reached_s=3.0), course(1.0, 0.1, now_s=4.0, reached_s=4.0)
    )
    slower = team(course(1.0, 0.2, now_s=7.0, reached_s=7.0))

    def never(now_s: float) -> dict[int, LearningCurve]:
        going = course(1.0, 0.05, now_s=now_s, ended=False)
        return team(course(1.0, 0.05, now_s=5.0, reached_s=5.0), going)

    field = {"fast": reached, "slower": slower, "never": never(5.9)}
    assert not dropped(field), "1.5 times the slowest seed's time has not come yet"
    found = dropped(field | {"never": never(6.1)})
    assert found == {"never": "had not reached the target by 6.1 s; the best reached it within 4 s"}
    alone = team(course(1.0, 0.05, now_s=5.0, ended=False))
    assert not dropped({"fast": reached, "other": alone}), (
        "one seed of two: not before twice the time"
    )
    assert dropped({"fast": reached, "other": alone}, seeds=1).keys() == {"other"}


def test_whoever_is_first_at_the_target_is_not_dropped_for_its_loss_on_the_way() -> None:
    """A setting with one seed, or with another one in progress: its loss falls late, and then fast."""
    early = team(course(1.0, 0.5, 0.4, 0.3, now_s=9.0, reached_s=9.0))
    sudden = course(3.0, 3.0, 3.0, 0.3, now_s=8.0, reached_s=8.0)
    going = course(3.0, now_s=4.0, ended=False)
    others = {"early": early, "third": early}
    assert not dropped({**others, "sudden": team(sudden)}, seeds=3)
    assert not dropped({**others, "sudden": team(sudden, going)}, seeds=3)
    late = course(3.0, 3.0, 3.0, 0.3, now_s=14.5, reached_s=14.5)
    assert dropped({**others, "late": team(late)}, seeds=3).keys() == {"late"}, (
        "it was there after 1.5 times 9 s"
    )


def test_seeds_of_one_setting_do_not_race_each_other(tmp_path: Path) -> None:
    grid = make_grid(grid_lines(["runtime=sim", "seed=0,1,2"], None))
    race = Race(grid.settings, tmp_path, {"dropped": []}, protected_setting(grid, None), print)
    assert [len(team) for team in race.by_label.values()] == [3]
    assert race.seeds == 3


def test_a_run_that_resumed_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Its metrics are cut back to the checkpoint; the reader began in the middle of a line."""
    seen = CurveReader(tmp_path, {"stop": {"target_loss": None}})
    rows = [f'{{"time_s": {k}.0, "test/loss": {9 - k}.0}}\n' for k in range(1, 5)]
    metrics = tmp_path / "metrics.jsonl"
    found = list[Sequence[float]]()
    for text in ("".join(rows[:3]), rows[0] + rows[1][:9], "".join(rows)):
        metrics.write_text(text)
        course = seen.read_curve()
        assert course is not None
        found.append([*course.times])
    assert found == [[1.0, 2.0, 3.0], [1.0], [1.0, 2.0, 3.0, 4.0]]


def test_order() -> None:
    assert rank_of([RunState(9.0, 2.0)]) < rank_of([RunState(1.0, None)])
    assert rank_of([RunState(1.0, None)]) < rank_of([RunState(2.0, None)])
