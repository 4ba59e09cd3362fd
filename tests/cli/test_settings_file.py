"""`--config FILE`: its settings count as typed, typed keys win, and printed commands are complete
without it.
"""

import shlex
from pathlib import Path

import pytest
import yaml

from ashl.cli.app import main
from ashl.config.settings_file import read_settings, with_settings

FILE = """
runtime: sim
tracking: none
sync: ssp
sync.staleness: 2
stop: {steps: 40}
cluster.compute: [1, 1, 2.5]
cluster.events: [{time_s: 1e-1, worker: 0, compute: 2}]
name: an apostrophe's
plan: null
"""
# each list has the list above it nine times
BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.fixture
def file(workplace: Path) -> Path:
    path = workplace / "my settings.yaml"
    path.write_text(FILE)
    return path


def test_values_are_read_as_if_they_were_typed(file: Path) -> None:
    found = read_settings(file)
    assert found[2:6] == [
        "sync=ssp",
        "sync.staleness=2",
        "stop.steps=40",
        "cluster.compute=[1,1,2.5]",
    ]
    assert found[6:] == [
        "cluster.events=[{time_s:1e-1,worker:0,compute:2}]",
        "name=an apostrophe's",
        "plan=null",
    ]
    assert with_settings(file, ["sync.staleness=1"])[-1] == "sync.staleness=1"
    assert "sync.staleness=2" not in with_settings(file, ["++sync.staleness=1"])


def test_a_run_records_the_settings_and_its_command_needs_no_file(
    file: Path, workplace: Path
) -> None:
    assert (
        main(
            [
                "train",
                "-q",
                "--config",
                str(file),
                "sync.staleness=1",
                "stop.steps=20",
                "run.dir=one",
            ]
        )
        == 0
    )
    typed = yaml.safe_load((workplace / "one/overrides.yaml").read_text())
    assert typed[-3:] == ["sync.staleness=1", "stop.steps=20", "run.dir=one"]
    words = shlex.split((workplace / "one/command.txt").read_text())
    file.unlink()
    assert words[:2] == ["ashl", "train"]
    assert main([*words[1:], "run.dir=two", "-q"]) == 0
    first, second = ((workplace / name / "config.yaml").read_text() for name in ("one", "two"))
    assert first.replace("dir: one", "dir: two") == second
    repeated = ["train", "-q", "--config", "one/overrides.yaml", "run.dir=three"]
    assert main(repeated) == 0
    assert (workplace / "three/config.yaml").read_text() == first.replace("dir: one", "dir: three")


@pytest.mark.parametrize("command", ["train", "profile", "sweep", "advise", "calibrate"])
def test_every_command_that_takes_settings_takes_the_file(command: str, file: Path, capsys) -> None:
    file.write_text("sync: spp\n")
    assert main([command, "--config", str(file), "runtime=sim"]) == 2
    assert "did you mean ssp?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sync: [bsp", "is not valid YAML"),
        ("bsp", "it has no settings; write KEY: VALUE"),
        ("", "it has no settings; write KEY: VALUE"),
        ("[]", "it has no settings; write KEY: VALUE"),
        ("{}", "it has no settings; write KEY: VALUE"),
        ("sync: bsp\nsync: asp", "sync"),
        (BOMB, "its anchors stand for more than 100,000 values; write fewer"),
        ("[" * 5000, "it nests its values too deep; write them flatter"),
        ("choices: {sync: bsp}\nallow_targets: []", "name the overrides.yaml beside it"),
        ('{"schema": 5, "workers": []}', "it is a record of ashl; give a plan as plan=FILE"),
        ("allow_targets: [mine]", "type allow_targets=[...] instead"),
        (None, "it cannot be read (no such file or directory)"),
    ],
)
def test_a_file_that_is_none_of_settings_is_refused(
    text: str | None, says: str, file: Path, capsys
) -> None:
    file.unlink() if text is None else file.write_text(text)
    assert main(["train", "--config", str(file), "runtime=sim"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert str(file) in err
    assert err.count("\n") == 1
