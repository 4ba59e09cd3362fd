"""Published figures, predicted in virtual time."""

import csv
import json
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.study import backtest
from ashl.study.backtest import NEAR, PublishedTable

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "results" / "data" / "backtest.csv"
ONE = """
source: a report
about: page 3
measured: true
quantity: compute_share
unit: "%"
scale: 100
model_bytes: 4e6
assumptions: [no latency]
settings:
  - topology=all_reduce
  - sync=local_sgd
  - cluster=homogeneous
  - cluster.exchange_s=null
  - cluster.latency_s=0
  - cluster.bandwidth_mbit_s=48
  - cluster.step_s=0.1
  - sync.local_steps=5
  - stop.steps=80
points:
  - {name: whole run, published: 33}
  - {name: after the first exchange, window: [5, 14], published: 45, formula: 60}
"""


@pytest.fixture(scope="module")
def tables() -> dict[str, PublishedTable]:
    return {file.stem: backtest.read_table(file) for file in backtest.published_files([])}


def test_the_shipped_files_hold_the_figures_of_the_results_page(
    tables: dict[str, PublishedTable],
) -> None:
    declared = [
        (table.source, point.name, f"{point.published:.3g}", "yes" if number % 2 else "")
        for table in tables.values()
        for number, point in enumerate(table.points)
    ]
    with DATA.open(encoding="utf-8", newline="") as file:
        shown = [
            (row["source"], row["point"], row["published"], row["kept back"])
            for row in csv.DictReader(file)
        ]
    assert shown == declared
    assert len(declared) >= 45
    assert all(table.assumptions for table in tables.values())


def test_a_window_counts_the_exchanges_whose_rounds_end_in_it(tmp_path: Path, capsys) -> None:
    """A ring of four sends 1.5 times 4 MB at 6 MB/s, which takes 1 s; five steps take 0.5 s."""
    file = tmp_path / "one.yaml"
    file.write_text(ONE)
    assert main(["backtest", str(file), "--json", "--save", str(tmp_path / "out")]) == 0
    whole, later = json.loads(capsys.readouterr().out)
    assert whole["predicted"] == pytest.approx(100 * 0.5 / 1.5, rel=1e-3)
    assert later["predicted"] == pytest.approx(100 * 0.9 / 1.9, rel=1e-3)
    assert (whole["source"], whole["kept_back"], later["kept_back"]) == ("a report", False, True)
    assert later["formula_error"] == pytest.approx(1 / 3)
    assert (tmp_path / "out" / "backtest.csv").read_text().startswith("source,point,unit,")
    assert b"<svg" in (tmp_path / "out" / "backtest.svg").read_bytes()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [("published: 33", "points.0.published"), ("measured: true", "measured")],
)
def test_a_file_without_a_needed_field_is_refused(
    tmp_path: Path, capsys, wrong: str, named: str
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(ONE.replace(f", {wrong}", "").replace(f"{wrong}\n", ""))
    assert main(["backtest", str(file)]) == 2
    assert f"{file} is no table of published figures: it lacks {named}" in capsys.readouterr().err


def test_a_file_without_points_is_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(ONE.partition("points:")[0] + "points: []\n")
    assert main(["backtest", str(file)]) == 2
    assert f"{file}: points: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_aims_are_met_on_the_shipped_files(tables: dict[str, PublishedTable]) -> None:
    points = backtest.predict(tables.values())
    assert backtest.as_csv(points) == DATA.read_text(encoding="utf-8")
    errors, formula_errors = points["error"].abs(), points["formula_error"].abs()
    assert errors.median() <= 0.1
    assert (errors[points["kept_back"]] <= NEAR).mean() >= 0.9
    for source in points.loc[points["formula"].notna(), "source"].unique():
        own = points["source"] == source
        assert errors[own].sum() < formula_errors[own].sum()
