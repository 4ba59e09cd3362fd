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
