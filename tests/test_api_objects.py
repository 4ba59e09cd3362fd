"""Objects and keywords passed to `ashl.train`: a model, data, a loss and an optimizer of plain
torch.
"""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ashl
from ashl.errors import UsageError

CELL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.hidden, self.last = nn.Linear(2, width), nn.Linear(width, num_classes)

    def forward(self, points):
        return self.last(self.hidden(points).tanh())


def loss(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["beta"])
                p.sub_(momentum.sign(), alpha=group["lr"])


class Crash(Net):
    def forward(self, points):
        return self.missing(points)
"""
FEW = {"runtime": "sim", "tracking": "none", "stop.steps": 40, "sync": "asp"}


@pytest.fixture
def cell() -> ModuleType:
    """A notebook's `__main__` after a cell that defines classes: it has no file."""
    module = ModuleType("__main__")
    exec(compile(CELL, "<ipython-input-1>", "exec"), vars(module))
    return module


def ring(count: int, seed: int) -> TensorDataset:
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


DATA = ring(240, 0), ring(80, 1)


@pytest.mark.parametrize(
    ("keywords", "overrides"),
    [
        ({"sync": "asp", "seed": 3}, ["sync=asp", "seed=3"]),
        (
            {"cluster": "homogeneous", "cluster.compute": [1, 2.5], "model.hidden": (4,)},
            ["cluster=homogeneous", "cluster.compute=[1,2.5]", "model.hidden=[4]"],
        ),
        (
            {"run.save_weights": False, "stop.seconds": None},
            ["run.save_weights=false", "stop.seconds=null"],
        ),
        (
            {"cluster.events": [{"time_s": 0.1, "worker": 0, "compute": 3}]},
            ["cluster.events=[{time_s: 0.1, worker: 0, compute: 3}]"],
        ),
        ({"optimizer": "adamw", "optimizer.lr": 1e-3}, ["optimizer=adamw", "optimizer.lr=0.001"]),
        ({"name": "it's a run"}, ["name=it's a run"]),
    ],
)
def test_keywords_are_settings(workplace: Path, keywords: dict, overrides: list[str]) -> None:
    fixed = ("runtime=sim", "tracking=none", "stop.steps=8")
    left = ashl.train(*fixed, **keywords)
    config = (left.folder / "config.yaml").read_text()
    right = ashl.train(*fixed, *overrides)
    assert config == (right.folder / "config.yaml").read_text()
    assert left.summary["params_sha256"] == right.summary["params_sha256"]


def test_objects_of_a_cell_train_in_virtual_time(workplace: Path, cell: ModuleType) -> None:
    run = ashl.train(model=cell.Net, dataset=DATA, loss=cell.loss, optimizer=cell.Lion, **FEW)
    assert (run["steps"], run["status"], run["metric"]) == (40, "finished", "accuracy")
    assert (run["name"], run.plan["allow_targets"]) == ("asp-Net-dataset", ["python_session"])
    model = run.model("best")
    assert isinstance(model, cell.Net)
    points, classes = DATA[1].tensors
    assert (
        float((model(points).argmax(1) == classes).double().mean()) == run["best"]["test_accuracy"]
    )
    wider = ashl.train("model.width=16", model=cell.Net, dataset=DATA, **FEW)
    assert wider.model().hidden.out_features == 16
    partial = ashl.train(model=functools.partial(cell.Net, width=16), dataset=DATA, **FEW)
    assert partial["params_sha256"] == wider["params_sha256"]
    with pytest.raises(UsageError, match="an object of the Python session that began the run"):
        ashl.load(run.folder).model(allow_targets=["python_session"])
    assert "python_session" not in sys.modules


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss, functional.cross_entropy, None]
)
def test_losses_of_torch_are_the_task_s_own(workplace: Path, cell: ModuleType, loss) -> None:
    found = ashl.train(model=cell.Net, dataset=DATA, loss=loss, **FEW)
    assert (
        found["params_sha256"] == ashl.train(model=cell.Net, dataset=DATA, **FEW)["params_sha256"]
    )


def test_values_as_targets_are_a_regression(workplace: Path) -> None:
    halves = [TensorDataset(half.tensors[0], half.tensors[0].norm(dim=1)) for half in DATA]
    assert ashl.train(model=nn.Linear(2, 1), dataset=halves, **FEW)["metric"] == "r2"


REAL = {
    "runtime": "local",
    "topology": "all_reduce",
    "cluster": "homogeneous",
    "cluster.compute": [1, 1],
}


def test_processes_are_refused_what_they_cannot_import(workplace: Path, cell: ModuleType) -> None:
    real = {**FEW, **REAL, "sync": "bsp"}
    with pytest.raises(
        UsageError, match=r"model=Net is an object of this Python session.*move it into a file"
    ):
        ashl.train(model=cell.Net, **real)
    with pytest.raises(UsageError, match=r"dataset=dataset is an object .* or take runtime=sim"):
        ashl.train(dataset=DATA, **real)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"model": 3}, "model is int; give a torch.nn.Module"),
        ({"dataset": DATA[0]}, r"dataset is TensorDataset; give a pair \(train, test\)"),
        ({"loss": "mse"}, "is no loss; give a function or a module, or an option"),
        ({"optimizer": 0.1}, "optimizer is float; give the name of an option, or a class"),
        ({"model": functools.partial(nn.Linear, 2, 2)}, "name the arguments of functools.partial"),
        ({"optimizer": torch.optim.LBFGS}, "argument: 'closure'"),
        ({"sync": nn.ReLU()}, "sync=ReLU: a setting is a text"),
    ],
)
def test_what_stands_for_no_option_is_said(workplace: Path, objects: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ashl.train(**{**FEW, **objects})


def test_a_fault_of_an_object_is_its_own(workplace: Path, cell: ModuleType) -> None:
    with pytest.raises(
        UsageError, match=r"model __main__\.Crash failed.*has no attribute 'missing'"
    ):
        ashl.train(model=cell.Crash, dataset=DATA, **FEW)


def test_a_record_of_another_s_runs_no_code(workplace: Path) -> None:
    run = ashl.train(sync="bsp", runtime="sim", tracking="none", **{"stop.steps": 8})
    plan = json.loads((run.folder / "plan.json").read_text())
    plan["model"] = {"_target_": "os.system", "command": "touch was_here"}
    plan["allow_targets"] = ["os"]
    (run.folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="outside of ashl; allow it"):
        ashl.load(run.folder).model()
    assert not Path("was_here").exists()


def test_a_notebook_shows_a_table(workplace: Path) -> None:
    run = ashl.train(sync="bsp", runtime="sim", tracking="none", name="a<b", **{"stop.steps": 8})
    shown = run._repr_html_()
    assert "<th>a&lt;b: " in shown
    assert "<td>finished</td>" in shown
    shown = ashl.load("runs")._repr_html_()
    assert shown.count("<tr") == 2
    assert "<td>a&lt;b</td>" in shown
    died = {"schema": 1, "status": "failed", "exit_reason": "was killed by SIGKILL", "seed": 0}
    (run.folder / "summary.json").write_text(json.dumps(died))
    found = ashl.load(run.folder)
    assert repr(found).startswith(f"<Run {run.folder.name}, failed after 0 s: ")
    assert f"<th>{run.folder.name[:8]}" in found._repr_html_()
