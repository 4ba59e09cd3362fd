"""Targets that do not count, and classes as users number them, against plain torch."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ashl.cli.app import main
from ashl.tracking import jsonl
from tests.own_parts import choose_own

CODE = '''
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from ashl.option import option
from ashl.task.contract import Task


class Answers(Dataset):
    """Tokens of which between none and all count, mark where one does not; every fourth sample has none that does."""

    def __init__(self, train, mark=-100):
        g = torch.Generator().manual_seed(int(train))
        self.x = torch.randint(0, 12, (240, 8), generator=g)
        self.y = (self.x + 1) % 12
        for i in range(240):
            self.y[i, : (i * 5) % 9 if i % 4 else 8] = mark

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Tok(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.h(self.e(x))


class Points(Dataset):
    """Points of two classes, called as `classes` says; every `skip`-th does not count."""

    def __init__(self, train, classes=(0, 1), skip=None):
        g = torch.Generator().manual_seed(int(train))
        self.x = torch.randn(240, 2, generator=g)
        self.y = torch.tensor(classes)[(self.x[:, 0] > 0).long() * (len(classes) - 1)]
        if skip is not None:
            self.y[::skip] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


def points(sample_shape, num_classes):
    return nn.Linear(2, num_classes)


def words(train, first=0):
    g = torch.Generator().manual_seed(int(train))
    x = torch.randint(0, 50, (240, 6), generator=g)
    return [(a, int(a.float().mean() > 25)) for a in x]


class Bag(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.e, self.h = nn.EmbeddingBag(50, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.h(self.e(x))


@option
class Smooth(Task):
    metric: ClassVar[str] = ""
    ignore_index: ClassVar[int] = -1

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=0.1)
'''
SMALL = [
    "runtime=sim",
    "tracking=none",
    "cluster=homogeneous",
    "cluster.compute=[1,1]",
    "optimizer.lr=0.1",
]
ANSWERS = [
    "dataset.partition=interleaved",
    "dataset.batch_size=8",
    "stop.steps=20",
    "run.start_from=start.pt",
]
PORTS = ["cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.001"]
IN_ROUNDS = (
    ["sync=bsp"],
    ["sync=bsp", "sync.exchange=difference", "optimizer.momentum=0"],
    ["sync=bsp", "topology=all_reduce", "sync.exchange=gradient"],
    ["sync=local_sgd", "sync.local_steps=1", "topology=all_reduce", "optimizer.momentum=0"],
    ["sync=bsp", "topology=all_reduce", "overlap=wfbp"],
    ["sync=bsp", "topology=sharded_server", "topology.servers=2", *PORTS],
    [
        "sync=bsp",
        "topology=all_reduce",
        "runtime=local",
        "cluster.step_s=0.001",
        "cluster.exchange_s=0.001",
    ],
)


@pytest.fixture
def place(own_module, workplace: Path, capsys):
    """A folder with one module; trains on its parts, and returns the summary or what was said."""
    own_module("targets", CODE)

    def train(model: str, dataset: str, *overrides: str, **task: str) -> dict | str:
        parts = {"model": model, "dataset": dataset, **task}
        own = choose_own("targets", **{group: f"targets.{text}" for group, text in parts.items()})
        code = main(["train", *own, "run.dir=out", "-q", *SMALL, *overrides])
        said = capsys.readouterr()
        return (jsonl.read_json(workplace / "out/summary.json") or {}) if code == 0 else said.err

    return train


def plain(mark: int, smoothing: float, momentum: float) -> tuple[dict[str, torch.Tensor], float]:
    """Ten steps of plain torch on the samples of both workers, and the loss on the test half after
    them.
    """
    import targets

    net, data, test = targets.Tok(), targets.Answers(True, mark), targets.Answers(False, mark)
    net.load_state_dict(torch.load("start.pt"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-4)
    loss_of = nn.CrossEntropyLoss(ignore_index=mark, label_smoothing=smoothing)
    for step in range(10):
        rows = torch.arange(16) + 16 * step
        optimizer.zero_grad()
        loss_of(net(data.x[rows]).flatten(0, 1), data.y[rows].flatten()).backward()
        optimizer.step()
    return net.state_dict(), loss_of(net(test.x).flatten(0, 1), test.y.flatten()).item()


@pytest.mark.parametrize("how", IN_ROUNDS, ids=" ".join)
def test_two_workers_are_one_whatever_counts(how, place, monkeypatch, workplace) -> None:
    """Weights of workers, loss and gradient are by tokens that count, in every round."""
    monkeypatch.syspath_prepend(workplace)
    import targets

    torch.save(targets.Tok().state_dict(), "start.pt")
    found = place(
        "Tok", "Answers\n", "task=language_model", "optimizer.weight_decay=1e-4", *ANSWERS, *how
    )
    assert isinstance(found, dict), found
    expected, loss = plain(-100, 0.0, 0.0 if "optimizer.momentum=0" in how else 0.9)
    for name, value in torch.load("out/final.pt").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)
    assert found["final"]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["final"]["test_metric"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("task", ["language_model", "own"])
def test_another_ignored_target_counts_the_same(task, place, monkeypatch, workplace) -> None:
    monkeypatch.syspath_prepend(workplace)
    import targets

    torch.save(targets.Tok().state_dict(), "start.pt")
    own, smoothing = (
        (["task=language_model", "task.ignore_index=-1"], 0.0) if task != "own" else ([], 0.1)
    )
    found = place(
        "Tok",
        "Answers\nmark: -1",
        "sync=bsp",
        *ANSWERS,
        *own,
        **({"task": "Smooth"} if task == "own" else {}),
    )
    assert isinstance(found, dict), found
    expected, loss = plain(-1, smoothing, 0.9)
    for name, value in torch.load("out/final.pt").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6)
    assert found["final"]["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_batches_without_a_target_that_counts_change_nothing(place) -> None:
    found = place(
        "Tok",
        "Answers\n",
        "task=language_model",
        "sync=asp",
        "dataset.batch_size=1",
        "stop.epochs=1",
    )
    assert isinstance(found, dict), found
    assert found["status"] == "finished"


@pytest.mark.parametrize(
    ("dataset", "overrides", "said"),
    [
        (
            "Points\nclasses: [0, 1000000]",
            [],
            "the classes of Points are 2 numbers from 0 to 1000000; number them from 0",
        ),
        (
            "Points\nclasses: [-1, 1]",
            [],
            "a class is -1; number classes from 0 on, or mark what does not count with -100",
        ),
        ("Points\nskip: 1", [], "Points has no class"),
        ("Answers\nmark: -1", ["task=language_model"], "a class is -1"),
        ("Points", ["task=language_model"], "needs a token at every place"),
    ],
)
def test_classes_that_cannot_be_learned_are_refused(dataset, overrides, said, place) -> None:
    found = place("points", dataset, "sync=bsp", *overrides)
    assert isinstance(found, str)
    assert said in found


def test_a_number_without_a_sample_is_noted(place, capsys, workplace) -> None:
    place("points", "Points\nclasses: [0, 1, 2]", "sync=bsp", "stop.steps=4")
    assert torch.load("out/final.pt")["weight"].shape == (3, 2)
    assert "no sample of Points is of class 1" in (workplace / "out/plan.json").read_text()


def test_whole_numbers_as_inputs_are_no_classes(place) -> None:
    assert isinstance(found := place("Bag", "words", "sync=bsp", "stop.steps=4"), dict), found
    assert torch.load("out/final.pt")["h.weight"].shape == (2, 8)
