"""`ashl replay`: a run's own steps and transfers in virtual time, as it was and changed; and what
it refuses.
"""

import json
import shutil
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.plan.files import read_profile
from ashl.tracking import jsonl

RUN = ["cluster=mixed", "cluster.jitter=0.1", "schedule=single", "stop.steps=400", "tracking=none"]
TIMED = ["runtime=sim", "runtime.gradients=false", "tracking.events=all"]


@pytest.fixture(scope="module", params=["sync=bsp", "sync=bsp topology=all_reduce"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in virtual time whose record says that it was real."""
    place = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "-q", *TIMED, *RUN, *request.param.split(), "run.dir=run"]) == 0
    say_real(place / "run")
    return place / "run"


def say_real(run: Path, **changes: object) -> None:
    summary = json.loads((run / "summary.json").read_text())
    jsonl.write_json(run / "summary.json", summary | {"runtime": "local", **changes})


def test_a_run_is_replayed_as_it_was_and_changed(folder: Path, capsys) -> None:
    assert main(["replay", str(folder), "sync=local_sgd", "sync.local_steps=4"]) == 0
    said = capsys.readouterr().out
    assert "sync=local_sgd sync.local_steps=4" in said
    runs = json.loads((folder / "replay/replay.json").read_text())["runs"]
    was, replayed, changed = runs.values()
    assert replayed["time_s"] == pytest.approx(was["time_s"], rel=0.05)
    assert replayed["wait_share"] == pytest.approx(was["wait_share"], abs=0.05)
    assert changed["time_s"] < replayed["time_s"]
    found = read_profile(str(folder / "replay/profile.json"))
    assert found.workers[3].step_s > 2 * found.workers[0].step_s
    assert len({round(time_s, 6) for time_s in found.workers[0].step_times_s}) > 20


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ("run model=cnn", {}, "model=cnn is not replayed: a run measured its own model"),
        ("run compression=topk", {}, "compression=topk is not replayed"),
        ("run topology=gossip", {}, "topology=gossip is not replayed"),
        ("run", {"status": "failed"}, "has not finished on processes"),
        ("run", {"runtime": "sim"}, "change a run in virtual time by `ashl train`"),
        ("none", {}, "none"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    folder, workplace, capsys, arguments, changes, words
) -> None:
    shutil.copytree(folder, "run", dirs_exist_ok=True)
    say_real(Path("run"), **changes)
    assert main(["replay", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_run_without_spans_is_refused(folder, workplace, capsys) -> None:
    shutil.copytree(folder, "run", dirs_exist_ok=True)
    Path("run/events.jsonl").unlink()
    assert main(["replay", "run"]) == 2
    assert "has no spans of worker 0" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_are_replayed(workplace) -> None:
    real = (
        "cluster=mixed cluster.num_workers=2 cluster.step_s=0.05 sync=bsp schedule=single"
        " stop.steps=60"
    )
    assert (
        main(["train", "-q", "runtime=local", *real.split(), "tracking=none", "run.dir=run"]) == 0
    )
    assert main(["replay", "run", "sync=asp"]) == 0
    was, replayed, changed = json.loads(Path("run/replay/replay.json").read_text())["runs"].values()
    assert replayed["time_s"] == pytest.approx(was["time_s"], rel=0.05)
    assert changed["wait_share"] < replayed["wait_share"]
