"""Hydra's plugins: jobs that are brought elsewhere, and searches."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ashl.cli import plugins
from ashl.cli.app import main
from ashl.errors import AshlError
from ashl.study.launcher import play_job, run_elsewhere
from ashl.study.race import Standing
from ashl.study.search import NEVER, Axis, cost
from ashl.study.slots import Job

TINY = [
    "runtime=sim",
    "model.hidden=[4]",
    "stop.epochs=1",
    "eval.every_commits=40",
    "run.dir=study",
    "tracking=none",
]

pytestmark = pytest.mark.usefixtures("workplace")


def summaries(study: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in study.glob("*/summary.json")}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_joblib_runs_what_is_missing_and_leaves_nothing_behind(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    grid = ["sweep", "sync=bsp,asp", *TINY, "--launcher", "joblib", "hydra.launcher.n_jobs=2"]
    assert main(grid) == 0
    whole = summaries(workplace / "study")
    assert [summary["status"] for summary in whole.values()] == ["finished"] * 2
    own = [".lock", "figures", "leaderboard.md", "leaderboard.tex", "report.html", "sweep.json"]
    assert names(workplace / "study") == sorted([*own, *whole])
    assert names(workplace) == ["study"]
    assert "[2/2]" in capsys.readouterr().out
    assert main([*grid, "-q"]) == 0
    assert summaries(workplace / "study") == whole


@pytest.mark.slow
def test_submitit_on_this_machine(workplace: Path) -> None:
    assert main(["sweep", "seed=3", *TINY, "sync=asp", "--launcher", "submitit_local", "-q"]) == 0
    (summary,) = summaries(workplace / "study").values()
    assert (summary["status"], summary["seed"]) == ("finished", 3)
    assert names(workplace) == ["study"]


@pytest.mark.skipif(
    not find_spec("hydra_plugins.hydra_optuna_sweeper"), reason="needs ashl[optuna]"
)
def test_a_search_tries_settings_and_continues(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = [
        "sweep",
        "--sweeper",
        "optuna",
        "optimizer.lr=interval(0.01,0.5)",
        "sync=bsp,ssp",
        "seed=0,1",
        *TINY,
    ]
    assert main([*asked, "hydra.sweeper.n_trials=1"]) == 0
    first = summaries(workplace / "study")
    assert sorted(summary["seed"] for summary in first.values()) == [0, 1]
    assert main([*asked, "hydra.sweeper.n_trials=2"]) == 0
    whole = summaries(workplace / "study")
    assert len(whole) == 4
    assert first.items() <= whole.items()
    record = json.loads((workplace / "study/sweep.json").read_text())
    assert {setting["hash"] for setting in record["settings"]} == whole.keys()
    assert len(record["axes"]["optimizer.lr"]) == 2
    capsys.readouterr()
    assert main(["compare", "study"]) == 0
    assert "0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--launcher nowhere sync=bsp", "There is no launcher 'nowhere' among basic, joblib"),
        ("--launcher joblib hydra.launcher.jobs=2", "hydra.launcher has n_jobs, backend"),
        (
            "--launcher joblib hydra.launcher.n_jobs=1,2",
            "Sweeping over Hydra's configuration is not supported",
        ),
        ("hydra.launcher.n_jobs=2", "it goes with `ashl sweep --launcher NAME`"),
        ("--sweeper nobody sync=bsp,ssp", "There is no sweeper 'nobody' among basic"),
        ("--sweeper basic sync=bsp,ssp --race", "--race needs to know the whole grid"),
        ("--sweeper basic sync=bsp runtime=sim", "a search needs something to choose"),
        (
            "--sweeper basic sync=bsp,ssp optimizer.lr=interval(3,2) seed=interval(1,2)",
            "seed=interval(1,2) has no end",
        ),
    ],
)
def test_misuse_is_one_sentence(
    args: str, says: str, capsys: pytest.CaptureFixture, workplace: Path
) -> None:
    assert main(["sweep", *args.split()]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert names(workplace) == []


def test_a_plugin_that_is_not_installed_is_named_with_the_way_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(plugins.EXTRAS["launcher"], "elsewhere", "elsewhere")
    assert main(["sweep", "sync=bsp", "--launcher", "elsewhere"]) == 2
    assert (
        capsys.readouterr().err
        == "ashl: --launcher elsewhere needs a plugin: pip install 'ashl[elsewhere]'.\n"
    )


# --- what a launcher may do
# -------------------------------------------------------------------------------------------


def launched(folder: Path, code: str) -> list[Job]:
    """Return the results of two jobs with such a launcher."""
    jobs = [Job(folder / name, {"seed": 0}, ()) for name in ("a", "b")]
    return list(
        run_elsewhere(
            folder, lambda place, size: [sys.executable, "-c", code, str(place)], jobs, print
        )
    )


def test_a_launcher_that_fails_leaves_its_jobs_for_another_time(workplace: Path) -> None:
    with pytest.raises(
        AshlError, match=r"2 of 2 runs have not begun \(there is no such partition\)"
    ):
        launched(workplace, "raise SystemExit('there is no such partition')")
    (place,) = workplace.iterdir()  # neither run is there, failed
    assert names(place) == ["output.log"]


def test_a_job_that_dies_where_it_is_has_failed(workplace: Path) -> None:
    code = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); (p / '0.json').unlink(); (p /"
        " '1.begun').touch()"
    )
    assert [job.folder.name for job in launched(workplace, code)] == ["a", "b"]
    assert list(summaries(workplace)) == ["b"]
    assert "ended without a message" in summaries(workplace)["b"]["exit_reason"]


def test_a_job_that_is_not_wanted_any_longer_does_not_begin(workplace: Path) -> None:
    play_job(workplace, 0)
    assert names(workplace) == []


def test_costs_are_finite_and_in_order() -> None:
    aims, none = (
        {"stop": {"target_accuracy": target, "target_loss": None}} for target in (0.9, None)
    )
    order = [
        Standing(0.5, 3.0),
        Standing(0.5, 4.0),
        Standing(0.1, None),
        Standing(float("inf"), None),
    ]
    costs = [cost(found, aims) for found in order]
    assert costs == sorted(costs) == [3.0, 4.0, NEVER + 0.1, 2 * NEVER]
    assert cost(order[2], none) == 0.1
    assert cost(order[3], none) == NEVER


def test_axes_of_a_search() -> None:
    assert plugins.axis_of("seed=1", None) is None
    axis = plugins.axis_of("optimizer.lr=tag(log,interval(0.01,0.5))", None)
    assert axis == Axis(
        "optimizer.lr",
        ("optimizer.lr=0.01", "optimizer.lr=0.5"),
        drawn="tag(log,interval(0.01,0.5))",
    )
    assert axis.single(0.123456) == "optimizer.lr=0.1235"
    assert axis.asked(3) == "+axes.a3=tag(log,interval(0.01,0.5))"
    axis = plugins.axis_of("sync.staleness=range(1,5,2)", None)
    assert axis == Axis(
        "sync.staleness", ("sync.staleness=1", "sync.staleness=3"), numbers="interval(0,1)"
    )
    assert axis.single(1) == "sync.staleness=3"
    axis = plugins.axis_of("cluster.compute=[1,2],[1,1]", None)
    assert axis is not None
    assert axis.numbers == "choice(0,1)"
    assert axis.single(0) == "cluster.compute=[1,2]"


@pytest.mark.slow
def test_ctrl_c_ends_runs_that_are_elsewhere(workplace: Path) -> None:
    grid = [
        "sync=bsp,asp",
        "seed=0,1",
        *TINY,
        "stop.epochs=2000",
        "--launcher",
        "joblib",
        "hydra.launcher.n_jobs=2",
    ]
    with subprocess.Popen([sys.executable, "-m", "ashl.cli", "sweep", *grid, "-q"]) as process:
        end = time.monotonic() + 100
        while len(list(workplace.glob("study/*/metrics.jsonl"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert [summary["status"] for summary in summaries(workplace / "study").values()] == [
        "interrupted"
    ] * 2
