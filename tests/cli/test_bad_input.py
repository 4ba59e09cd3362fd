"""Faults that a run meets: one sentence with the fix, and the right exit code."""

import json
from types import SimpleNamespace

import pytest

from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.data.synthetic import Synthetic
from ashl.run import train as run
from tests.run_folders import adds_up


def test_more_workers_than_samples_are_timed_without_gradients(said) -> None:
    crowd = [
        "sync=asp",
        "cluster=homogeneous",
        f"cluster.compute={[1] * 300}",
        "dataset.batch_size=8",
    ]
    assert said(*crowd, "runtime.gradients=false", "stop.steps=600") == (0, "")


def test_a_run_that_ends_at_once_has_its_table(workplace, capsys) -> None:
    assert main(["train", "runtime=sim", "tracking=none", "stop.seconds=1e-12"]) == 0
    assert "profiling" in capsys.readouterr().out


MINE = """
from ashl.model.mlp import MLP
from ashl.option import option

@option
class Wide(MLP):
    '''A wide one.'''
"""


def test_allow_targets(said, workplace, monkeypatch) -> None:
    (workplace / "wide_models.py").write_text(MINE)
    monkeypatch.syspath_prepend(workplace)
    wanted = ["model._target_=wide_models.Wide", "sync=ssp", "run.dir=mine", "stop.steps=8"]
    assert said(*wanted) == (
        2,
        (
            "model names 'wide_models.Wide', outside of ashl; allow it with"
            " 'allow_targets=[wide_models]'"
        ),
    )
    assert said(*wanted, "allow_targets=[wide_models]") == (0, "")
    assert json.loads((workplace / "mine/summary.json").read_text())["steps"] == 8


FAULTY = """
from ashl.model.mlp import MLP
from ashl.option import option

@option
class Unmade(MLP):
    def __post_init__(self):
        raise RuntimeError("not like this")

@option
class Unbuilt(MLP):
    def build(self, sample_shape, num_classes):
        return sample_shape.nothing
"""


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("x = = 3", "X", "cannot be imported: SyntaxError: invalid syntax ({file}, line 1)"),
        (
            "import nowhere",
            "X",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere' ({file}, line 1)",
        ),
        ("raise SystemExit(3)", "X", "cannot be imported: SystemExit: 3 ({file}, line 1)"),
        (
            "from torch import nn\nclass X(nn.Module):\n    def __init__(self, hidden):\n        exit(5)",
            "X",
            "failed, not ashl: SystemExit: 5 ({file}, line 4)",
        ),
        (FAULTY, "Unmade", "cannot be made: RuntimeError: not like this ({file}, line 8)"),
        (
            FAULTY,
            "Unbuilt",
            "failed, not ashl: AttributeError: 'tuple' object has no attribute 'nothing' ({file}",
        ),
    ],
)
def test_a_fault_of_the_users_own_is_told_as_that(
    text, name, says, said, workplace, monkeypatch
) -> None:
    module = f"faulty_{len(text)}_{name.lower()}"
    (workplace / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(workplace)
    code, sentence = said(f"model._target_={module}.{name}", f"allow_targets=[{module}]")
    assert says.format(file=workplace / f"{module}.py") in sentence
    assert code == 2


HALVES = """
import torch
from torch.utils.data import Dataset

class Uneven(Dataset):
    def __init__(self, train):
        self.count = 640 if train else 0

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.zeros(4), number % 2

class Complex(Uneven):
    def __init__(self, train):
        self.count = 640

    def __getitem__(self, number):
        return torch.zeros(4, dtype=torch.complex64), number % 2

class Unlike(Uneven):
    def __init__(self, train):
        self.count = 640
        self.size = 4 if train else 3

    def __getitem__(self, number):
        return torch.zeros(self.size), number % 2
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Uneven", "dataset: Uneven has a half without items"),
        ("Complex", "Complex's input 0 is complex; give its real and imaginary parts as float32"),
        (
            "Unlike",
            "the inputs of Unlike are (4,) of float32 in the training half and (3,) of float32 in",
        ),
    ],
)
def test_a_data_set_of_the_users_own_without_items_or_with_wrong_ones(
    name, says, said, workplace, own_module
) -> None:
    own_module("halves", HALVES)
    file = workplace / "options/dataset/halves.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"defaults: [_own]\n_target_: halves.{name}")
    own = ["--config-dir", "options", "dataset=halves", "model=linear", "sync=bsp"]
    code, sentence = said(*own, "allow_targets=[halves]")
    assert says in sentence
    assert code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("_target_: mine", "model has a `_target_` that names no class (mine)"),
        ("width: 3", "model has no `_target_`"),
        ("defaults:\n_target_: mine.X", "tiny.yaml: `defaults` must be a list, for example"),
        ("defaults: 3\n_target_: mine.X", "tiny.yaml: `defaults` must be a list, for example"),
        ("defaults: [tiny]\n_target_: mine.X", "tiny.yaml starts from itself; correct its"),
        ("defaults: [other]\n_target_: mine.X", "starts from itself; correct its `defaults`"),
    ],
)
def test_an_option_file_of_the_users_own_with_a_mistake(
    text, says, said, workplace, capsys
) -> None:
    folder = workplace / "options/model"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text(text)
    (folder / "other.yaml").write_text("defaults: [tiny]")
    code, sentence = said("--config-dir", "options", "model=tiny", "sync=bsp")
    assert says in sentence
    assert code == 2
    if "defaults" in text:
        assert main(["list", "model", "tiny", "--config-dir", "options"]) == 2
        assert "`defaults`" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["sync=ssp", "sync=backup", "sync=local_sgd topology=all_reduce"])
def test_a_loss_that_is_no_number(mode: str, said, workplace) -> None:
    code, sentence = said("optimizer.lr=1e30", "run.dir=run", *mode.split())
    summary = json.loads((workplace / "run/summary.json").read_text())
    assert code == 1
    whose = "the workers' mean loss became" if "all_reduce" in mode else "the loss of worker"
    assert f"the run diverged: {whose}" in sentence
    assert "near step" in sentence
    assert "lower optimizer.lr" in sentence
    assert (summary["status"], summary["stages"][0]["exit_reason"]) == ("diverged", "diverged")
    assert "near step" in summary["exit_reason"]
    assert summary["final"]["test_accuracy"] is not None
    assert adds_up(summary)
    assert (workplace / "run/trace.json.gz").is_file()


def test_choco_with_too_large_a_step_diverges_and_says_why(said) -> None:
    code, sentence = said(
        "topology=gossip",
        "sync=choco",
        "compression=topk",
        "compression.ratio=0.01",
        "sync.gamma=3",
        "stop.steps=2000",
    )
    assert code == 1
    assert "the run diverged: the loss of worker" in sentence
    assert "sync.gamma=3 is too large for this compression" in sentence


def test_a_second_run_into_the_same_folder(said, workplace) -> None:
    assert said("run.dir=run", "stop.steps=8") == (0, "")
    before = {file.name: file.read_bytes() for file in (workplace / "run").iterdir()}
    assert said("run.dir=run", "stop.steps=9") == (
        2,
        "run already holds a run; choose another run.dir.",
    )
    assert {file.name: file.read_bytes() for file in (workplace / "run").iterdir()} == before


def test_a_run_and_a_sweep_do_not_share_a_folder(said, workplace) -> None:
    """A folder with both would be compared as a sweep, without the run."""
    assert said("run.dir=run", "stop.steps=8") == (0, "")
    grid = ["sweep", "-q", "--jobs", "1", "runtime=sim", "tracking=none", "sync=bsp", "seed=0"]
    before = {file.name for file in (workplace / "run").iterdir()}
    assert main([*grid, "stop.steps=8", "run.dir=run"]) == 2
    assert {file.name for file in (workplace / "run").iterdir()} == before
    (workplace / "grid").mkdir()
    (workplace / "grid/sweep.json").write_text("{}")
    assert said("run.dir=grid", "stop.steps=8") == (
        2,
        "grid already holds a sweep; choose another run.dir.",
    )


@pytest.mark.parametrize("option", ["--quiet", "--dry-run", "--search=1"])
def test_a_second_sweep_does_not_replace_the_first(option: str, workplace, capsys) -> None:
    (workplace / "grid").mkdir()
    record = workplace / "grid/sweep.json"
    record.write_text('{"settings": [{"hash": "another"}]}')
    asked = ["runtime=sim", "tracking=none", "sync=bsp,asp", "stop.steps=8", "run.dir=grid"]
    assert main(["sweep", option, *asked]) == 2
    assert capsys.readouterr().err.startswith(
        "ashl: grid already holds a sweep with other settings; choose another run.dir"
    )
    assert "another" in record.read_text()


def test_two_runs_of_the_same_second(workplace, monkeypatch) -> None:
    monkeypatch.setattr(run.time, "strftime", lambda how: "now")
    config = compose(["runtime=sim"])
    assert len({run.make_run_folder(config, SimpleNamespace(name="x")) for _ in range(2)}) == 2


@pytest.mark.parametrize("place", ["file", "file/run", "x" * 300])
def test_a_folder_that_cannot_be_written(place: str, said, workplace) -> None:
    (workplace / "file").write_text("mine")
    code, sentence = said(f"run.dir={place}", "stop.steps=8")
    assert code in (1, 2)
    assert place in sentence
    assert "choose another run.dir" in sentence
    assert "already holds a run" not in sentence
    assert (workplace / "file").read_text() == "mine"


@pytest.mark.parametrize("how", ["preset", "option", "sweep"])
def test_no_file_allows_code_to_be_imported(how: str, said, workplace, monkeypatch) -> None:
    monkeypatch.syspath_prepend(workplace)
    (workplace / "evil.py").write_text("raise AssertionError('imported')")
    own = {
        "preset": (
            "experiment/mine.yaml",
            "# @package _global_\nallow_targets: [evil]\nmodel: {_target_: evil.X}\n",
        ),
        "option": (
            "tracking/mine.yaml",
            "# @package _global_\nallow_targets: [evil]\ntracking: {_target_: evil.X}\n",
        ),
        "sweep": (
            "experiment/mine.yaml",
            "# @package _global_\nsweep: [{allow_targets: '[evil]', sync: bsp}]\n",
        ),
    }[how]
    path = workplace / "options" / own[0]
    path.parent.mkdir(parents=True)
    path.write_text(own[1])
    group = own[0].split("/")[0]
    if how == "sweep":
        assert main(["sweep", "--config-dir", "options", "experiment=mine"]) == 2
        return
    code, sentence = said("--config-dir", "options", f"{group}=mine")
    assert code == 2
    assert (
        "a file cannot allow code to be imported; if you trust it, type 'allow_targets=[evil]'"
        " on the" in sentence
    )


def test_a_data_set_that_does_not_fit(said, monkeypatch) -> None:
    def load(self: Synthetic) -> None:
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr(Synthetic, "load", load)
    code, sentence = said("dataset=synthetic")
    assert code == 2
    assert sentence.startswith("there is not enough memory; take a smaller dataset.batch_size")


@pytest.mark.parametrize("command", ["advise --budget inf", "calibrate --seconds inf"])
def test_no_end_of_seconds(command: str, capsys) -> None:
    assert main(command.split()) == 2
    assert "should be less than or equal to 10000000" in capsys.readouterr().err
