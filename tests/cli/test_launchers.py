"""Runs in a queue, by submitit, and searches."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import submitit

from ashl.cli.app import main
from ashl.config.compose import Axis, axis_of
from ashl.errors import AshlError
from ashl.study.jobs import Job, Task, queue_pool, run_all
from ashl.study.search import NEVER, cost_of
from ashl.study.sweep import lock_folder

TINY = [
    "runtime=sim",
    "model.hidden=[4]",
    "stop.epochs=1",
    "eval.every_commits=40",
    "run.dir=study",
    "tracking=none",
]
OWN = [".lock", "report.html", "sweep.json"]

pytestmark = pytest.mark.usefixtures("workplace")


def summaries(study: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in study.glob("*/summary.json")}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_submitit_runs_what_is_missing_and_leaves_nothing_behind(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    grid = ["sweep", "sync=bsp,asp", *TINY, "--launcher", "submitit_local", "--jobs", "2"]
    assert main(grid) == 0
    whole = summaries(workplace / "study")
    assert [summary["status"] for summary in whole.values()] == ["finished"] * 2
    assert names(workplace / "study") == sorted([*OWN, *whole])
    assert names(workplace) == ["study"]
    assert "[2/2]" in capsys.readouterr().out
    assert main([*grid, "-q"]) == 0
    assert summaries(workplace / "study") == whole


def test_a_search_tries_settings_and_resumes(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = ["sweep", "optimizer.lr=interval(0.01,0.5)", "sync=bsp,ssp", "seed=0,1", *TINY]
    assert main([*asked, "--search", "1"]) == 0
    first = summaries(workplace / "study")
    assert sorted(summary["seed"] for summary in first.values()) == [0, 1]
    assert main([*asked, "--search", "2"]) == 0
    whole = summaries(workplace / "study")
    assert len(whole) == 4
    assert first.items() <= whole.items()
    record = json.loads((workplace / "study/sweep.json").read_text())
    assert {setting["hash"] for setting in record["settings"]} == whole.keys()
    assert len(record["axes"]["optimizer.lr"]) == 2
    capsys.readouterr()
    assert main(["compare", "study"]) == 0
    assert "0.2" in capsys.readouterr().out
    assert main([*asked, "--search", "2", "-q"]) == 0
    assert summaries(workplace / "study") == whole
    asked[2] = "sync=bsp,asp"
    assert main([*asked, "--search", "3"]) == 2
    assert "sync: an earlier search in this folder had other values" in capsys.readouterr().err


def test_a_search_first_repeats_its_interrupted_trial(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna would choose another setting, and the runs of the first would stay unfinished."""
    asked = ["sweep", "optimizer.lr=interval(0.01,0.5)", *TINY, "-q", "--search", "1"]
    chosen = list[str]()

    def interrupted(pool: object, wanted: Sequence[Job], *rest: object) -> None:
        chosen.extend(next(text for text in job.overrides if "lr=" in text) for job in wanted)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ashl.study.sweep.run_all", interrupted)
        assert main(asked) == 130
    assert main(asked) == 0
    record = json.loads((workplace / "study/sweep.json").read_text())
    (text,) = chosen
    assert f"optimizer.lr={record['axes']['optimizer.lr'][0]}" == text
    (summary,) = summaries(workplace / "study").values()
    assert summary["status"] == "finished"


def test_a_trial_that_cannot_run_is_skipped_with_its_reason(
    workplace: Path, capsys: pytest.CaptureFixture
) -> None:
    grid = ["topology=parameter_server,all_reduce", "sync=bsp,asp", *TINY]
    assert main(["sweep", *grid, "--search", "12"]) == 0
    record = json.loads((workplace / "study/sweep.json").read_text())
    assert len(record["settings"]) <= 3
    (skipped,) = record["skipped"]
    assert skipped["overrides"] == ["topology=all_reduce", "sync=asp"]
    assert "skipped: topology=all_reduce sync=asp: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--launcher nowhere sync=bsp", "no launcher 'nowhere'; take one of submitit_slurm"),
        ("--launcher submitit_local launcher.nodes=1,2 sync=bsp", "one value is needed here"),
        ("--launcher submitit_slurm launcher.queue=a sync=bsp", "Unknown argument 'queue'"),
        ("launcher.nodes=1 sync=bsp", "it goes with `ashl sweep --launcher NAME`"),
        ("--search 2 sync=bsp,ssp --race", "--race goes with a whole grid"),
        ("--search 2 sync=bsp runtime=sim", "a search needs something to choose"),
        ("--search 2 optimizer.lr=interval(3,2)", "goes from a smaller to a larger number"),
        (
            "--search 2 sync=bsp,ssp optimizer.lr=interval(3,4) seed=interval(1,2)",
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
    assert not list(workplace.glob("*/summary.json"))


@pytest.mark.parametrize(
    ("package", "args"),
    [("submitit", ["--launcher", "submitit_slurm"]), ("optuna", ["--search", "2"])],
)
def test_a_package_that_is_not_installed_is_named_with_the_way_to_it(
    package: str,
    args: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    workplace: Path,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["sweep", "sync=bsp,asp", *TINY, *args]) == 2
    assert "needs a package: pip install 'ashl[" in capsys.readouterr().err


# --- what a queue may do
# ----------------------------------------------------------------------------------------------


class Submitted:
    """The handle of a job that a queue has lost."""

    state = "NODE_FAIL"

    def done(self) -> bool:
        return True


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace submitit's executor; return what a queue would receive."""
    found = list[object]()

    class Executor:
        def __init__(self, folder: Path, cluster: str) -> None:
            found.append(cluster)

        def update_parameters(self, **parameters: object) -> None:
            if "nowhere" in parameters.values():
                raise RuntimeError("there is no such partition")
            found.append(parameters)

        def submit_array(self, tasks: Sequence[Task]) -> list[Submitted]:
            found.append([task.job.folder.name for task in tasks])
            tasks[0].permit.unlink()  # it has ended
            tasks[1].mark.touch()
            return [Submitted() for _ in tasks]

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    return found


def run_two(folder: Path, parameters: dict[str, object]) -> list[Job]:
    """Return two jobs in the order in which they end in a queue with room for one."""
    pool = queue_pool(folder, "submitit_slurm", parameters, slots=1, default=1)
    wanted = [Job(folder / name, {"seed": 0}, ()) for name in ("a", "b")]
    with lock_folder(folder):
        return list(run_all(pool, iter(wanted), lambda running: None))


def test_a_queue_that_takes_no_job_leaves_it_for_another_time(
    workplace: Path, received: list[object]
) -> None:
    with pytest.raises(AshlError, match=r"did not take 2 runs \(there is no such partition\)"):
        run_two(workplace, {"slurm_partition": "nowhere"})
    assert names(workplace) == [".lock"]


def test_slurm_receives_one_array_and_a_lost_job_has_failed(
    workplace: Path, received: list[object]
) -> None:
    parameters: dict[str, object] = {"slurm_partition": "gpu", "slurm_timeout_min": 240}
    assert [job.folder.name for job in run_two(workplace, parameters)] == ["a", "b"]
    assert received == ["slurm", {**parameters, "slurm_array_parallelism": 1}, ["a", "b"]]
    assert list(summaries(workplace)) == ["b"]
    assert "ended without a message" in summaries(workplace)["b"]["exit_reason"]
    assert names(workplace) == [".lock", "b"]


def test_a_job_that_is_not_wanted_any_longer_does_not_begin(workplace: Path) -> None:
    Task(Job(workplace / "a", {"seed": 0}, ()), workplace / "0.permit", ("here", 1))()
    assert names(workplace) == []


def test_jobs_of_a_killed_sweep_are_withdrawn_by_the_next(workplace: Path) -> None:
    permit = workplace / "study/launcher-old/0.permit"
    permit.parent.mkdir(parents=True)
    permit.touch()
    assert main(["sweep", "sync=asp", *TINY, "-q"]) == 0
    assert not permit.parent.exists()


def test_costs_are_finite_and_in_order() -> None:
    aims, none = ({"target_accuracy": target, "target_loss": None} for target in (0.9, None))

    def ended(loss: float, reached_s: float | None, status: str = "finished") -> dict:
        final = {"test_loss": loss}
        return {"status": status, "time_to_target_s": reached_s, "final": final}

    order = [ended(0.5, 3.0), ended(0.5, 4.0), ended(0.1, None), ended(0.1, None, "diverged")]
    costs = [cost_of(summary, aims) for summary in order]
    assert costs == sorted(costs) == [3.0, 4.0, NEVER + 0.1, 2 * NEVER]
    assert cost_of(order[2], none) == 0.1
    assert cost_of(order[3], none) == cost_of(None, none) == NEVER


def test_axes_of_a_search() -> None:
    assert axis_of("seed=1", None) == Axis("seed", ("seed=1",))
    assert axis_of("optimizer.lr=tag(log,interval(0.01,0.5))", None) == Axis(
        "optimizer.lr", ("optimizer.lr=0.01", "optimizer.lr=0.5"), (0.01, 0.5), log=True
    )
    assert axis_of("sync.staleness=range(1,5,2)", None) == Axis(
        "sync.staleness", ("sync.staleness=1", "sync.staleness=3"), ordered=True
    )
    assert axis_of("cluster.compute=[1,2],[1,1]", None) == Axis(
        "cluster.compute", ("cluster.compute=[1,2]", "cluster.compute=[1,1]")
    )
