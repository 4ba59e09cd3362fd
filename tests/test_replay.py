"""`ashl replay`: a run's own steps and transfers in virtual time, as it was and changed; and what it cannot do."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from ashl.cli.app import main
from ashl.tracking import jsonl
from tests.sim.test_full_profile import DECLARED, measured
from tests.support import simulated

RUN = [*DECLARED, "cluster.jitter=0.4", "schedule=single", "sync=bsp", "stop.steps=120", "tracking=none"]
TIMED = ["runtime=sim", "runtime.gradients=false", "tracking.events=all"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in virtual time whose record says that it was real, and a full profile of its cluster."""
    place = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "-q", *TIMED, *RUN, "run.dir=run"]) == 0
        measured(*DECLARED)
    summary = json.loads((place / "run/summary.json").read_text())
    jsonl.write_json(place / "run/summary.json", summary | {"runtime": "local"})
    return place


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def computed(run: Path) -> list[list[float]]:
    """Seconds of each worker's steps, in order."""
    rounds = [event for event in jsonl.read(run / "events.jsonl") if event["kind"] == "round"]
    spans = [(e["rank"], end - start) for e in rounds for kind, start, end in e["spans"] if kind == "compute"]
    return [[time_s for of, time_s in spans if of == rank] for rank in range(2)]


def test_a_replay_takes_the_same_steps(place: Path, capsys) -> None:
    """In the same order, also with H = 4, so that what differs is the change; and it is as long as the run was."""
    assert main(["replay", "run", "sync=ssp", "sync.local_steps=4"]) == 0
    said = capsys.readouterr().out
    (found,) = Path("runs/replays").glob("run-*")
    record = json.loads((found / "replay.json").read_text())
    assert record["replayed"]["time_s"] == pytest.approx(record["measured"]["time_s"], rel=0.005)
    assert record["replayed"]["wait_share"] == pytest.approx(record["measured"]["wait_share"], abs=0.01)
    own, again, changed = (computed(run) for run in (Path("run"), found / "replayed", found / "changed"))
    assert [sum(map(len, steps)) for steps in (own, again)] == [120, 120]
    for rank in range(2):
        assert again[rank] == pytest.approx(own[rank], abs=2e-9)
        count = min(len(own[rank]), len(changed[rank]) - 1)  # the end cuts the last one
        assert changed[rank][:count] == pytest.approx(own[rank][:count], abs=2e-9)
    assert record["changed"]["time_s"] < record["replayed"]["time_s"]
    assert "The replay is off by" in said
    assert "On the same steps and transfers, sync=ssp sync.local_steps=4 alone would have been" in said
    shutil.rmtree(found)


def test_other_bytes_go_by_the_lines_of_a_profile(place: Path, capsys) -> None:
    """As in a run on the cluster itself."""
    assert main(["replay", "-q", "run", "compression=topk", "profile=profile.json"]) == 0
    (found,) = Path("runs/replays").glob("run-*")
    record = json.loads((found / "replay.json").read_text())
    ran = simulated(*TIMED, *RUN, "compression=topk")
    assert record["changed"]["time_s"] == pytest.approx(ran.time_ns / 1e9, rel=0.02)
    shutil.rmtree(found)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["none"], "none: there is no run whose config.yaml can be read"),
        (["run", "model=cnn"], "model=cnn is not replayed: a run measured its own model on its own cluster"),
        (["run", "cluster=mixed"], "cluster=mixed is not replayed"),
        (["run", "compression=topk"], "give profile=FILE of this cluster, from `ashl profile --full compression=topk`"),
        (["run", "compression=qsgd", "profile=profile.json"], "the profile has not timed compression=qsgd"),
        (["run", "topology=all_reduce"], "topology=all_reduce needs what it did not measure"),
        (["sums", "topology.algorithm=tree"], "by topology.algorithm=null, and topology.algorithm=tree needs what"),
        (["profiled"], "profiled is a profile, in which nothing was learned; name the folder of a run"),
        (["run", "profile=run/config.yaml"], "profile=run/config.yaml is no usable profile"),
        (["simulated"], "was in virtual time, which needs no replay"),
        (["broken"], "ended as failed; a replay needs one that came to its end"),
        (["stages"], "has 2 stages, and replayed is one stage"),
        (
            ["silent"],
            "run it anew with tracking.events=all (it said tracking.events=none)",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_fix(overrides: list[str], words: str, place: Path, capsys) -> None:
    other = place / overrides[0]
    if overrides[0] in ("simulated", "broken", "stages", "silent", "profiled", "sums") and not other.exists():
        shutil.copytree(place / "run", other)
        summary, plan = (json.loads((other / f"{name}.json").read_text()) for name in ("summary", "plan"))
        changed = {
            "simulated": {"runtime": "sim"},
            "broken": {"status": "failed"},
            "profiled": {"exit_reason": "profiled"},
        }.get(other.name, {})
        jsonl.write_json(other / "summary.json", summary | changed)
        if other.name == "stages":
            jsonl.write_json(other / "plan.json", plan | {"stages": plan["stages"] * 2})
        if other.name == "sums":
            typed = yaml.safe_load((other / "overrides.yaml").read_text())
            (other / "overrides.yaml").write_text(yaml.safe_dump([*typed, "topology=all_reduce"]))
        if other.name == "silent":
            config = yaml.safe_load((other / "config.yaml").read_text())
            config["tracking"]["events"] = "none"
            (other / "config.yaml").write_text(yaml.safe_dump(config))
            (other / "events.jsonl").unlink()
    assert main(["replay", *overrides]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_processes_are_replayed(workplace, capsys) -> None:
    real = (
        "cluster=mixed cluster.num_workers=2 cluster.step_s=0.05 sync=bsp schedule=single stop.steps=60 tracking=none"
    )
    assert main(["train", "-q", "runtime=local", *real.split(), "run.dir=run"]) == 0
    assert main(["replay", "run", "sync=asp"]) == 0
    record = json.loads(next(Path("runs/replays").glob("run-*/replay.json")).read_text())
    assert record["replayed"]["time_s"] == pytest.approx(record["measured"]["time_s"], rel=0.05)
    assert record["changed"]["wait_share"] < record["replayed"]["wait_share"]
