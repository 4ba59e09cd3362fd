"""Every command that a command prints, or leaves in a report or a record, runs as it stands: with a
folder of options of the user's own and paths with a space.
"""

import json
import re
import shlex
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from ashl import sweep
from ashl.advice import candidates, leave_out
from ashl.advice.candidates import BSP
from ashl.advice.rules import RULES
from ashl.cli.app import COMMANDS, app, main
from ashl.cli.typed import typed_command
from ashl.study import sweep as study_sweep
from ashl.tracking.tracker import TrackedRun, shell_command
from tests.support import slow_unless
from tests.test_advice import written

OWN = "my options"
TINY = ["--config-dir", OWN, "model=tiny", "runtime=sim", "stop.steps=8"]
NUMBERS = ("target", "top", "jobs", "budget", "seconds", "search")
DRY = ("train", "profile", "sweep", "advise", "calibrate", "launch")  # these have --dry-run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a space in its name, with options of the user's own; MLflow takes what it is
    given.
    """
    folder = tmp_path / "a place"
    (folder / OWN / "model").mkdir(parents=True)
    (folder / OWN / "model" / "tiny.yaml").write_text("_target_: ashl.model.mlp.MLP\nhidden: [4]\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ASHL_CONFIG_DIR", raising=False)
    kept: list[str] = []

    class Noting:
        title = "MLflow"

        def __init__(self, make: object, title: str, run: TrackedRun) -> None:
            kept.append(run.note)
            (folder / "notes.txt").write_text("\n".join(kept))
            self.run = run

        def add(self, run: TrackedRun) -> None: ...

        def finish(self, *_: object) -> tuple[str, None]:
            return shell_command("ashl", "ui", self.run.folder), None

    monkeypatch.setattr("ashl.run.train.Copier", Noting)
    monkeypatch.setattr("ashl.study.sweep.Copier", Noting)
    return folder


def commands_in(text: str) -> set[str]:
    """Return the ashl commands of a text: between backticks, or from `ashl` to the end of its line."""
    found = {part for part in re.findall(r"`(ashl [^`]+)`", text)}
    names = "|".join(COMMANDS)
    for line in re.sub(r"`[^`]*`", "", text).splitlines():
        found |= set(re.findall(rf"(?:^|[ :])(ashl (?:{names})\b.*)$", line))
    return {
        command for command in found if not re.search(r"\b(FILE|RUN|NAME|GROUP|OPTION)\b", command)
    }


def everything(place: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The commands in what was printed and in all reports and records below the place."""
    out, err = capsys.readouterr()
    found = commands_in(out) | commands_in(err)
    for file in place.rglob("*.html"):
        for code in re.findall(r"<code>(ashl .*?)</code>", file.read_text()):
            found.add(unescape(code))
    for file in [*place.rglob("command.txt"), *place.rglob("notes.txt")]:
        found |= commands_in(file.read_text())
    for file in place.rglob("advice.json"):
        record = json.loads(file.read_text())
        found |= {record["command"], record["launch"]}
    return found


def runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs, or would."""
    words = shlex.split(command)
    assert words[0] == "ashl"
    more = ["--dry-run"] if words[1] in DRY else []
    with monkeypatch.context() as patched:
        opened: list[Path] = []
        server = SimpleNamespace(wait=lambda: None)
        patched.setattr(
            "ashl.tracking.ui.serve",
            lambda store, port, host, folder: (
                opened.append(folder) or nullcontext(("http://127.0.0.1:5000", server))
            ),
        )
        patched.setenv("MLFLOW_TRACKING_URI", "none")
        assert main([*words[1:], *more]) == 0, command
        assert all(folder.is_dir() for folder in opened), command


def names(found: set[str]) -> list[str]:
    return sorted({shlex.split(command)[1] for command in found})


def all_run(found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in sorted(found):
        runs(command, monkeypatch)
        if shlex.split(command)[1] not in ("ui", "compare", "list", "export"):
            assert "--config-dir 'my options'" in command, command


@pytest.mark.parametrize("by", slow_unless(["option"], ["option", "environment", "package"]))
def test_a_sweep(by: str, place: Path, capsys, monkeypatch) -> None:
    values = [*TINY[2:], "sync=bsp,asp", "cluster.compute=[1, 2]", "run.dir=my sweep"]
    if by == "package":
        sweep(*values, config_dir=OWN, quiet=False)
    elif by == "environment":
        with monkeypatch.context() as patched:
            patched.setenv("ASHL_CONFIG_DIR", OWN)
            assert main(["sweep", *values]) == 0
    else:
        assert main(["sweep", *TINY[:2], *values, "--baseline", "bsp"]) == 0
    assert main(["compare", "my sweep"]) == 0  # later, it says how both were made
    child = next(path.parent for path in place.glob("my sweep/*/summary.json"))
    assert main(["compare", str(child), "--out", "one run.html"]) == 0
    found = everything(place, capsys)
    assert set(names(found)) - {"train"} == {"compare", "export", "sweep", "ui"}
    all_run(found, monkeypatch)


def test_a_run_and_a_profile(place: Path, capsys, monkeypatch) -> None:
    assert main(["train", *TINY, "run.dir=my run"]) == 0
    assert main(["profile", *TINY, "run.dir=my profile"]) == 0
    found = everything(place, capsys)
    assert names(found) == ["compare", "train", "ui"]
    assert sum("my profile/" in command for command in found) == 2
    all_run(found, monkeypatch)


def test_advice(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        candidates, "RULES", tuple(rule for rule in RULES if rule.name in (BSP, "ASP"))
    )
    monkeypatch.setattr(study_sweep, "run_all", written)
    monkeypatch.setattr(leave_out, "predicted_s", lambda own, spec: 1.0)
    line = [
        "--config-dir",
        OWN,
        "model=tiny",
        "cluster=one_slow",
        "run.dir=my advice",
        "stop.epochs=8",
    ]
    assert main(["advise", *line, "--target", "0.9", "-q"]) == 0
    out = capsys.readouterr().out
    virtual, here, there = re.search(
        r"run it  here, in virtual time: (ashl .*)\n +here, emulated: (ashl .*)\n"
        r" +on your machines: (ashl .*)\n",
        out,
    ).groups()
    assert "runtime=sim" in virtual
    assert f"next: {virtual}" in out
    assert here.startswith("ashl train ")
    assert there.startswith("ashl launch --hosts 'my advice/hosts.txt' -- train ")
    assert "cluster=one_slow" in here
    assert "one_slow" not in there
    found = everything(place, capsys) | commands_in(out)
    assert {virtual, here, there} < found
    assert names(found) == ["advise", "launch", "train", "ui"]
    all_run(found, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        ["train", *TINY, "cluster.compute=[1, 2],[1, 3]"],
        ["train", *TINY[:2], "model=tiny,mlp"],
        ["model=tiny", *TINY[:2], "run.dir=my run", "runtime=sim", "--dry-run"],
    ],
)
def test_what_an_error_proposes(line: list[str], place: Path, capsys, monkeypatch) -> None:
    assert main(line) == 2
    found = everything(place, capsys)
    assert found
    all_run(found, monkeypatch)


@pytest.mark.parametrize("name", ["train", "profile", "sweep", "advise", "calibrate", "compare"])
def test_a_command_line_is_written_as_it_was_understood(name: str, place: Path) -> None:
    """Every option of every command whose line is kept, with values that a shell would
    take apart.
    """
    group: Any = typer.main.get_command(app)
    command, words, mute = (
        group.commands[name],
        [],
        ("debug", "quiet", "json", "cfg", "dry_run", "help", "config_file"),
    )
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in mute:
            value = "3" if parameter.name in NUMBERS else "a 'b"
            words += [parameter.opts[0], *([] if parameter.is_flag else [value])]
    words += ["x=a b", "y=[1, 2]"]
    before = command.make_context(name, [*words]).params
    line = shlex.split(str(typed_command(command.make_context(name, [*words]))))
    assert line[:2] == ["ashl", name]
    assert command.make_context(name, line[2:]).params == before


def test_a_line_of_launch_keeps_its_hosts(place: Path) -> None:
    group: Any = typer.main.get_command(app)
    words = ["--hosts", "my hosts", "--restarts", "2", "--", "train", "x=1"]
    outer = group.commands["launch"].make_context("launch", words)
    inner = group.commands["train"].make_context(
        "train", ["--config-dir", OWN, "x=1"], parent=outer
    )
    start = "ashl launch --hosts 'my hosts' --restarts 2 -- "
    assert str(typed_command(inner)) == f"{start}train --config-dir 'my options' x=1"
    assert (
        typed_command(inner).follow_up("train", "y=a b")
        == f"{start}train --config-dir 'my options' 'y=a b'"
    )
