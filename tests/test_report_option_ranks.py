"""Options' places among the runs of a folder, worked out by hand."""

from pathlib import Path

from ashl.cli.app import main
from ashl.report.leaderboard import option_ranks, rank
from ashl.report.records import read
from tests.run_folders import write_sweep

GROUPS = ("sync", "cluster", "model")


def of(folder: Path, *points: tuple[dict[str, str], float | None]) -> dict[tuple[str, str], str]:
    sweep = write_sweep(folder / "tried", [(axes | {"seed": "0"}, reach) for axes, reach in points])
    return option_ranks(rank(read([sweep])), GROUPS)


def test_an_option_has_the_place_of_the_best_setting_with_it(tmp_path) -> None:
    lr = "optimizer.lr"
    found = of(
        tmp_path,
        ({"sync": "bsp", lr: "0.1"}, 3.0),
        ({"sync": "bsp", lr: "0.2"}, 1.0),
        ({"sync": "ssp", lr: "0.1"}, 2.0),
        ({"sync": "asp", lr: "0.1"}, None),
    )
    assert found == {
        ("sync", "bsp"): "1 of 4",
        ("sync", "ssp"): "2 of 4",
        ("sync", "asp"): "not reached, of 4",
    }


def test_in_several_environments_it_has_its_best_and_its_worst_place(tmp_path) -> None:
    slow = "cluster.exchange_s"
    found = of(
        tmp_path,
        ({"sync": "bsp", slow: "1"}, 1.0),
        ({"sync": "ssp", slow: "1"}, 2.0),
        ({"sync": "bsp", slow: "4"}, 4.0),
        ({"sync": "ssp", slow: "4"}, 2.0),
        ({"sync": "asp", slow: "4"}, None),
    )
    assert found == {
        ("sync", "bsp"): "1 to 2 of 2 to 3",
        ("sync", "ssp"): "1 to 2 of 2 to 3",
        ("sync", "asp"): "not reached, of 3",
    }


def test_the_page_of_options_has_a_column_for_each_folder(tmp_path, capsys) -> None:
    of(tmp_path, ({"sync": "bsp"}, 2.0), ({"sync": "ssp"}, 1.0))
    assert main(["list", "--markdown", "sync", "--places", str(tmp_path / "tried")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| place in tried |" in lines[2]
    assert [line.split("`")[1] for line in lines if "| 1 of 2 |" in line] == ["ssp"]
    assert main(["list", "sync", "--places", str(tmp_path / "tried")]) == 2
    assert "--markdown" in capsys.readouterr().err
    assert main(["list", "--markdown", "--places", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
