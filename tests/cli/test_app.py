"""The commands: exit codes, one sentence for each mistake, and how little is imported before a
command runs.
"""

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import ashl
import ashl.run
from ashl.cli.__main__ import start
from ashl.cli.app import COMMANDS, main
from ashl.cli.train import show_starting
from ashl.config import catalog
from ashl.errors import AshlError, DataMissingError, UsageError
from ashl.tracking import jsonl
from tests.identities.test_limits import LIMITS, OTHER_MODELS
from tests.run_folders import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch):
    """A stand-in for `ashl.run.train`: the arguments of the command, and its return value."""
    calls: list = []
    stand_in = SimpleNamespace(
        calls=calls,
        result=0,
        run=lambda config, overrides, quiet, silent, resume, command: (
            calls.append((config, overrides, quiet, resume, command))
            or SimpleNamespace(code=stand_in.result, run_dir=None)
        ),
        dry_run=lambda config, overrides: calls.append(config) or SimpleNamespace(leads=False),
    )
    monkeypatch.setitem(sys.modules, "ashl.run.train", stand_in)
    monkeypatch.setattr(ashl.run, "train", stand_in, raising=False)
    return stand_in


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, json; from ashl.cli.app import main; code = main(['--help']);"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    code, modules = json.loads(done.stderr)
    assert code == 0
    assert all(command in done.stdout for command in COMMANDS)
    assert not {"torch", "torchvision", "mlflow", "hydra", "omegaconf", "numpy", "pydantic"} & set(
        modules
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fills_the_lines_of_any_terminal(name: str, monkeypatch, capsys) -> None:
    """The line ends of a docstring are not those of its help."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([name, "--help"]) == 0
    about = capsys.readouterr().out.partition("╭")[0]
    for paragraph in (COMMANDS[name].__doc__ or "").split("\n\n"):
        assert " ".join(paragraph.split()) in " ".join(about.split())
    lines = [line.strip() for line in about.splitlines()]
    short = [line for line, after in pairwise(lines) if line and after]
    assert all(len(line) > 120 for line in short), short


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("trian", "There is no command trian; did you mean train?"),
        ("xyz", "`ashl --help`"),
        ("sync=bsp seed=1", "write `ashl train sync=bsp seed=1`"),
        ("train --confg", "There is no option --confg; did you mean --config?"),
        ("train --seed 3", "as in seed=3."),
        ("train --foo", "There is no option --foo; `ashl train --help` shows what there is."),
        ("train --target 0.9", "as in stop.target_accuracy=0.9."),
        ("sweep --lr=0.1,0.2", "as in optimizer.lr=0.1,0.2."),
        ("sweep --sync=bsp,asp", "settings are written without dashes, as in sync=bsp,asp."),
        ("train --name 'a b'", "settings are written without dashes, as in 'name=a b'."),
        ("train --topology", "without dashes, as in topology=parameter_server."),
        ("train --quite", "There is no option --quite; did you mean --quiet?"),
        ("export --figures sw", "no option --figures; `ashl export --help` shows what there is."),
        ("launch --on foo -- train", "unknown engine; take one of ssh, slurm, "),
        ("sweep --search 0", "; `ashl sweep --help` shows what there is."),
        ("sweep seed=choice()", "or in brackets"),
        ("sweep sync=bsp,", "it ends with a comma; write a list without blanks"),
        ("train cluster.compute=[1,2", "do not match"),
        ("train cluster.compute=3 runtime=sim", "for example 'cluster.compute=[3]'"),
        ("train name=a(b", "quote the value twice, as in 'name="),
        ("train --config-dir", "requires an argument"),
        ("train sync=spp", "did you mean ssp?"),
        ("train seed=1,2", "`ashl sweep seed=1,2`"),
        ("list snyc", "did you mean sync?"),
        ("list sync spp", "did you mean ssp?"),
        ("list a b c", "unexpected extra argument"),
        ("list --config-dir nowhere", "there is no such folder"),
        ("ui --port abc", "Invalid value for '--port': it should be a valid integer; `ashl ui"),
        ("ui", "run `ashl train` first"),
    ],
)
def test_misuse_is_one_sentence_and_two(args: str, says: str, capsys, workplace) -> None:
    assert main(shlex.split(args)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert says in err
    assert err.startswith("ashl: ")
    assert err.count("\n") == 1
    assert not any(word in err for word in ("EOF", "BRACKET", "expecting", "viable"))


def test_train_hands_over(run) -> None:
    run.result = 3
    assert main(["train", "sync=bsp", "-q", "seed=4"]) == 3
    config, overrides, quiet, resume, command = run.calls[0]
    assert (config["seed"], overrides, quiet, resume) == (4, ["sync=bsp", "seed=4"], True, None)
    assert command == "ashl train sync=bsp seed=4"


def test_list_shows_a_group(capsys) -> None:
    assert main(["list", "sync"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines if line.strip()]
    assert set(catalog.catalog()["sync"]) <= set(first)
    assert first.count("bsp") == 1
    assert not [line for line in lines if "default" in line], (
        "the default schedule names its stages' modes"
    )


def test_cfg_prints_what_can_be_read_back(run, capsys) -> None:
    assert main(["train", "--cfg", "cluster.compute=[1,2]", "name='ä'"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["cluster"]["compute"] == [1, 2]
    assert yaml.safe_load(out)["name"] == "ä"
    assert "compute: [1, 2]" in out
    assert not run.calls


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (AshlError("It broke."), 1, "ashl: It broke."),
        (UsageError("Not so."), 2, "ashl: Not so."),
        (DataMissingError("Not there."), 3, "ashl: Not there."),
        (KeyboardInterrupt(), 130, "ashl: interrupted"),
        (KeyboardInterrupt("it is kept"), 130, "ashl: interrupted; it is kept"),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "ashl: /x cannot be used (permission denied); name another path.",
        ),
        (TimeoutError(110, "Connection timed out"), 1, "ashl: Connection timed out."),
        (
            ZeroDivisionError("by zero"),
            1,
            "ashl: ZeroDivisionError: by zero; this is a bug in ashl, --debug shows where.",
        ),
        (
            EOFError("no more"),
            1,
            "ashl: EOFError: no more; this is a bug in ashl, --debug shows where.",
        ),
    ],
)
def test_exit_codes(error: BaseException, code: int, says: str, run, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "ashl.config.compose.compose", lambda *_: {}
    )  # composition has tests of its own

    def fail(*_, **__) -> int:
        raise error

    run.run = fail
    assert _code(["train"]) == code
    assert capsys.readouterr().err.strip() == says
    if code != 130:
        assert _code(["train", "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


def _code(args: list[str]) -> object:
    try:
        return main(args)
    except SystemExit as error:
        return error.code


def test_pages_of_list_fit_80_columns_and_cut_no_key(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for page in ([], ["sync"], ["sync", "ssp"], ["cluster", "four_nodes"]):
        assert main(["list", *page]) == 0
        out = capsys.readouterr().out
        assert [line for line in out.splitlines() if len(line.rstrip()) > 80] == []
    keys = [own.key for own in catalog.parameters(catalog.catalog()["cluster"]["four_nodes"])]
    assert all(f"cluster.{key} " in out for key in keys)


CAVEATS = {"sync=asylpg", "sync=spy"}  # their limits are no other method


def marked_limits() -> set[str]:
    """Return each `GROUP=OPTION` with a row in the table of limits, or with a test that is marked."""
    found = {option for row in (*LIMITS, *OTHER_MODELS) for option in row[0].split()}
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        marks = re.findall(r"^@pytest\.mark\.limit\(([^)]*)\)$", file.read_text(), re.M)
        found |= set(re.findall(r'"([^"]*)"', " ".join(marks)))
    return found


def test_every_limit_of_a_card_is_held_by_a_test() -> None:
    """Every option whose card states a limit has a test of it, except codecs and caveats."""
    held, options = marked_limits(), catalog.catalog()
    assert held <= {f"{group}={option}" for group, names in options.items() for option in names}
    said = {
        f"{group}={option}"
        for group, names in options.items()
        for option, file in names.items()
        if group != "compression"
        and re.search(r"^Limits?:", "\n".join(catalog.docstrings(catalog.target(file))), re.M)
    }
    assert said - held == CAVEATS


def test_list_and_cfg_agree_on_what_is_default(capsys) -> None:
    assert main(["train", "--cfg"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["choices"] == {
        group: option for group, option in catalog.effective_defaults().items() if option
    }
    assert "sync" not in config, "no sync mode of its own ever runs"
    assert main(["list"]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert all(
        [group, option or "-"] in lines for group, option in catalog.effective_defaults().items()
    )


@pytest.mark.parametrize("group", catalog.catalog())
def test_every_option_has_a_card(group: str, capsys) -> None:
    for number, (option, file) in enumerate(catalog.catalog()[group].items()):
        about = catalog.summary(file)
        assert about.endswith((".", "?")), f"{file}: {about!r} is not a whole sentence"
        if number >= 2:
            continue
        assert main(["list", group, option]) == 0
        out = capsys.readouterr().out
        assert f"{group}={option}" in out
        for parameter in catalog.parameters(file):
            assert parameter.key.rpartition(".")[2] in out


def test_doctor_reports_and_fails_only_on_what_is_broken(capsys, workplace, monkeypatch) -> None:
    (workplace / "data/MNIST/raw").mkdir(parents=True)
    (workplace / "runs").mkdir()
    (workplace / "runs/mlflow.db").write_text("no database")
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert all(word in out for word in ("torch", "gloo", "cores", "MNIST", "FAIL: DatabaseError"))
    assert "Traceback" not in out + err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("ASHL_DATA", "elsewhere")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("is missing", "http://127.0.0.1:9"))


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    own = os.environ | {"ASHL": f"{sys.executable} -m ashl.cli"} | environment
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env=own
    )


def test_completion_in_bash() -> None:
    done = shell(
        "$ASHL", _ASHL_COMPLETE="complete_bash", COMP_WORDS="ashl list sync ss", COMP_CWORD="3"
    )
    assert done.stdout.split() == ["ssp"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("train runtime=sim run.dir=/proc/x", "Cannot write to the run folder /proc/x"),
        (
            "sweep runtime=sim seed=0,1 run.dir=/proc/x",
            "cannot write to the sweep's folder /proc/x",
        ),
        ("calibrate run.dir=/proc/x", "Cannot write to the run folder /proc/x/profile"),
        ("watch --folder /proc/x -- true", "cannot make the folder /proc/x"),
    ],
)
def test_a_place_that_cannot_be_written(args: str, says: str, workplace: Path, capsys) -> None:
    """It is a usage error, of all commands."""
    assert main([*args.split(), *(["tracking=none"] if "run.dir" in args else [])]) == 2
    err = capsys.readouterr().err
    assert f"ashl: {says} (no such file or directory); " in err
    assert "Traceback" not in err


def test_a_home_folder_that_cannot_be_written(workplace: Path) -> None:
    write_run(workplace / "run")
    ended = shell(
        "$ASHL compare run", HOME="/proc", XDG_CONFIG_HOME="/proc", XDG_CACHE_HOME="/proc"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupt_while_the_command_line_is_imported(capsys, monkeypatch) -> None:
    def interrupted(name: str, *_: object) -> None:
        if name == "ashl.cli.app":
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupted)])
    monkeypatch.delitem(sys.modules, "ashl.cli.app")
    assert start() == 130
    assert capsys.readouterr().err == "ashl: interrupted\n"


def test_a_full_disk_under_a_sweep(workplace: Path, capsys, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "fsync", full)
    assert main(["sweep", "runtime=sim", "seed=0,1", "run.dir=grid", "tracking=none"]) == 1
    reason = "cannot be written (no space left on device); free some space."
    assert capsys.readouterr().err == f"ashl: grid/sweep.json {reason}\n"


@pytest.mark.parametrize("command", ["list", "list --json", "--help"])
def test_a_full_standard_output(command: str) -> None:
    ended = shell(f"$ASHL {command} >/dev/full")
    reason = "(no space left on device); free some space."
    assert ended.stderr == f"ashl: standard output cannot be written {reason}\n"
    assert ended.returncode == 1


@pytest.mark.parametrize("command", ["$ASHL list | true", "$ASHL list >&-"])
def test_an_output_that_nobody_reads(command: str) -> None:
    complaint = shell(command).stderr
    assert "Traceback" not in complaint
    assert "Exception ignored" not in complaint


def test_a_terminal_hears_of_it_before_torch_is_there(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said, seen = Terminal(), []
    monkeypatch.setattr(sys, "stderr", said)
    with show_starting():
        seen.append(said.getvalue())
    assert seen == ["ashl: starting ..."]
    assert said.getvalue().endswith("\r\x1b[2K"), "and nothing is left of it"


# --- in a checkout
# --------------------------------------------------------------------------------------------------

UNINSTALLED = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""  # as a sitecustomize.py: what an editable installation finds, a plain one does not


def in_checkout(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Run a Python command in the checkout; its ashl/ then shadows the installed package."""
    (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)
    path = os.pathsep.join(
        [str(tmp_path), *([env.pop("PYTHONPATH")] if "PYTHONPATH" in env else [])]
    )
    own = os.environ | {"PYTHONPATH": path} | env
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("module", ["ashl", "ashl.cli"])
def test_modules_run_in_a_checkout_that_is_not_what_is_installed(
    module: str, tmp_path: Path
) -> None:
    done = in_checkout(tmp_path, "-m", module, "train", "--cfg", "sync=bsp")
    assert done.returncode == 0, done.stderr
    assert "sync: bsp" in done.stdout
