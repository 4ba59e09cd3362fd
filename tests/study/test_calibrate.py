"""`ashl calibrate`: predicted beside measured, what is left out, and what is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.errors import AshlError
from ashl.plan.files import read_profile
from ashl.run.profile import profile_once
from ashl.run.train import run
from ashl.study.calibrate import bootstrap_interval
from ashl.study.jobs import Job, Pool
from ashl.tracking import jsonl
from tests.test_profile import profile

PACED = [
    "cluster=mixed",
    "cluster.num_workers=2",
    "model=mlp",
    "dataset=digits",
    "sync=bsp",
    "compression=none",
]


def test_the_interval_is_repeatable_and_holds_the_median() -> None:
    errors = [0.1, 0.2, 0.05, 0.3, 0.15]
    low, high = bootstrap_interval(errors)
    assert low <= 0.15 <= high
    assert bootstrap_interval(errors) == (low, high)
    assert bootstrap_interval([0.1] * 3) == (pytest.approx(0.1), pytest.approx(0.1))


def in_this_process(pool: Pool, jobs: Iterator[Job], *rest: object) -> Iterator[Job]:
    """Run real runs in virtual time on the cluster that they declare."""
    for job in jobs:
        runtime = compose([*PACED, "runtime=sim", "runtime.gradients=false"], None)["runtime"]
        run(
            {**job.config, "runtime": runtime},
            list(job.overrides),
            quiet=True,
            silent=True,
            strict=False,
        )
        yield job


def test_a_calibration_on_declared_costs_is_exact(workplace, capsys, monkeypatch) -> None:
    monkeypatch.setattr("ashl.study.sweep.run_all", in_this_process)
    command = ["calibrate", "-q", *PACED, "--seconds", "1", "run.dir=here"]
    assert main(command) == 0
    assert (
        "times are off by 0.0 % in the median (95 % interval 0.0 % to 0.0 %"
        in capsys.readouterr().out
    )
    found = json.loads(Path("here/calibration.json").read_text())
    assert {row["name"] for row in found["combinations"]} == {"BSP", "BSP ring"}
    assert found["interval"] == pytest.approx([0.0, 0.0], abs=1e-9)
    monkeypatch.setattr("ashl.study.sweep.run_all", lambda pool, jobs, *rest: jobs)
    assert main(command) == 0, "what has ended is not run again"


def test_ranks_beyond_the_cores_are_left_out(workplace, capsys, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    real = ["cluster=real", "cluster.num_workers=2", "model=mlp", "dataset=digits"]
    assert main(["calibrate", "--dry-run", *real]) == 0
    said = capsys.readouterr().out
    assert "BSP ring: sync=bsp topology=all_reduce compression=none" in said
    assert "left out: ASP: its 3 ranks are more than this host's 2 cores" in said
    assert main(["calibrate", *real, "topology=parameter_server"]) == 2
    assert (
        "fewer than two combinations are left to compare (BSP: its 3 ranks are more than"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("runtime=sim", "take runtime=local"),
        ("seed=0,1", "gives several values"),
        ("stop.steps=5", "how long runs are follows from --seconds; drop it"),
        ("sync=qsr", "fewer than two combinations are left to compare; remove some overrides"),
        ("profile=none.json cluster=real cluster.num_workers=2", "cannot be read: No such file"),
        (
            "profile=broken.json cluster=real cluster.num_workers=2",
            "is no usable profile: line 1 is not JSON",
        ),
        ("profile=mlp.json cluster=real cluster.num_workers=3", "2 workers and the cluster has 3"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_with_the_fix(
    overrides: str, words: str, workplace, capsys
) -> None:
    Path("broken.json").write_text('{"schema": 5,')
    Path("mlp.json").write_text(
        replace(profile(), model="mlp", num_params=9610, dense_bytes=38440).to_json()
    )
    assert main(["calibrate", "-q", *overrides.split()]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_paced_processes_take_what_was_predicted(workplace, capsys) -> None:
    slow = ["cluster.step_s=0.05", "cluster.exchange_s=0.04"]
    assert main(["calibrate", *PACED, *slow, "--seconds", "2", "run.dir=here"]) == 0
    assert json.loads(Path("here/calibration.json").read_text())["median_error"] < 0.15


def test_an_interrupted_measurement_of_the_profile_is_repeated(tmp_path) -> None:
    config = compose([*PACED, "runtime=sim"], None)
    records = tmp_path / "profile" / "metrics.jsonl"
    records.parent.mkdir()
    records.touch()
    with jsonl.hold_lock(records), pytest.raises(AshlError, match="another process is writing"):
        profile_once(config, [], records.parent)
    path = profile_once(config, [], records.parent)
    assert read_profile(str(path)).num_workers == 2
    path.write_text("kept")
    assert profile_once(config, [], records.parent).read_text() == "kept"
