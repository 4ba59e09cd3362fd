"""Every command that answers something prints one JSON document with `--json`, and else its tables
with the command to type next.
"""

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ashl.cli.app import COMMANDS, main
from ashl.cli.demo import SCENES
from ashl.cli.list import FAMILIES, STATUSES
from ashl.config.catalog import catalog, docstrings, target
from tests.study.test_replay import say_real

SHORT = "runtime=sim stop.steps=24 tracking=none cluster.compute=[1,2]"
# Command, keys of its document. `sweep` and `train` have run before, in `study` and `run`.
ANSWERS = {
    f"train {SHORT} run.dir=again": {"folder", "status", "steps", "workers", "next"},
    f"train {SHORT} --dry-run": {"plan", "host_s", "next"},
    "train runtime=sim --cfg": {"choices", "runtime"},
    "profile runtime=sim run.dir=costs": {"folder", "profile", "plan", "next"},
    "profile runtime=sim --dry-run": {"plan", "next"},
    f"sweep sync=bsp,asp {SHORT} run.dir=study": {"folder", "headline", "settings", "runs", "next"},
    f"sweep sync=bsp,asp {SHORT} --dry-run": {"folder", "settings", "missing", "host_s", "next"},
    f"sweep sync=bsp,asp {SHORT} --cfg": {"settings"},
    "advise runtime=sim cluster=one_slow sync=bsp --dry-run": {"candidates", "left_out", "next"},
    "compare study": {"report", "headline", "measure", "settings", "left_out", "next"},
    "calibrate cluster=one_slow --dry-run": {"combinations", "left_out", "folder", "next"},
    "replay real": {"run", "runs", "changes", "folder", "next"},
    "replay real sync=ssp": {"run", "runs", "changes", "folder", "next"},
    "export study": {"what", "rows"},
    "export study --out runs.csv": {"what", "rows", "out", "next"},
    "export single --to ddp --out scripts/train_ddp.py": {"to", "script", "out", "next"},
    "backtest": set(),  # a list of points
    "list": {"groups", "next"},
    "list sync": {"group", "options", "next"},
    "list sync ad_psgd": {"group", "option", "status", "card", "parameters", "next"},
    "doctor": {"checks", "broken", "next"},
    "launch --on torchrun --dry-run -- train cluster.num_workers=2": {
        "plan",
        "starts",
        "next",
    },
}
HEAVY = ("backtest",)
# they serve a page, run a rank, and pass on the output of a foreign command
WITHOUT = ("ui", "join", "watch")
LONG = ("demo",)  # its test is below


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep, a run that can be exported, and a real run."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert main(["sweep", "sync=bsp,asp", *SHORT.split(), "run.dir=study", "-q"]) == 0
        single = ["sync=bsp", "topology=all_reduce", "run.dir=single", "-q"]
        assert main(["train", *SHORT.split(), *single]) == 0
        events = ["tracking.events=all", "run.dir=real", "-q"]
        assert main(["train", *SHORT.split(), "sync=bsp", *events]) == 0
        say_real(Path("real"))
        Path("scripts").mkdir()
    return folder


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line, marks=[pytest.mark.slow] * (line in HEAVY), id=line.partition(" run.dir")[0]
        )
        for line in ANSWERS
    ],
)
def test_an_answer_is_one_document_or_tables_and_the_next_command(
    line: str, finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    name, *rest = shlex.split(line)
    capsys.readouterr()
    assert main([name, "--json", *rest]) == 0
    document = json.loads(capsys.readouterr().out)
    if isinstance(document, list):
        return
    assert ANSWERS[line] <= set(document)
    assert "next" not in set(document) - ANSWERS[line]
    if name in ("train", "profile") and rest[-1].startswith("run.dir="):
        rest[-1] += "2"  # a run folder is written once
    assert main([name, *rest]) == 0
    out = capsys.readouterr().out
    following = [text for text in out.splitlines() if text.startswith("next: ")]
    expected = document.get("next", "")
    if name in ("train", "profile") and rest[-1].startswith("run.dir="):
        expected = expected.replace(str(document["folder"]), rest[-1].removeprefix("run.dir="))
    assert following == ([f"next: {expected}"] if expected else [])
    assert out.count("\n") > 1 or "--out" in line


def test_every_command_with_an_answer_is_in_the_table() -> None:
    assert {line.partition(" ")[0] for line in ANSWERS} == set(COMMANDS) - {*WITHOUT, *LONG}


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("train sync=bps", 2),
        ("train --none", 2),
        ("compare nowhere", 2),
        ("train dataset=mnist", 3),
    ],
)
def test_an_error_is_a_document_too(
    line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": err.removeprefix("ashl: ").rstrip("\n"), "exit_code": code}


def test_every_sync_mode_has_a_family_and_a_status() -> None:
    for name, file in catalog()["sync"].items():
        card = docstrings(target(file))[0].splitlines()
        family, status = (text.partition(": ")[2].rstrip(".") for text in card[-2:])
        assert (card[-2][:8], card[-1][:8]) == ("Family: ", "Status: "), name
        assert family in FAMILIES
        assert status in STATUSES


@pytest.mark.usefixtures("workplace")
def test_the_command_after_a_card_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "sync", "--json"])
    options = json.loads(capsys.readouterr().out)["options"]
    useful = [own for own in options if own["status"] in ("recommended", "situational")]
    first = {own["family"]: own["name"] for own in reversed(useful)}
    assert set(first) == set(FAMILIES) - {"stages of ASHL"}
    for name in first.values():
        main(["list", "sync", name, "--json"])
        command = shlex.split(json.loads(capsys.readouterr().out)["next"])
        assert command[:2] == ["ashl", "train"]
        assert main([*command[1:], "--dry-run"]) == 0, command
        capsys.readouterr()


def test_the_demo_runs_its_commands(
    monkeypatch: pytest.MonkeyPatch, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = {"0.95": "0.5", "seed=0,1,2,3,4": "seed=0", "sync=bsp,ssp,asp,": "sync=bsp,"}
    short = []
    for scene in SCENES:
        command = f"{scene.command} stop.epochs=1 tracking=none"
        for long, brief in shorter.items():
            command = command.replace(long, brief)
        short.append(replace(scene, command=command))
    monkeypatch.setattr("ashl.cli.demo.SCENES", short)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert [line[2:] for line in out.splitlines() if line.startswith("$ ")] == [
        scene.command for scene in short
    ]
    assert out.count("next: ") == 1
    assert re.search(r"workers waited \d+\.\d % of them", out)
    assert main(["demo", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    answers = [scene["answer"] for scene in document["commands"]]
    assert answers[1]["wait_share"] < answers[0]["wait_share"]
    assert answers[2]["settings"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_takes_less_than_a_minute(workplace: Path) -> None:
    start_s = time.monotonic()
    assert main(["demo"]) == 0
    assert time.monotonic() - start_s < 60
