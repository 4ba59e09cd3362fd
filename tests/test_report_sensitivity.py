"""The map of winners: cells and margins computed by hand."""

import math
from pathlib import Path

import pytest

from ashl.report.answer import answer_of
from ashl.report.leaderboard import rank
from ashl.report.records import read_study
from ashl.report.sensitivity import WinnersByCluster, as_number, find_winners, winners_text
from tests.run_folders import write_sweep

EXCHANGE, COMPUTE = "cluster.exchange_s", "cluster.compute"


def winners_of(
    folder: Path, times: dict[tuple[str, ...], float | None], *keys: str
) -> WinnersByCluster:
    """Return runs from (sync, value of each key) -> time to target; one seed each."""
    runs = [
        (dict(zip(("sync", *keys), point, strict=True)) | {"seed": "0"}, reach)
        for point, reach in times.items()
    ]
    found = find_winners(rank(read_study([write_sweep(folder / "sweep", runs)])))
    assert found is not None
    return found


def along(values: dict[str, tuple[float, float]]) -> dict[tuple[str, ...], float | None]:
    """Return the times of two modes at the values of one key."""
    return {
        (sync, at): pair[i] for at, pair in values.items() for i, sync in enumerate(("bsp", "ssp"))
    }


def test_the_base_is_what_was_written_first(tmp_path) -> None:
    winners = winners_of(
        tmp_path, along({"4": (4.0, 2.0), "1": (1.0, 2.0), "16": (16.0, 2.0)}), EXCHANGE
    )
    assert winners.base == (4,)


def test_a_setting_that_never_reaches_the_target_loses(tmp_path) -> None:
    times = {("bsp", "1"): 1.0, ("ssp", "1"): 2.0, ("bsp", "4"): None, ("ssp", "4"): 2.0}
    winners = winners_of(tmp_path, times, EXCHANGE)
    assert [winners.winner(point) for point in winners.costs] == ["bsp", "ssp"]
    assert winners_text(winners) == (
        "Of 2 clusters, bsp wins 1, ssp wins 1, by time to 90.0 % accuracy; in 2 of them the first"
        " is not separated from all others.",
        "At cluster.exchange_s = 1 (written first) bsp wins, 2.00 times as fast as ssp (not"
        " separated).",
    )


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
    board = rank(read_study([write_sweep(tmp_path / "s", runs)]))
    assert [(row.label, row.environment, row.is_baseline) for row in board.rows[2:4]] == [
        ("asp", "compute=[1,2]", False),
        ("bsp", "compute=[1,2]", True),
    ]
    assert board.rows[2].against.middle == pytest.approx(math.sqrt(2 / 1.1 * 2.01 / 1.11))  # type: ignore[union-attr]
    assert answer_of(board).headline.startswith(
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
    board = rank(read_study([write_sweep(tmp_path / "s", runs)]))
    assert find_winners(board) is None
    said = answer_of(board)
    assert said.headline == "Over 2 environments, first is ssp or bsp."
    assert [sentence.split(":")[0] for sentence in said.sentences] == ["mixed", "one_slow"]
