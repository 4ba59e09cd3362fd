"""Resumed runs: from a whole checkpoint, one process at a time, with the code that the user allows."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.run.monitor import Monitor
from ashl.tracking.recorder import METRICS

BROKEN = "cannot be resumed from (ranks.safetensors is not what was written)"
PAUSED = [
    "runtime=sim",
    "tracking=none",
    "tracking.events=all",
    "model.hidden=[4]",
    "stop.steps=80",
    "run.dir=run",
    "-q",
]


@pytest.fixture
def interrupted(workplace, capsys) -> Path:
    """A run with a checkpoint."""
    assert main(["train", *PAUSED, "sync=ssp", "run.checkpoint_s=0.3"]) == 0
    assert [*workplace.glob("run/checkpoint/*/ranks.safetensors")]
    return workplace / "run"


def resumed(capsys, *more: str) -> tuple[int, str]:
    code = main(["train", "--resume", "run", "-q", *more])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_truncated_records_are_not_resumed(name: str, interrupted: Path, capsys) -> None:
    """They were filled up with zero bytes, and no reader could make anything of them."""
    before = (interrupted / "summary.json").read_text()
    os.truncate(interrupted / name, 10)
    code, err = resumed(capsys)
    assert code == 2
    assert f"run/{name} has 10 bytes, and had" in err
    assert "its records would have a gap; run this setting again" in err
    assert (interrupted / name).stat().st_size == 10
    assert (interrupted / "summary.json").read_text() == before
    (interrupted / name).unlink()
    assert f"run/{name} has 0 bytes" in resumed(capsys)[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "run/config.yaml lacks choices, or has something else there; name another run."),
        ("choices: {}", "run/config.yaml lacks run, or has something else there"),
        ("[" * 3000, "run: there is no run whose config.yaml can be read"),
        ("\udcff", "run: there is no run whose config.yaml can be read"),
    ],
)
def test_a_configuration_that_is_none(text: str, says: str, interrupted: Path, capsys) -> None:
    (interrupted / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    code, err = resumed(capsys)
    assert (code, err.count("\n"), says in err) == (2, 1, True)


@pytest.mark.parametrize("line", ["x", "[1]", "{}"])
def test_records_with_a_line_that_is_none_are_not_taken_along(
    line: str, interrupted: Path, capsys
) -> None:
    (interrupted / METRICS).write_text(f"{line}\n")
    code, err = resumed(capsys, "cluster.num_workers=2", "run.dir=new")
    assert (code, "run/metrics.jsonl is missing or damaged" in err) == (2, True)


def test_two_processes_cannot_resume_one_run(interrupted: Path, capsys) -> None:
    with open(interrupted / METRICS, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read()
        assert resumed(capsys) == (
            1,
            "ashl: another process is writing the run in run; wait for it to end.\n",
        )
        assert (interrupted / METRICS).read_bytes() == before
    assert resumed(capsys) == (0, "")


def test_a_resume_must_allow_user_code_again(interrupted: Path, workplace, capsys) -> None:
    config = interrupted / "config.yaml"
    config.write_text(config.read_text().replace("allow_targets: []", "allow_targets: [evil]"))
    (workplace / "evil.py").write_text("raise SystemExit('imported')")
    code, err = resumed(capsys)
    assert code == 2
    assert (
        "--resume run: the run imports code of your own; if you trust it, type"
        " 'allow_targets=[evil]'" in err
    )
    code, err = resumed(capsys, "allow_targets=[evil]")
    assert (code, "of another run" in err) == (2, True), "what is allowed belongs to what a run is"


def test_a_corrupt_file_is_not_resumed_from(interrupted: Path, capsys) -> None:
    """Flipped or cut off: the checkpoint before counts, and without one the run does not begin."""
    _, cut = sorted(
        (interrupted / "checkpoint").glob("*/ranks.safetensors"),
        key=lambda file: int(file.parent.name),
    )
    cut.write_bytes(cut.read_bytes()[:-1000])
    code, err = resumed(capsys, "stop.steps=90")
    assert code == 0
    assert err == f"ashl: run/checkpoint/{cut.parent.name} {BROKEN}\n"
    for file in (interrupted / "checkpoint").glob("*/ranks.safetensors"):
        text = bytearray(file.read_bytes())
        text[len(text) // 2] ^= 1
        file.write_bytes(text)
    code, err = resumed(capsys)
    assert code == 2
    assert err.endswith(f"{BROKEN}; run this setting again\n")


def test_a_checkpoint_is_resumed_where_it_was_made(workplace, capsys) -> None:
    """Also with another number of workers, which a run folder of its own has."""
    assert main(["train", *PAUSED, "sync=bsp", "run.checkpoint_s=0.3"]) == 0
    for own in ((), ("cluster.num_workers=3", "run.dir=three")):
        code, err = resumed(capsys, "runtime=local", *own)
        assert code == 2
        assert (
            "run began in virtual time, and a checkpoint is resumed where it was made; drop runtime"
            in err
        )
    assert not Path("three").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        "runtime=sim",
        "cluster.num_workers=3 run.dir=three",
    ],
)
def test_the_time_before_a_resume_counts_once(overrides: str, workplace: Path, monkeypatch) -> None:
    """The time counted twice with other workers: their run begins with its own checkpoint, and resumes
    from that.
    """
    line = (
        "sync=bsp cluster=homogeneous cluster.num_workers=2 runtime=sim run.checkpoint_s=0.1"
        " tracking=none"
    )
    made = Monitor.__init__

    def long_ago(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self._started_s -= 1000

    with monkeypatch.context() as patched:
        patched.setattr(Monitor, "__init__", long_ago)
        assert main(["train", *line.split(), "stop.steps=60", "run.dir=run", "-q"]) == 0
    began, own = time.monotonic(), "three" if "three" in overrides else "run"
    for folder, more in (("run", overrides.split()), (own, ["stop.steps=100"])):
        assert main(["train", "--resume", folder, *more, "-q"]) == 0
        host_s = json.loads((workplace / own / "summary.json").read_text())["host_s"]
        assert 1000 < host_s < 1000.5 + time.monotonic() - began
