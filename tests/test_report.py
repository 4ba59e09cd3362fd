"""Comparisons of runs: settings, ranks, intervals, words; the expected numbers are computed by
hand.
"""

import json
import math
from io import StringIO
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from ashl.errors import UsageError
from ashl.report import tables
from ashl.report.answer import answer_of, without_ratio_text
from ashl.report.compare import write_report
from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.records import read_study
from ashl.report.statistics import adjust_p_values, effect, logrank_p_value, seeds_needed, spread
from ashl.report.tables import print_leaderboard
from tests.run_folders import lines, write_run, write_sweep

KEYS = [(seed, 0) for seed in range(10)]


def by_seed(*values: float) -> dict[tuple[int, int], float]:
    return dict(zip(KEYS, values, strict=False))


def sweep(folder: Path, **times: tuple[float | None, ...]) -> Path:
    """One setting of each sync mode, with its time to target by seed."""
    runs = [
        ({"sync": sync, "seed": str(s)}, reach)
        for sync, seeds in times.items()
        for s, reach in enumerate(seeds)
    ]
    return write_sweep(folder / "sweep", runs)


def ranked(*folders: Path, **options) -> Leaderboard:
    return rank(read_study(folders), **options)


# --- statistics
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [
        (1, 0, 0, 0.0),
        (2, 0, 1, 0.5),
        (3, 0, 2, 0.75),
        (5, 0, 4, 0.9375),
        (6, 0, 5, 0.96875),
        (9, 1, 7, 0.9609375),
    ],
)
def test_the_interval_of_a_median_says_what_it_covers(
    count: int, low: int, high: int, coverage: float
) -> None:
    values = [float(value) for value in reversed(range(count))]
    found = spread(values)
    assert (found.low, found.high, found.middle) == (low, high, (count - 1) / 2)
    assert found.coverage == pytest.approx(coverage)
    if coverage > 0.95:
        known = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
        assert (found.low, found.high) == tuple(known)


# Weeks of remission of 21 patients with a drug and 21 without (Freireich et al., Blood, 1963), the
# textbooks' example of censored times. Known: medians 23 and 8; log-rank p = 4.2e-5.
DRUG = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
PLACEBO = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


def observed(weeks: str) -> tuple[list[float], list[float]]:
    """Return times, infinite if censored, and the ends of observation."""
    ends = [float(time.rstrip("+")) for time in weeks.split()]
    return [math.inf if "+" in time else float(time) for time in weeks.split()], ends


def test_a_censored_median_is_kaplan_and_meiers() -> None:
    drug = spread(*observed(DRUG))
    assert (drug.middle, drug.low, drug.high) == (23, 13, math.inf)
    assert spread(*observed(PLACEBO)).middle == 8
    assert logrank_p_value(*observed(DRUG), *observed(PLACEBO)) == pytest.approx(4.2e-5, rel=0.02)
    assert spread([3.0, math.inf, 2.0], [9.0, 9.0, 9.0]).middle == 3.0
    assert spread([5.0, math.inf], [9.0, 4.5]).middle == 5.0, "the second run ended before"
    late = spread([math.inf, math.inf, 2.0], [5.0, 7.0, 9.0])
    assert (late.middle, late.bound) == (math.inf, 7.0)
    diverged = spread([math.inf, math.inf, 2.0], [math.inf, 7.0, 9.0])
    assert (diverged.middle, diverged.bound) == (math.inf, math.inf)


def test_the_logrank_test_of_few_runs_is_exact() -> None:
    """Three against three can be divided in 20 ways, of which two are as far apart as possible."""
    never = [math.inf] * 3
    assert logrank_p_value([1.0, 2.0, 3.0], never, never, [9.0] * 3) == pytest.approx(2 / 20)
    assert logrank_p_value(never, [9.0] * 3, never, [9.0] * 3) == 1.0
    late, many = [2.0, 3.0, 4.0], [2.0 + k for k in range(30)]
    assert logrank_p_value(late, late, never, [1.0] * 3) == 1.0  # stopped before any of them
    assert logrank_p_value(many, many, [math.inf] * 30, [1.0] * 30) == 1.0
    assert logrank_p_value(never, never, [1.0, 2.0, 3.0], never) == pytest.approx(2 / 20)


def test_a_paired_effect_is_students() -> None:
    ours, theirs = by_seed(1.0, 1.0, 2.0), by_seed(2.0, 1.0, 8.0)
    found = effect(ours, theirs, ratio=True, lower_is_better=True)
    assert found is not None
    assert (found.pairs, found.wins, found.losses) == (3, 2, 0)
    assert found.middle == pytest.approx(2.0)  # the geometric mean of 2, 1 and 4
    logs = ([math.log(value) for value in values.values()] for values in (theirs, ours))
    known = stats.ttest_rel(*logs)
    assert found.p_value == pytest.approx(known.pvalue)
    ends = map(math.exp, known.confidence_interval(0.95))
    assert (found.low, found.high) == pytest.approx(tuple(ends))
    assert found.probability == pytest.approx(1 - known.pvalue / 2)
    assert not found.is_better_with_confidence
    assert seeds_needed(found) == 7  # t(6) = 2.447: 2.447 / sqrt(7) < 1; t(5) = 2.571 is too large
    assert seeds_needed(found, tests=6) == 11


def test_without_every_number_there_is_no_interval_but_a_logrank_test() -> None:
    ours, theirs = by_seed(*[1.0] * 6), by_seed(*[2.0] * 5, math.inf)
    found = effect(ours, theirs, ratio=True, lower_is_better=True)
    assert found is not None
    assert (found.wins, found.low, found.p_value) == (6, None, pytest.approx(2 / math.comb(12, 6)))
    assert found.is_better_with_confidence
    both = effect(by_seed(math.inf), by_seed(math.inf), ratio=True, lower_is_better=True)
    assert both is not None
    assert (both.wins, both.losses, both.middle, both.p_value) == (0, 0, None, 1.0)


def test_seeds_are_paired_with_themselves() -> None:
    found = effect(
        {(0, 0): 1.0, (7, 0): 1.0}, {(7, 0): 3.0, (1, 0): 9.0}, ratio=True, lower_is_better=True
    )
    assert found is not None
    assert (found.pairs, found.middle) == (1, pytest.approx(3.0))
    assert effect({(0, 0): 1.0}, {(1, 0): 1.0}, ratio=True, lower_is_better=True) is None


def test_holms_correction_by_hand() -> None:
    assert adjust_p_values([0.04, 0.01, 0.03], 3) == pytest.approx([0.06, 0.03, 0.06])
    assert adjust_p_values([0.01, 0.02], 6) == pytest.approx([0.06, 0.10])
    assert adjust_p_values([], 0) == []


def test_picking_the_best_of_equals_rarely_excludes_one() -> None:
    """A paired t test of the best of equal settings against the others excludes one in more than 5 %
    of the studies; corrected for the choice, it does so in at most 5 %.
    """
    draw = np.random.default_rng(0)
    studies, settings = 400, 6
    raw = corrected = 0
    for times in draw.normal(size=(studies, settings, 5)):
        best, *others = sorted(times, key=np.median)
        chances = stats.ttest_rel([best] * len(others), others, axis=1)
        better = np.where(chances.statistic < 0, chances.pvalue, 1.0)
        raw += min(better) < 0.05
        corrected += min(adjust_p_values(list(better), math.comb(settings, 2))) < 0.05
    assert raw > 0.15 * studies
    assert corrected < 0.05 * studies


# --- ranks
# --------------------------------------------------------------------------------------------------


def test_a_leaderboard_by_hand(tmp_path) -> None:
    board = ranked(sweep(tmp_path, bsp=(4.0, 4.0, 8.0), ssp=(2.0, 4.0, 2.0), asp=(9.0, None, None)))
    assert [row.label for row in board.rows] == ["ssp", "bsp", "asp"]
    assert board.baseline is board.rows[1]
    ssp, _, asp = board.rows
    assert (ssp.spread.low, ssp.spread.middle, ssp.spread.high) == (2.0, 2.0, 4.0)
    assert ssp.against is not None
    assert ssp.against.middle == pytest.approx(2.0)  # the geometric mean of 2, 1 and 4
    assert (asp.num_reached, asp.spread.middle) == (1, 9.0)  # two were observed for 2 s only
    means = (ssp.means[key] for key in ("bytes_up", "bytes_down", "wait_share"))
    assert tuple(means) == (4e6, 2e6, 0.25)


def test_the_baseline_is_the_best_bsp(tmp_path) -> None:
    times = {("bsp", "0.02"): 9.0, ("bsp", "0.1"): 4.0, ("asp", "0.1"): 2.0}
    runs = [
        ({"sync": sync, "optimizer.lr": rate, "seed": str(seed)}, reach)
        for (sync, rate), reach in times.items()
        for seed in range(3)
    ]
    board = ranked(write_sweep(tmp_path / "sweep", runs))
    assert board.baseline is not None
    assert board.baseline.setting.axes == {"sync": "bsp", "optimizer.lr": "0.1"}


def test_the_answer_in_words(tmp_path) -> None:
    said = answer_of(ranked(sweep(tmp_path, bsp=(4.0, 4.0, 8.0), ssp=(2.0, 4.0, 2.0))))
    assert (
        said.headline
        == "ssp leads: time to 90.0 % accuracy 2 s (median of 3 seeds, range 2 s to 4 s), 2.00"
        " times as fast as the baseline bsp (paired mean 2.00, 95 % interval 0.36 to 11.19, "
        "better in 2 of 3 paired seeds)."
    )
    assert "Indistinguishable from the best: bsp." in said.sentences
    chance = "the difference may be chance (paired t test, p = 0.23)."
    assert f"The first two are not separated: {chance}" in said.sentences
    assert any("about 7 common seeds (now 3)" in sentence for sentence in said.sentences)


def test_the_answer_names_the_corrected_p_value_and_equal_pairs(tmp_path) -> None:
    times = {"bsp": (4.0, 5.0, 6.0), "ssp": (3.4, 4.0, 5.4), "asp": (8.0, 10.0, 12.0)}
    said = answer_of(ranked(sweep(tmp_path, **times)))
    assert "p = 0.041, after Holm's correction 0.081)" in " ".join(said.sentences)
    equal = answer_of(ranked(sweep(tmp_path / "equal", bsp=(4.0, 6.0), ssp=(2.0, 3.0))))
    assert "the baseline bsp (2.00 in each of 2 paired seeds)." in equal.headline


def test_a_clear_winner_is_called_one(tmp_path) -> None:
    said = answer_of(ranked(sweep(tmp_path, bsp=(4.0, 4.1, 4.2), ssp=(2.0, 2.1, 2.0))))
    assert said.headline.startswith("ssp is first: ")
    assert "The second is worse with 95 % confidence." in said.sentences


def test_the_best_of_many_is_corrected_for_its_choice(tmp_path) -> None:
    """The second of two settings is worse; the second of six may be as good as the best."""
    times = {"bsp": (4.0, 4.4, 4.2), "ssp": (2.0, 3.0, 2.6)}
    alone = ranked(sweep(tmp_path / "two", **times))
    assert alone.effect_over_second is not None
    assert (alone.effect_over_second.is_better_with_confidence, alone.indistinguishable_rows) == (
        True,
        (),
    )
    slow = {f"slow{index}": (40.0, 41.0, 42.0) for index in range(4)}
    board = ranked(sweep(tmp_path / "six", **times, **slow))
    assert [row.label for row in board.indistinguishable_rows] == ["bsp"]
    said = answer_of(board)
    assert said.headline.startswith("ssp leads: ")
    correction = "(Holm's correction for picking the best of 6)"
    assert f"Indistinguishable from the best {correction}: bsp." in said.sentences


def test_a_difference_below_one_evaluation_is_none(tmp_path) -> None:
    said = answer_of(
        ranked(sweep(tmp_path, bsp=(2.0, 2.0, 2.0), ssp=(1.95, 1.95, 1.95)))
    )  # evaluated every 0.1 s
    assert any(
        "less than the time between two evaluations of the second, 0.1 s" in sentence
        for sentence in said.sentences
    )
    assert any("eval.every_s" in sentence for sentence in said.sentences)


@pytest.mark.parametrize(("seldom", "doubtful"), [("bsp", True), ("ssp", False)])
def test_the_interval_of_the_slower_setting_counts(tmp_path, seldom: str, doubtful: bool) -> None:
    """A setting that was evaluated at 1.35 s and 1.8 s may have reached it before 1.55 s."""
    folders = [
        write_run(
            tmp_path / f"{sync}-{seed}",
            seed=seed,
            reach_s=reach_s,
            every_s=0.45 if sync == seldom else 0.05,
            choices={"sync": sync},
        )
        for sync, reach_s in (("bsp", 1.8), ("ssp", 1.55))
        for seed in range(3)
    ]
    board = ranked(*folders)
    assert [row.label for row in board.indistinguishable_rows] == ["bsp"] * doubtful


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ({"bsp": (4.0,), "ssp": (2.0,)}, "one seed"),
        ({"bsp": (4.0, 4.0, None), "ssp": (2.0, 2.0, None)}, "log-rank test"),
        ({"bsp": (None, None), "ssp": (None, 1.0)}, "lower target"),
        ({"bsp": (1.0, 1.0)}, "Name further runs"),
        (
            {"bsp": (None, None), "ssp": (1.0, 2.0)},
            "the baseline bsp reached the target in none of its seeds",
        ),
        (
            {"ssp": (1.0, 2.0), "bsp": (None, None)},
            "it reached the target in none of its seeds (better in 2 of 2",
        ),
    ],
)
def test_what_is_not_known_is_said(tmp_path, times: dict, says: str) -> None:
    said = answer_of(ranked(sweep(tmp_path, **times)))
    assert says in " ".join([said.headline, *said.sentences])


def test_baselines(tmp_path) -> None:
    folder = sweep(tmp_path, ssp=(2.0,), bsp=(4.0,), local_sgd=(5.0,))
    assert ranked(folder, baseline="local_sgd").baseline.label == "local_sgd"  # type: ignore[union-attr]
    assert ranked(folder, baseline="sync=ssp").baseline.label == "ssp"  # type: ignore[union-attr]
    with pytest.raises(
        UsageError, match='--baseline "asp" is no setting; name one of: ssp; bsp; local_sgd'
    ):
        ranked(folder, baseline="asp")
    slowest = ranked(sweep(tmp_path / "other", ssp=(2.0,), asp=(7.0,), local_sgd=(None,)))
    assert slowest.baseline.label == "asp"  # type: ignore[union-attr]


def test_the_usual_baseline_is_bsp_without_compression(tmp_path) -> None:
    settings = [("ssp", "none"), ("bsp", "topk"), ("bsp", "none"), ("asp", "none")]
    runs = [({"sync": sync, "compression": codec}, 4.0) for sync, codec in settings]
    for those, label in ((runs, "bsp"), (runs[:2], "bsp topk")):
        board = ranked(write_sweep(tmp_path / label, those))
        assert board.baseline is not None
        assert board.baseline.label == label


def test_another_target_is_found_in_the_evaluations(tmp_path) -> None:
    folders = [
        write_run(tmp_path / name, reach_s=reach_s, choices={"sync": name})
        for name, reach_s in (("bsp", 2.0), ("ssp", 1.0))
    ]
    board = ranked(*folders, target=0.5)
    assert [row.spread.middle for row in board.rows] == pytest.approx(
        [0.4, 0.7]
    )  # 1 - 0.1^(t/reach) first >= 0.5
    higher = ranked(*folders, target=0.95)
    assert [row.num_reached for row in higher.rows] == [0, 0]
    assert "2 of 2 runs ended at their own target (90.0 % accuracy" in higher.notes[0]


def test_mixed_targets_are_refused_by_name(tmp_path) -> None:
    folders = [write_run(tmp_path / "low", target=0.8), write_run(tmp_path / "high", target=0.9)]
    with pytest.raises(
        UsageError, match=r"80.0 % accuracy \(low\), 90.0 % accuracy \(high\).*--target 0.9"
    ):
        ranked(*folders)
    assert len(ranked(*folders, target=0.7).rows) == 2


def test_without_a_target_it_is_the_best_that_all_reach(tmp_path) -> None:
    """One that stays far below the others does not decide what all reach, and neither does one that
    diverged.
    """
    ends = {
        "bsp": (4.0, 4.0),
        "ssp": (2.0, 3.0),
        "asp": (1.5, 2.5),
        "adsp": (90.0, 3.0),
        "swarm": (90.0, 3.0),
    }
    grid = [({"sync": sync}, reach_s) for sync, (reach_s, _) in ends.items()]
    folder = write_sweep(tmp_path / "sweep", grid, {"target": None})
    for number, (name, (reach_s, end_s)) in enumerate(ends.items()):
        rmtree(folder / f"{number:08x}")
        status = {"status": "diverged"} if name == "swarm" else {}
        known = {"target": None, "reach_s": reach_s, "end_s": end_s, "choices": {"sync": name}}
        write_run(folder / f"{number:08x}", **known, **status)
    board = ranked(folder)
    assert board.measure.title == "time to 90.0 % accuracy", "bsp ends there; ssp and asp go on"
    assert [row.label for row in board.rows][:3] == ["asp", "ssp", "bsp"]
    assert [row.spread.middle for row in board.rows] == pytest.approx(
        [1.5, 2.0, 4.0, math.inf, math.inf]
    )
    note = f"all but 2 of the settings reach; give one by --target, as in ashl compare {folder} --target 0.9"
    assert any(note in sentence for sentence in answer_of(board).sentences)


def test_without_accuracies_they_are_judged_at_an_equal_time(tmp_path) -> None:
    slow = write_run(
        tmp_path / "slow", reach_s=4.0, target=None, end_s=1.0, choices={"sync": "ssp"}
    )
    quick = write_run(tmp_path / "quick", reach_s=2.0, target=None, end_s=2.0)
    for folder in (slow, quick):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines(folder / "metrics.jsonl", [{**row, "test/acc": None} for row in rows])
    board = ranked(slow, quick)
    assert board.measure.title == "test loss after 1 s"
    assert [row.spread.middle for row in board.rows] == pytest.approx(
        [-math.log(1 - 0.1**f) for f in (0.5, 0.25)]
    )
    ratio = math.log(1 - 0.1**0.25) / math.log(1 - 0.1**0.5)
    assert (
        f"{ratio:.2f} times lower than the baseline ssp"
        in answer_of(ranked(slow, quick, baseline="ssp")).headline
    )


@pytest.mark.parametrize(("higher", "first"), [(False, "asp"), (True, "bsp")])
def test_without_accuracies_the_tasks_own_metric_ranks_and_is_shown(
    tmp_path, higher: bool, first: str
) -> None:
    for sync, values in {"bsp": (0.4, 0.3), "asp": (0.3, 0.2)}.items():
        summary = {"metric": "mae", "higher_is_better": higher, "best": {}}
        summary["final"] = {"train_loss": 0.3, "test_loss": 0.1, "test_metric": values[-1]}
        folder = write_run(tmp_path / sync, target=None, choices={"sync": sync}, **summary)
        rows = [
            {"time_s": t, "step": t, "train/loss": 1.0, "test/mae": mae}
            for t, mae in zip((1, 2), values, strict=True)
        ]
        lines(folder / "metrics.jsonl", rows)
    board = ranked(tmp_path / "bsp", tmp_path / "asp")
    assert (board.rows[0].label, board.measure.title) == (first, "mae after 2 s")
    assert tables.leaderboard_table(board)["mae"][0] == {"bsp": "0.3", "asp": "0.2"}[first]
    page = write_report(board, out=tmp_path / "r.html").read_text()
    assert "mae on the test set" in page
    asked = ranked(tmp_path / "bsp", tmp_path / "asp", target=0.3)
    assert asked.measure.title == "time to mae 0.3"
    assert {row.label: row.spread.middle for row in asked.rows} == {
        False: {"asp": 1.0, "bsp": 2.0},
        True: {"bsp": 1.0, "asp": 1.0},
    }[higher]


def test_rank_and_sentence_go_by_the_same_number(tmp_path) -> None:
    """The first mode is asp by medians and bsp by paired means.

    The sentence gives the ratio that ranks and names the paired mean; the table gives the paired
    mean with its own interval.
    """
    board = ranked(sweep(tmp_path, bsp=(4.0, 5.0, 5.1), asp=(4.9, 9.0, 4.8)))
    said = answer_of(board)
    assert said.headline.startswith("asp leads: time to 90.0 % accuracy 4.9 s")
    assert "1.02 times as fast as the baseline bsp (paired mean 0.78, " in said.headline
    assert [row.label for row in board.rows] == ["asp", "bsp"]
    assert tables.leaderboard_table(board)["against"][0] == "0.78x (0.35 .. 1.76)"


def test_runs_that_lost_their_pace_are_no_equals(tmp_path) -> None:
    folder = sweep(tmp_path, bsp=(4.0, 4.1), ssp=(3.0, 3.2), asp=(2.0, 2.1))
    for file in sorted(folder.glob("*/summary.json"))[-2:]:
        pace = {"slower_by": 0.31}
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"pace": pace, "time_kind": "wall"})
        )
    board = ranked(folder)
    assert [(board.rank(row), row.label) for row in board.rows] == [
        ("1", "ssp"),
        ("2", "bsp"),
        ("-", "asp"),
    ]
    said = answer_of(board)
    assert said.headline.startswith("ssp ")
    assert (
        "1 of 3 settings did not keep the declared pace (up to 31 % slower): they are not ranked."
        in said.sentences
    )


def test_timing_only_runs_are_judged_by_their_speed(tmp_path) -> None:
    folders = [
        write_run(tmp_path / n, target=None, end_s=e, choices={"sync": n})
        for n, e in (("bsp", 4.0), ("ssp", 2.0))
    ]
    for folder in folders:
        (folder / "metrics.jsonl").write_text("")
    board = ranked(*folders)
    assert (board.measure.title, board.rows[0].label, board.rows[0].spread.middle) == (
        "speed",
        "ssp",
        1600.0,
    )


def test_kinds_of_time_are_never_mixed_silently(tmp_path) -> None:
    real = write_run(tmp_path / "real", time_kind="wall", choices={"runtime": "local"})
    board = ranked(real, write_run(tmp_path / "sim", choices={"runtime": "sim"}))
    assert "1 with wall time and 1 with virtual time" in board.notes[0]
    assert board.notes[0] in answer_of(board).sentences


# --- records
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("summary.json", "{", "summary.json is broken"),
        ("summary.json", "[]", "summary.json is broken"),
        ("summary.json", '{"status": "finished", "seed": "0"}', "summary.json is broken"),
        (
            "summary.json",
            '{"status": "finished", "seed": 0, "final": [1]}',
            "summary.json is broken",
        ),
        (
            "summary.json",
            '{"status": "finished", "seed": 0, "time_s": "1"}',
            "summary.json is broken",
        ),
        (
            "summary.json",
            '{"status": "finished", "seed": 0, "workers": [{"wait_s": "1"}]}',
            "summary.json is broken",
        ),
        ("summary.json", None, "it has not ended"),
        ("config.yaml", "a: [", "config.yaml is missing or broken"),
        ("config.yaml", "text", "config.yaml is missing or broken"),
        ("config.yaml", None, "config.yaml is missing or broken"),
    ],
)
def test_a_broken_run_is_left_out_by_name(
    tmp_path, file: str, content: str | None, reason: str
) -> None:
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad", seed=1)
    (bad / file).unlink() if content is None else (bad / file).write_text(content)
    study = read_study([good, bad])
    assert [run.name for run in study.runs] == ["good"]
    assert [(Path(out.name).name, reason in out.reason) for out in study.left_out] == [
        ("bad", True)
    ]


def test_broken_evaluations_leave_a_run_out_only_where_they_are_needed(tmp_path) -> None:
    folder = sweep(tmp_path, bsp=(4.0,), ssp=(2.0,))
    (folder / "00000001" / "metrics.jsonl").write_text('{"time_s": 1}\n{"time\n')
    assert len(ranked(folder).rows) == 2
    board = ranked(folder, target=0.5)
    assert [row.label for row in board.rows] == ["bsp"]
    assert "metrics.jsonl" in board.left_out[0].reason


def test_a_sweep_of_which_not_all_is_there(tmp_path) -> None:
    folder = sweep(tmp_path, bsp=(4.0,), ssp=(2.0,), asp=(1.0,))
    study = json.loads((folder / "sweep.json").read_text())
    study["settings"][2]["label"] = "ASP"
    study["settings"].append({"hash": "gone", "axes": {"sync": "shl", "seed": "0"}})
    study["dropped"] = [{"hash": "00000002", "at_s": 0.0, "reason": "behind ssp"}]
    study["skipped"] = [
        {"overrides": ["sync=ssp", "topology=all_reduce", f"seed={seed}"], "reason": "needs it"}
        for seed in (0, 1)
    ]
    (folder / "sweep.json").write_text(json.dumps(study))
    rmtree(folder / "00000002")  # it never began
    found = read_study([folder])
    assert [out.reason for out in found.left_out] == ["has not run"]
    assert [(out.name, out.reason) for out in found.dropped] == [
        ("ASP: sync=asp seed=0 (00000002)", "before it began, because of another seed: behind ssp")
    ]
    assert [out.name for out in found.skipped] == ["sync=ssp (2 seeds)"]
    assert [row.label for row in rank(found).rows] == ["ssp", "bsp"]


def test_what_a_race_has_dropped_is_shown_with_how_far_it_came(tmp_path) -> None:
    """Its finished runs count; the others are censored when they were dropped."""
    folder = sweep(tmp_path, bsp=(4.0, 4.2), ssp=(2.0, 2.1), asp=(5.0, 9.0))
    study = json.loads((folder / "sweep.json").read_text())
    study["dropped"] = [{"hash": "00000005", "at_s": 4.5, "reason": "far behind"}]
    (folder / "sweep.json").write_text(json.dumps(study))
    file = folder / "00000005" / "summary.json"
    stopped = {
        "status": "interrupted",
        "exit_reason": "interrupted",
        "time_s": 4.5,
        "time_to_target_s": None,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | stopped))
    board = ranked(folder)
    assert [row.label for row in board.rows] == ["ssp", "bsp", "asp"]
    assert board.rows[2].num_reached == 1
    times = tables.leaderboard_table(board)["time to 90.0 % accuracy"]
    assert times[2] == "5 s", "one run was still in progress at 5 s"
    assert not board.study.ended_badly
    assert "Racing dropped 1 run, sync=asp seed=1 (00000005): after 4.5 s, far behind." in " ".join(
        answer_of(board).sentences
    )


def test_a_value_below_zero_is_told_as_a_value() -> None:
    """R² of -0.4 has no ratio to another one, and nothing reached a target by it."""
    measure: Any = SimpleNamespace(text="{:g}".format)
    row: Any = SimpleNamespace(spread=SimpleNamespace(middle=-0.4), num_reached=1, values=[-0.4])
    assert without_ratio_text(row, measure) == "has -0.4"
    row.spread.middle = math.inf
    assert without_ratio_text(row, measure) == "reached the target in 1 of its 1 seeds"


def test_a_dropped_setting_cannot_win_by_a_target_that_nobody_asked_for(tmp_path) -> None:
    """A race dropped it for its loss, and the accuracy that all others reach was at chance level."""
    runs = [
        ({"sync": name}, reach_s) for name, reach_s in (("bsp", 4.0), ("ssp", 2.0), ("asp", 1.0))
    ]
    drop = {"hash": "00000002", "at_s": 1.0, "reason": "loss higher by 0.7"}
    folder = write_sweep(tmp_path / "sweep", runs, {"target": None}, dropped=[drop])
    assert ranked(folder).rows[0].label == "asp", "it has finished, so it counts"
    file = folder / "00000002" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "interrupted"}))
    assert [row.label for row in ranked(folder).rows] == ["ssp", "bsp", "asp"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_narrow_terminal_loses_columns_and_no_names(tmp_path, width: int) -> None:
    file = StringIO()
    print_leaderboard(
        Console(file=file, width=width),
        ranked(sweep(tmp_path, bsp=(4.0, 4.5), local_sgd=(2.0, None))),
    )
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert any("1  local_sgd" in line or "2  local_sgd" in line for line in lines)
    assert any("baseline" in line and "4.25 s" in line for line in lines)
    assert ("no room for best" in file.getvalue()) == (width < 200)


def test_failed_and_diverged_runs_are_listed_and_diverged_ones_count(tmp_path) -> None:
    folder = sweep(tmp_path, bsp=(4.0, 4.0), ssp=(2.0, None))
    for name, status in (("00000003", "diverged"), ("00000001", "failed")):
        file = folder / name / "summary.json"
        summary = json.loads(file.read_text()) | {
            "status": status,
            "exit_reason": "NaN",
            "time_to_target_s": None,
        }
        file.write_text(json.dumps(summary))
    board = ranked(folder)
    assert {row.label: (row.num_reached, len(row.values)) for row in board.rows} == {
        "bsp": (1, 1),
        "ssp": (1, 2),
    }
    assert sorted(out.reason for out in board.study.ended_badly) == ["diverged: NaN", "failed: NaN"]


def test_no_run_at_all(tmp_path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        read_study([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match=r"There is no finished run to read .*is no run folder"):
        read_study([tmp_path])
    (tmp_path / "sweep.json").write_text('{"schema": 1}')
    with pytest.raises(UsageError, match="the sweep has none"):
        read_study([tmp_path])


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"settings": [1]}', '{"dropped": [{}]}', '{"settings": [{}]}']
)
def test_a_broken_sweep_is_skipped_and_the_others_continue(tmp_path, content: str) -> None:
    folder = sweep(tmp_path, bsp=(4.0,))
    (folder / "sweep.json").write_text(content)
    study = read_study([folder, write_run(tmp_path / "run")])
    assert [(Path(out.name).name, out.reason) for out in study.left_out] == [
        ("sweep", "sweep.json is broken")
    ]
    assert [run.name for run in study.runs] == ["run"]


def test_hold_counts_for_all(tmp_path) -> None:
    folders = [
        write_run(tmp_path / n, values={"stop.target_consecutive_evals": h}, choices={"sync": n})
        for n, h in (("bsp", 1), ("ssp", 2))
    ]
    with pytest.raises(UsageError, match="2 times in a row"):
        ranked(*folders)
    assert len(ranked(*folders, target=0.9).rows) == 2


def test_a_requested_target_keeps_the_number_of_evaluations(tmp_path) -> None:
    """The accuracy is 87.4 % at 0.9 s and 90 % at 1 s, where the run ends."""
    folders = [
        write_run(tmp_path / n, values={"stop.target_consecutive_evals": h}, choices={"sync": n})
        for n, h in (("bsp", 1), ("ssp", 2))
    ]
    metrics = folders[1] / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[-1] + "\n")
    assert ranked(*folders, target=0.87).measure.title == "time to 87.0 % accuracy", "the least"
    board = ranked(folders[1], target=0.87)
    assert board.measure.title == "time to 87.0 % accuracy, 2 times in a row"
    assert board.rows[0].spread.middle == pytest.approx(0.9), "the first of the two"
    board = ranked(folders[1], target=0.88)
    assert board.rows[0].num_reached == 0, "the last line repeats an evaluation"


def test_an_environment_that_has_no_name_is_elsewhere(tmp_path) -> None:
    lines = [
        ({"compression": c, "cluster.bandwidth_mbit_s": "1"}, 1.0 + i)
        for i, c in enumerate(("topk", "none"))
    ]
    write_sweep(tmp_path / "s", [*lines, ({"compression": "qsgd"}, 3.0)])
    assert [row.environment for row in ranked(tmp_path / "s").rows] == [
        "bandwidth_mbit_s=1"
    ] * 2 + ["elsewhere"]


def test_a_short_table_has_the_first_settings_of_every_environment(tmp_path) -> None:
    """The first two clusters filled the table, and the winners of the others were not shown."""
    settings = [
        ({"compression": c, "cluster.bandwidth_mbit_s": str(width)}, 1.0 + i)
        for width in (1, 10, 100)
        for i, c in enumerate(("topk", "none", "qsgd"))
    ]
    board = ranked(write_sweep(tmp_path / "s", settings))
    console = Console(width=140, record=True, file=StringIO())
    print_leaderboard(console, board, top=6)
    text = console.export_text()
    for width in (1, 10, 100):
        assert text.count(f"bandwidth_mbit_s={width} ") == 2, text
    assert "and 3 more settings" in text
