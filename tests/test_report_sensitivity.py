"""The map of winners: cells, margins and crossings computed by hand."""

import math
from pathlib import Path

import pytest

from ashl.report.answer import answer
from ashl.report.leaderboard import rank
from ashl.report.records import read
from ashl.report.sensitivity import Terrain, as_number, flip, statement, terrain
from tests.run_folders import write_sweep

EXCHANGE, JITTER, COMPUTE = "cluster.exchange_s", "cluster.jitter", "cluster.compute"


def ground_of(folder: Path, times: dict[tuple[str, ...], float | None], *keys: str) -> Terrain:
    """Return runs from (sync, value of each key) -> time to target; one seed each."""
    runs = [
        (dict(zip(("sync", *keys), point, strict=True)) | {"seed": "0"}, reach)
        for point, reach in times.items()
    ]
    found = terrain(rank(read([write_sweep(folder / "sweep", runs)])))
    assert found is not None
    return found


def along(values: dict[str, tuple[float, float]]) -> dict[tuple[str, ...], float | None]:
    """Return the times of two modes at the values of one key."""
    return {
        (sync, at): pair[i] for at, pair in values.items() for i, sync in enumerate(("bsp", "ssp"))
    }


def test_the_crossing_is_interpolated_on_logarithms(tmp_path) -> None:
    ground = ground_of(
        tmp_path, along({"1": (1.0, 2.0), "4": (4.0, 2.0), "16": (16.0, 2.0)}), EXCHANGE
    )
    assert [cell.winner for cell in ground.cells.values()] == ["bsp", "ssp", "ssp"]
    change = flip(ground, (0,))
    assert change is not None
    ((axis, (start, to)),) = change.changes.items()
    assert (axis.key, start, change.old, change.new, change.exact) == (
        EXCHANGE,
        1.0,
        "bsp",
        "ssp",
        True,
    )
    assert to == pytest.approx(
        2.0
    )  # bsp is as slow as the exchange, on straight lines of logarithms too
    assert change.distance == pytest.approx(math.log(2))


def test_the_nearest_of_several_challengers_counts(tmp_path) -> None:
    times = {
        ("bsp", "1"): 1.0,
        ("bsp", "4"): 4.0,
        ("ssp", "1"): 2.0,
        ("ssp", "4"): 2.0,
        ("asp", "1"): 1.9,
        ("asp", "4"): 2.1,
    }
    ground = ground_of(tmp_path, times, EXCHANGE)
    change = flip(ground, (0,))
    assert change is not None
    assert ground.cells[(1,)].winner == "ssp"
    assert change.new == "asp"  # which is behind ssp at 4, but passes bsp first


def test_an_axis_with_a_zero_goes_by_its_range(tmp_path) -> None:
    ground = ground_of(tmp_path, along({"0": (1.0, 2.0), "0.5": (4.0, 2.0)}), JITTER)
    change = flip(ground, (0,))
    assert change is not None
    ((_, to),) = change.changes.values()
    assert to == pytest.approx(0.25)
    assert "a factor of" not in " ".join(statement(ground))


def test_the_base_is_what_was_written_first(tmp_path) -> None:
    ground = ground_of(
        tmp_path, along({"4": (4.0, 2.0), "1": (1.0, 2.0), "16": (16.0, 2.0)}), EXCHANGE
    )
    assert ground.base == (1,)
    change = flip(ground, (1,))
    assert change is not None
    ((start, to),) = change.changes.values()
    assert (start, to) == (4.0, pytest.approx(2.0))  # downwards


def test_who_never_gets_there_loses_and_is_not_interpolated(tmp_path) -> None:
    times = {("bsp", "1"): 1.0, ("ssp", "1"): 2.0, ("bsp", "4"): None, ("ssp", "4"): 2.0}
    ground = ground_of(tmp_path, times, EXCHANGE)
    change = flip(ground, (0,))
    assert change is not None
    assert not change.exact
    text = " ".join(statement(ground))
    assert "from 1 to at the latest 4" in text
    assert "Of 2 clusters, bsp wins 1, ssp wins 1" in text


def test_a_map_whose_winner_flips_on_the_diagonal_only(tmp_path) -> None:
    times = {
        (sync, x, y): 1.0 if sync == "bsp" else 2.0
        for sync in ("bsp", "ssp")
        for x in "12"
        for y in "12"
    }
    times["ssp", "2", "2"] = 0.5
    ground = ground_of(tmp_path, times, EXCHANGE, "cluster.step_s")
    change = flip(ground, (0, 0))
    assert change is not None
    assert [to for _, to in change.changes.values()] == [2.0, 2.0]
    assert change.distance == pytest.approx(math.hypot(math.log(2), math.log(2)))
    assert (
        "cluster.exchange_s from 1 to at the latest 2, a factor of 2 and cluster.step_s"
        in " ".join(statement(ground))
    )


def test_nothing_flips_it(tmp_path) -> None:
    ground = ground_of(tmp_path, along({"1": (1.0, 2.0), "4": (1.0, 2.0)}), EXCHANGE)
    assert flip(ground, (0,)) is None
    assert statement(ground)[-1] == "No change inside this grid flips that."


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("0.5", 0.5),
        ("[1,1,4]", 4.0),
        ("[2, 3]", 1.5),
        ("mixed", None),
        ("[]", None),
        ("[0, 1]", None),
        ("null", None),
    ],
)
def test_numbers_of_a_cluster(written: str, number: float | None) -> None:
    assert as_number(written) == number


def test_the_answer_of_such_a_study_is_the_map(tmp_path) -> None:
    runs = [
        (
            {"sync": sync, COMPUTE: compute, "seed": str(seed)},
            1.0 + slow * (ratio - 1) + 0.01 * seed,
        )
        for sync, slow in (("bsp", 1.0), ("asp", 0.1))
        for compute, ratio in (("[1,1]", 1), ("[1,2]", 2), ("[1,8]", 8))
        for seed in (0, 1)
    ]
    board = rank(read([write_sweep(tmp_path / "s", runs)]))
    assert [(row.label, row.environment, row.is_baseline) for row in board.rows[2:4]] == [
        ("asp", "compute=[1,2]", False),
        ("bsp", "compute=[1,2]", True),
    ]
    assert board.rows[2].against.middle == pytest.approx(math.sqrt(2 / 1.1 * 2.01 / 1.11))  # type: ignore[union-attr]
    assert answer(board).headline.startswith(
        "Of 3 clusters, asp wins 2, bsp wins 1, by time to 90.0 % accuracy"
    )


def test_other_environments_are_answered_one_by_one(tmp_path) -> None:
    runs = [
        ({"cluster": cluster, "sync": sync, "seed": "0"}, reach)
        for cluster, sync, reach in (
            ("mixed", "bsp", 2.0),
            ("mixed", "ssp", 1.0),
            ("one_slow", "bsp", 1.0),
            ("one_slow", "ssp", 3.0),
        )
    ]
    board = rank(read([write_sweep(tmp_path / "s", runs)]))
    assert terrain(board) is None
    said = answer(board)
    assert said.headline == "Over 2 environments, first is ssp or bsp."
    assert [sentence.split(":")[0] for sentence in said.sentences] == ["mixed", "one_slow"]
