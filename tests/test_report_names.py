"""Names of settings: varied values without those that have no effect; common values once."""

import json
from pathlib import Path

import yaml

from ashl.report.leaderboard import Leaderboard, rank
from ashl.report.records import read_study
from ashl.report.settings import settings_of
from tests.run_folders import write_run, write_sweep


def ranked(*folders: Path, **options) -> Leaderboard:
    return rank(read_study(folders), **options)


def test_the_axes_of_loose_runs_are_what_differs(tmp_path) -> None:
    for index, (sync, lr) in enumerate([("bsp", 0.1), ("bsp", 0.2), ("ssp", 0.1), ("ssp", 0.2)]):
        values = {
            "optimizer.lr": lr,
            "sync.staleness": 3 if sync == "ssp" else None,
            "eval.every_s": index,
        }
        for seed in (0, 1):
            write_run(
                tmp_path / f"{index}-{seed}", seed=seed, choices={"sync": sync}, values=values
            )
    axes, settings = settings_of(read_study(sorted(tmp_path.iterdir())))
    assert axes == (
        "sync",
        "optimizer.lr",
    )  # not sync.staleness, which comes with the mode, nor the evaluations
    assert [setting.label for setting in settings] == [
        "bsp lr=0.1",
        "bsp lr=0.2",
        "ssp lr=0.1",
        "ssp lr=0.2",
    ]
    assert [[run.seed for run in setting.runs] for setting in settings] == [[0, 1]] * 4


def test_another_cluster_is_named_beside_another_sync_mode(tmp_path) -> None:
    for sync, cluster in (("bsp", "mixed"), ("asp", "one_slow")):
        write_run(tmp_path / sync, choices={"sync": sync, "cluster": cluster})
    _, settings = settings_of(read_study(sorted(tmp_path.iterdir())))
    assert [setting.label for setting in settings] == ["asp one_slow", "bsp mixed"]


def test_what_all_runs_of_an_option_share_is_no_part_of_their_name(tmp_path) -> None:
    chosen = [("topk", None), ("topk", 0.9), ("qsgd", None)]
    for index, (codec, momentum) in enumerate(chosen):
        values = {"compression.momentum": momentum, "compression.masking": codec == "topk"}
        write_run(tmp_path / f"{index}", choices={"compression": codec}, values=values)
    _, settings = settings_of(read_study(sorted(tmp_path.iterdir())))
    assert [setting.label for setting in settings] == [
        "topk momentum=null",
        "topk momentum=0.9",
        "qsgd",
    ]


def test_what_has_no_say_is_in_no_name(tmp_path) -> None:
    """A sync mode that never ran, the schedule of a run that has one sync mode, and a compression
    that is off.
    """
    for name, choices in {
        "a": {"sync": "bsp", "schedule": "single", "compression": "none"},
        "b": {"sync": "bsp", "schedule": "single", "compression": "topk"},
        "c": {"schedule": "ashl", "compression": "topk"},
        "d": {"schedule": "ashl_plus", "compression": "topk"},
    }.items():
        folder = write_run(tmp_path / name, choices=choices)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["choices"] = choices  # as `compose` has them
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    labels = {row.label for row in ranked(*(tmp_path / name for name in "abcd")).rows}
    assert labels == {"bsp", "bsp topk", "ashl topk", "ashl_plus topk"}


def test_a_line_of_a_sweep_names_itself(tmp_path) -> None:
    """Its label stands for all that the line says; what varies in it comes behind, and seeds stay
    seeds.
    """
    axes = [("bsp", "0.1"), ("local_sgd", "0.1"), ("local_sgd", "0.2"), ("asp", "0.3")]
    grid = [
        ({"sync": s, "optimizer.lr": lr, "seed": f"{seed}"}, 1.0)
        for s, lr in axes
        for seed in (0, 1)
    ]
    folder = write_sweep(tmp_path / "study", grid)
    content = json.loads((folder / "sweep.json").read_text())
    names = {"local_sgd": "Local SGD", "asp": "ASP, fast"}
    content["settings"] = [
        s | {"label": names.get(s["axes"]["sync"], "")} for s in content["settings"]
    ]
    (folder / "sweep.json").write_text(json.dumps(content))
    board = ranked(folder)
    assert {row.label for row in board.rows} == {
        "bsp lr=0.1",
        "Local SGD lr=0.1",
        "Local SGD lr=0.2",
        "ASP, fast",
    }
    assert all(len(row.values) == 2 for row in board.rows)
    assert ranked(folder, baseline="ASP, fast").baseline.label == "ASP, fast"


def test_what_all_share_is_told_once(tmp_path) -> None:
    choices = {"model": "mlp", "dataset": "digits", "cluster": "one_slow"}
    typed = ["sync=bsp,asp", "runtime=sim", "optimizer.lr=0.1", "eval.every_s=1"]
    grid = [({"sync": sync}, 1.0) for sync in ("bsp", "asp")]
    folder = write_sweep(tmp_path / "study", grid, overrides=typed)
    for run in folder.glob("0*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["choices"] |= choices
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert (
        ranked(folder).common == "mlp on digits, cluster one_slow, virtual time, optimizer.lr=0.1"
    )


def test_a_key_that_a_mode_lacks_is_no_part_of_its_name(tmp_path) -> None:
    write_sweep(
        tmp_path / "s",
        [({"sync": "bsp", "seed": "0"}, 1.0), ({"sync": "ssp", "sync.staleness": "3"}, 2.0)],
    )
    assert [row.label for row in ranked(tmp_path / "s").rows] == ["bsp", "ssp staleness=3"]


def test_the_same_run_twice_is_two_seeds_of_one_setting(tmp_path) -> None:
    board = ranked(write_run(tmp_path / "a", reach_s=1.0), write_run(tmp_path / "b", reach_s=3.0))
    assert [(row.label, row.spread.middle, row.spread.count) for row in board.rows] == [
        ("a run", 2.0, 2)
    ]
