"""A grid as a whole: what is run, what is left out, and why."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from ashl.config.compose import alternatives
from ashl.config.override import command_line
from ashl.errors import UsageError
from ashl.study.grid import Grid, grid_lines, make_grid
from ashl.study.jobs import local_pool
from ashl.study.sweep import folder_of, forecast_of, run_missing, show_forecast
from ashl.tracking.sweep_progress import SweepProgress

SIM = ("runtime=sim", "tracking=none")


def grid(*overrides: str, strict: bool = False, config_dir: Path | None = None) -> Grid:
    lines = grid_lines([*SIM, *overrides], config_dir)
    return make_grid(lines, config_dir, strict=strict)


def chosen(found: Grid) -> list[dict[str, str]]:
    return [setting.axes for setting in found.settings]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0,1", ["0", "1"]),
        ("seed=range(0,3)", ["0", "1", "2"]),
        ("sync=choice(bsp,ssp)", ["bsp", "ssp"]),
        ("sync=glob(ads*)", ["adsp", "adsp_ashlrepo"]),
        ("cluster.compute=[1,2],[1,3]", ["[1,2]", "[1,3]"]),
        ("seed=4", ["4"]),
    ],
)
def test_one_override_may_stand_for_several(text: str, values: list[str]) -> None:
    key = text.partition("=")[0]
    assert alternatives(text) == [f"{key}={value}" for value in values]


def test_every_combination_is_a_run() -> None:
    found = grid("sync=bsp,asp", "seed=0,1")
    assert chosen(found) == [
        {"sync": s, "seed": seed} for s in ("bsp", "asp") for seed in ("0", "1")
    ]
    assert found.axes == {"sync": ["bsp", "asp"], "seed": ["0", "1"]}
    assert len({setting.hash for setting in found.settings}) == 4
    assert all(setting.predicted_s and setting.predicted_s > 0 for setting in found.settings)


def test_a_key_has_no_say_where_the_option_lacks_it() -> None:
    found = grid("sync=bsp,ssp", "sync.staleness=1,2,3")
    assert [axes.get("sync.staleness") for axes in chosen(found)] == [None, "1", "2", "3"]
    assert found.unused == {"sync.staleness": 3}
    assert found.merged == 2


def test_a_sync_mode_has_no_say_where_the_schedule_names_its_own() -> None:
    found = grid("schedule=single,ashl", "sync=bsp,asp")
    assert [(axes["schedule"], axes.get("sync")) for axes in chosen(found)] == [
        ("single", "bsp"),
        ("single", "asp"),
        ("ashl", None),
    ]


def test_what_cannot_be_combined_is_skipped_with_its_reason() -> None:
    found = grid("sync=bsp,asp", "topology=parameter_server,all_reduce")
    assert len(found.settings) == 3
    (skipped,) = found.skipped
    assert skipped.overrides[-2:] == ("sync=asp", "topology=all_reduce")
    assert "needs its pattern of messages" in skipped.reason
    with pytest.raises(UsageError, match=r"sync=asp topology=all_reduce: .*needs its pattern"):
        grid("sync=bsp,asp", "topology=parameter_server,all_reduce", strict=True)


def test_the_same_grid_finds_the_same_folder_in_whatever_order() -> None:
    one, other = grid("sync=bsp,asp", "seed=0,1"), grid("seed=1,0", "sync=asp,bsp")
    third = grid("sync=bsp,asp", "seed=0,2")
    config = one.settings[0].config
    first, second, changed = (
        folder_of([setting.hash for setting in found.settings], config)
        for found in (one, other, third)
    )
    assert first == second != changed
    assert folder_of([], config | {"run": {"dir": "there"}}) == Path("there")


def test_a_preset_may_bring_lines_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "experiment").mkdir()
    lines = [
        {"sync": "bsp", "optimizer.lr": "0.1,0.2", "aggregate.clip_norm": None},
        {"schedule": "ashl", "optimizer.lr": "0.3", "label": "ASHL, as printed"},
    ]
    preset = f"# @package _global_\nsweep: {json.dumps(lines)}\nstop: {{epochs: 3}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(preset)
    found = grid("experiment=mine", "seed=0,1", config_dir=tmp_path)
    assert len(found.settings) == 6
    assert {setting.config["stop"]["epochs"] for setting in found.settings} == {3}
    assert {setting.axes["optimizer.lr"] for setting in found.settings} == {"0.1", "0.2", "0.3"}
    assert {setting.label for setting in found.settings} == {"", "ASHL, as printed"}
    assert {setting.axes.get("sync") for setting in found.settings if setting.label} == {None}
    show_forecast(found, forecast_of(found, [], 1, command_line("sweep", [])))
    assert "ASHL, as printed: optimizer.lr=0.3 seed=0 schedule=ashl" in " ".join(
        capsys.readouterr().out.split()
    )
    narrowed = grid("experiment=mine", "optimizer.lr=0.5", config_dir=tmp_path)
    assert [setting.config["optimizer"]["lr"] for setting in narrowed.settings] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("sync=bsp,sspp",), "sspp"),
        (("optimizer.lrr=0.1,0.2",), "did you mean optimizer.lr"),
        (
            ("sync.staleness=1,2", "sync=bsp"),
            "sync=bsp has no key staleness|no option that this sweep chooses has",
        ),
        (("optimizer.lr=interval(0,1)",), "--search 20"),
        (("seed=range(0,1000)", "optimizer.lr=range(0,1000)"), "1,000,000 points"),
        (("sweep=[{sync: bsp}]",), "lines of a sweep stand in a preset"),
        (
            ("seed=range(0,1000000000)",),
            "stands for more than 10,000 values; give fewer, or a larger step",
        ),
        (("sync=glob(zz*)",), "matches nothing"),
        (("seed=range(0,0)",), "stands for no value; list some, as in seed=1,2"),
        (("sync=asp,ssp", "topology=all_reduce"), "no setting of this sweep can be run"),
        (("seed=",), "seed"),
    ],
)
def test_what_is_wrong_with_the_whole_grid(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        grid(*overrides)


def test_the_number_of_workers_is_an_axis() -> None:
    found = grid("sync=bsp", "cluster.num_workers=2,4,8")
    assert [setting.config["cluster"]["compute"] for setting in found.settings] == [
        [1.0, 1.5],
        [1.0, 1.5, 2.0, 3.0],
        [1.0, 1.5, 2.0, 3.0] * 2,
    ]


def test_each_seed_draws_its_own_cluster_and_its_own_prediction() -> None:
    found = grid("sync=bsp", "cluster=random", "seed=0,1")
    assert found.settings[0].predicted_s != found.settings[1].predicted_s


def test_of_what_is_not_missing_the_tracker_hears_as_far_as_it_has_run(tmp_path: Path) -> None:
    """A setting that was dropped before it began is not missing either, and has no folder."""
    found, heard = grid("sync=bsp,asp"), []
    ran = found.settings[0]
    (tmp_path / ran.hash).mkdir()
    (tmp_path / ran.hash / "summary.json").write_text(
        '{"status": "finished", "exit_reason": "steps"}'
    )
    progress = SweepProgress(Console(quiet=True), 0, quiet=True)
    run_missing(found.settings, tmp_path, [], local_pool(1), progress, heard.append)
    assert heard == [ran]
