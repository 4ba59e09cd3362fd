"""CUDA graphs of a step, with a stand-in that writes down what torch is asked for and asks it
again.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ashl.data.dataset import Data, Split
from ashl.device import read_scalars
from ashl.errors import UsageError
from ashl.learn import graphs
from ashl.learn.learner import Learner
from tests.conf_option import conf_option

PIXELS = torch.arange(64 * 3 * 32 * 32).remainder(251).to(torch.uint8).view(64, 3, 32, 32)
SPLIT = Split(PIXELS, torch.arange(64) % 5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.2))
IMAGES = Data(SPLIT, SPLIT, sample_shape=(3, 32, 32), num_classes=5, augment="crop_flip")


class Drawing:
    """A model with dropout."""

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3072, num_classes))


class Recorded(TorchDispatchMode):
    """A stand-in graph: each operation with its tensors; a replay asks for their addresses again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        self.replayed += 1
        for func, args, kwargs, before in self.calls:
            for old, new in zip(
                tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Cuda:
    """A stand-in for the parts of torch.cuda that are used, with a record of the calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: list[Recorded] = []
        self.fails = ""
        self.Stream, self.CUDAGraph = partial(self.waiting, "side"), self.graph_made

    def waiting(self, name: str, device: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda of: self.log.append(f"{name} waits for {of.name}")
        )

    def current_stream(self, device: str) -> Any:
        return self.waiting("here", device)

    def graph_made(self) -> Recorded:
        self.made.append(Recorded())
        return self.made[-1]

    @contextmanager
    def stream(self, stream: Any) -> Generator[None]:
        self.log.append("warm-up")
        yield

    @contextmanager
    def graph(self, graph: Recorded, capture_error_mode: str) -> Generator[None]:
        self.log.append("capture")
        with graph:
            yield
        if self.fails:
            raise RuntimeError(self.fails)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(graphs, "CUDA", stand_in)
    monkeypatch.setattr(graphs, "OFTEN", 3)
    return stand_in


def learner(model: str, captures: bool, **fields: Any) -> Learner:
    option = conf_option("model", model, **fields)
    return Learner(option, IMAGES, conf_option("task", "classification"), seed=0, graphs=captures)


@pytest.mark.parametrize("model", ["mlp", "resnet8"])
def test_a_replayed_step_has_the_bits_of_one_without_graphs(model: str, cuda: Cuda) -> None:
    """Also where models, workers and batches change, and what came first is still looked at at the
    end.
    """
    small = {"hidden": [8]} if model == "mlp" else {}
    eager, graphed = learner(model, False, **small), learner(model, True, **small)
    if graphed._here.resident is None:  # a device has one for every size
        graphed._here.set_parameters(resident := graphed.init())
        graphed._here.resident = resident
    params, kept = eager.init(), []
    for step in range(7):
        batch = np.random.default_rng(step).integers(0, 64, 3 if step == 5 else 4)
        expected = eager.gradient(params, batch, step % 2, step)
        kept.append((expected, graphed.gradient(params, batch, step % 2, step)))
        params = params - 0.1 * expected[1]
    for (loss, gradient), (same_loss, same) in kept:
        assert read_scalars([loss]) == read_scalars([same_loss])
        assert torch.equal(gradient, same)
    assert cuda.log == ["side waits for here", "warm-up", "here waits for side", "capture"]
    assert [graph.replayed for graph in cuda.made] == [
        4
    ]  # the third to the seventh, except the odd one


def test_models_that_draw_are_left_alone(cuda: Cuda) -> None:
    graphed = Learner(Drawing(), IMAGES, conf_option("task", "classification"), seed=0, graphs=True)
    for step in range(4):
        graphed.gradient(graphed.init(), np.arange(4), 0, step)
    assert not cuda.log


def test_what_cannot_be_captured_is_said(cuda: Cuda) -> None:
    graphed = learner("mlp", True, hidden=[8])
    cuda.fails = "operation not permitted when stream is capturing\nand more"
    for step in range(2):
        graphed.gradient(graphed.init(), np.arange(4), 0, step)
    with pytest.raises(
        UsageError,
        match=r"cannot be captured \(operation not .* capturing\); take runtime.graphs=off",
    ):
        graphed.gradient(graphed.init(), np.arange(4), 0, 2)
