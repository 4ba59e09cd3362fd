"""Models and data sets of plain torch, in a file of the working directory, and what is said where
they do not fit.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ashl.cli.app import main
from tests.own_parts import choose_own

CODE = '''
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """A layer."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def net(sample_shape, num_classes, width):
    return nn.Sequential(nn.Linear(sample_shape[0], width), nn.Tanh(), nn.Linear(width, num_classes))


class Ring(Dataset):
    """Inside or outside; each look at a point finds it elsewhere."""

    def __init__(self, train, noise=0.05):
        self.points = torch.randn(240, 2, generator=torch.Generator().manual_seed(int(train)))
        self.noise = noise

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i] + self.noise * torch.randn(2), int(self.points[i].norm() > 1.2)


def distances():
    points = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    pairs = [(point.double().numpy(), float(point.norm())) for point in points]
    return pairs[:160], pairs[160:]


def number():
    return 3


def pixels():
    return [(torch.zeros(2, dtype=torch.uint8), 0)] * 40, [(torch.zeros(2), 0)]


def uneven():
    return [(torch.zeros(2), torch.zeros(1 + i % 2)) for i in range(40)], [(torch.zeros(2), torch.zeros(1))]


class Crash(Net):
    def forward(self, x):
        return self.missing(x)


class Other:
    pass
'''
SMALL = ["runtime=sim", "tracking=none", "sync=bsp", "stop.epochs=2", "-q"]


@pytest.fixture
def place(own_module, capsys):
    """A folder with one module, on no path; writes options, trains, and returns the summary or what
    was said.
    """
    own_module("mymodels", CODE)

    def train(*overrides: str, **options: str) -> dict | str:
        own = choose_own(
            "mymodels", **{"model": "mymodels.Net", "dataset": "mymodels.Ring"} | options
        )
        shutil.rmtree("out", ignore_errors=True)
        code = main(["train", *own, "run.dir=out", *SMALL, *overrides])
        err = capsys.readouterr().err
        assert (code == 0) == (err == ""), err
        return err if code else json.loads(Path("out/summary.json").read_text())

    return train


def test_a_class_of_each_runs_and_what_is_drawn_while_reading_follows_from_the_seed(place) -> None:
    first = place("stop.epochs=8")
    assert first["final"]["test_accuracy"] > 0.6
    torch.manual_seed(99)
    assert place("stop.epochs=8")["params_sha256"] == first["params_sha256"]
    assert (
        place("stop.epochs=8", dataset="mymodels.Ring\nnoise: 0.0")["params_sha256"]
        != first["params_sha256"]
    )


def test_functions_make_them_too_and_values_are_fitted(place) -> None:
    fitted = place(
        "task=regression",
        model="mymodels.net\nwidth: 8",
        dataset="mymodels.distances\nbatch_size: 8",
    )
    assert (fitted["metric"], fitted["final"]["test_accuracy"]) == ("r2", None)


def test_the_processes_of_a_run_find_them(place) -> None:
    two = [
        "topology=all_reduce",
        "cluster=homogeneous",
        "cluster.compute=[1,1]",
        "cluster.step_s=0.001",
    ]
    simulated = place(*two)
    real = place(*two, "runtime=local")
    assert real["params_sha256"] == simulated["params_sha256"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "mymodels.Net\nwidht: 3"}, "unexpected keyword argument 'widht'; its keys are: width"),
        ({"model": "mymodels.net"}, "net() missing a required argument: 'width'"),
        ({"model": "mymodels.number"}, "number returns int, and should return a torch.nn.Module"),
        ({"model": "mymodels.Other"}, "which is no model: it has no 'build'"),
        ({"model": "mymodels.Crash"}, "has no attribute 'missing'"),
        ({"model": "mymodels.nn.Linear"}, "no module 'mymodels.nn'"),
        ({"model": "os.system\ncommand: touch was_here"}, "outside of ashl; allow it with"),
        ({"model": "ashl.run.train.train"}, "which is not a class defined in ashl.run.train"),
        ({"dataset": "mymodels.number"}, "number should take train=True or False, or return a pair"),
        ({"dataset": "mymodels.pixels"}, "input 0 is uint8; give float32"),
        ({"dataset": "mymodels.uneven"}, "targets differ in shape, for example (1,) and (2,)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_a_sentence(
    place, options: dict[str, str], words: str
) -> None:
    said = place(**options)
    assert words in said
    assert said.count("\n") == 1
    assert not Path("was_here").exists()
