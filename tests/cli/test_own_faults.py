"""An error of a user's own model, loss, metric, data or optimizer is attributed to it, with worker,
step and fix.
"""

import pytest

from ashl.cli.app import main
from tests.own_parts import choose_own

CODE = '''
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from ashl.option import option
from ashl.optimizer.sgd import SGD
from ashl.task.contract import Task


class Blobs(Dataset):
    """bad: the item that cannot be read, while batches are read or from the beginning."""

    def __init__(self, train, bad=-1, early=False):
        g = torch.Generator().manual_seed(int(train))
        self.x, self.y = torch.randn(120, 4, generator=g), torch.arange(120) % 4
        self.bad, self.early, self.looks = bad if train else -1, early, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        self.looks += i == self.bad
        if i == self.bad and (self.early or self.looks > 2):
            raise OSError("the disk is gone")
        return self.x[i], int(self.y[i])


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.a, self.calls = nn.Linear(4, num_classes), 0

    def forward(self, x):
        self.calls += self.training
        return self.of(x)

    def of(self, x):
        return self.a(x)


class Reentrant(Net):
    """Its checkpoint is left out of the gradient, without a word of torch's: nothing before it needs one."""

    def of(self, x):
        return checkpoint(self.a, x.requires_grad_(), use_reentrant=True)


class ReentrantWithin(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.pre = nn.Linear(4, 4)

    def of(self, x):
        return checkpoint(self.a, self.pre(x), use_reentrant=True)


class Lazy(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.a = nn.LazyLinear(num_classes)

    def forward(self, x):
        return self.a(x)


class NoGrad(Net):
    @torch.no_grad()
    def of(self, x):
        return self.a(x)


class EvalPair(Net):
    def of(self, x):
        return self.a(x) if self.training else (self.a(x), x)


class Raises(Net):
    def of(self, x):
        if self.calls > 9:
            raise KeyError("hidden")
        return self.a(x)


class Exits(Net):
    def of(self, x):
        if self.calls > 9:
            raise SystemExit(3)
        return self.a(x)


class Abstract(Net, ABC):
    @abstractmethod
    def unwritten(self):
        pass


class Meta(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.pre = nn.Linear(4, 4, device="meta")


class FirstNan(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        nn.init.constant_(self.a.bias, float("nan"))


class InPlace(Net):
    def of(self, x):
        y = self.a(x).exp()
        if self.calls > 9:
            y += 1
        return y


class Hungry(Net):
    def of(self, x):
        if self.calls > 9:
            torch.empty(2**46)
        return self.a(x)


class Crowded(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.a = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(16, num_classes))

    def forward(self, x):
        return self.a(x.long().clamp(0, 99) + 7)


@option
class Judged(Task):
    metric: ClassVar[str] = "hits"

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)

    def scores(self, outputs, targets):
        return (outputs.argmax(1) == targets).float()


@option
class BadLoss(Judged):
    _calls: ClassVar[list] = []

    def loss(self, outputs, targets):
        BadLoss._calls.append(1)
        if len(BadLoss._calls) > 9:
            raise ZeroDivisionError("no weight")
        return super().loss(outputs, targets)


@option
class VectorLoss(Judged):
    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")


@option
class LateVector(BadLoss):
    def loss(self, outputs, targets):
        BadLoss._calls.append(1)
        return functional.cross_entropy(outputs, targets, reduction="none" if len(BadLoss._calls) > 9 else "mean")


@option
class BadScores(Judged):
    def scores(self, outputs, targets):
        raise AssertionError("never hits")


@option
class BadValue(Judged):
    def value(self, means):
        return {}["top"]


@option
class BadSteps(SGD):
    _steps: ClassVar[list] = []

    def step(self, moments, params, grad, lr):
        BadSteps._steps.append(1)
        if len(BadSteps._steps) > 3:
            raise FloatingPointError("too steep")
        return super().step(moments, params, grad, lr)
'''
SMALL = [
    "tracking=none",
    "cluster=homogeneous",
    "cluster.compute=[1,1]",
    "cluster.step_s=0.001",
    "stop.steps=40",
    "-q",
]
SMALL += [
    "cluster.exchange_s=0.001",
    "dataset.batch_size=8",
    "sync=bsp",
    "eval.every_commits=500",
    "topology=all_reduce",
]
FAULTS = {  # what is the user's own: exit code and words of the sentence
    "model=Reentrant": (2, "Model Reentrant has a reentrant checkpoint", "use_reentrant=False"),
    "model=ReentrantWithin": (2, "Model ReentrantWithin has a reentrant checkpoint", "use_reentrant=False"),
    "model=Lazy": (2, "Model Lazy has lazy layers", "nn.Linear(16, 4) in place of"),
    "model=NoGrad": (2, "model own_faults.NoGrad failed, not ashl", "look for torch.no_grad()"),
    "model=EvalPair": (2, "Model EvalPair returns tuple in evaluation mode and (2, 4) in training",),
    "model=Crowded": (2, "Model Crowded cannot take samples of shape 4", "make num_embeddings larger"),
    "model=Raises": (1, "model own_faults.Raises failed, not ashl, worker ", "step ", "KeyError: 'hidden' ("),
    "model=Exits": (1, "model own_faults.Exits failed, not ashl, worker ", "step ", "SystemExit: 3 ("),
    "model=Abstract": (2, "model own_faults.Abstract failed, not ashl: TypeError: Can't instantiate"),
    "model=Meta": (2, "Model Meta has parameters without values", "make them on the CPU"),
    "model=FirstNan": (1, "the run diverged: ", "became nan near step 1"),
    "model=InPlace": (1, "model own_faults.InPlace failed, not ashl, worker ", "step ", "write x = x + y"),
    "model=Hungry": (1, "worker ", "step ", "there is not enough memory; take a smaller dataset.batch_size"),
    "dataset=Blobs\nbad: 100\nearly: true": (2, "dataset Blobs failed, not ashl, item 100: OSError: the disk "),
    "dataset=Blobs\nbad: 100": (1, "dataset Blobs failed, not ashl, item 100, worker ", "step ", "the disk is gone ("),
    "task=BadLoss": (1, "task own_faults.BadLoss failed, not ashl, worker ", "step ", "ZeroDivisionError: no weight ("),
    "task=VectorLoss": (2, "Task VectorLoss returns (2,) as loss, and should return one number"),
    "task=LateVector": (1, "own_faults.", "failed, not ashl, worker ", "the loss should be one number; take its mean"),
    "task=BadScores": (1, "task own_faults.BadScores failed, not ashl, in an evaluation: AssertionError: never hits ("),
    "task=BadValue": (1, "task own_faults.BadValue failed, not ashl, in an evaluation: KeyError: 'top' ("),
    "optimizer=BadSteps": (1, "optimizer own_faults.BadSteps failed, not ashl, at merge ", "too steep ("),
}  # fmt: skip
ON_PROCESSES = ("dataset=Blobs\nbad: 100", "task=BadScores")


@pytest.fixture
def said(own_module, capsys):
    """Train with one part of the user's own that fails; returns the exit code and what was said."""
    own_module("own_faults", CODE)

    def train(fault: str, *overrides: str) -> tuple[int, str]:
        parts = {"dataset": "Blobs\n", "model": "Net", **dict([fault.split("=", 1)])}
        own = choose_own(
            "own_faults", **{name: f"own_faults.{text}" for name, text in parts.items()}
        )
        return main(["train", *own, *SMALL, "run.dir=out", *overrides]), capsys.readouterr().err

    return train


@pytest.mark.parametrize(
    ("fault", "expected"), FAULTS.items(), ids=[fault.replace("\n", " ") for fault in FAULTS]
)
def test_a_fault_of_the_users_own_is_said_to_be_theirs(fault, expected, said) -> None:
    code, *words = expected
    found, text = said(fault, "runtime=sim")
    for word in words:
        assert word in text
    assert "bug in ashl" not in text
    assert text.count("\n") == 1
    assert found == code, text


@pytest.mark.parametrize("fault", ON_PROCESSES, ids=lambda fault: fault.replace("\n", " "))
def test_it_is_on_processes_too(fault, said) -> None:
    code, *words = FAULTS[fault]
    found, text = said(fault, "runtime=local")
    for word in words:
        assert word in text
    assert "bug in ashl" not in text
    assert found == code, text
