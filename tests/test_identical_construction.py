"""Objects that every process makes itself are identical: model, data, and the state beside the
weights.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conf_option import task_of
from torch import Tensor, nn
from torch.utils.data import Dataset, random_split

import ashl
from ashl.data.plain import PlainDataset
from ashl.errors import AshlError
from ashl.learn.fingerprint import fingerprint, first_difference
from ashl.learn.learner import Learner, split_indices
from ashl.learn.making import load_data

COUNT = 60
X = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(7))


def order_by(kind: str) -> list[int]:
    if kind == "torch":
        return torch.randperm(COUNT).tolist()
    if kind == "numpy":
        return np.random.permutation(COUNT).tolist()
    order = list(range(COUNT))
    random.shuffle(order)
    return order


class OwnSplit(Dataset):
    """Draws its split when it is made, once for each half."""

    def __init__(self, train: bool, kind: str) -> None:
        order = order_by(kind)
        self.order = order[:40] if train else order[40:]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return X[self.order[number]], self.order[number] % 3


class OwnSamples(Dataset):
    """Draws its samples."""

    def __init__(self, train: bool, kind: str) -> None:
        draw: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.randn(4),
            "numpy": lambda: torch.from_numpy(np.random.randn(4)),
            "random": lambda: torch.tensor([random.gauss(0, 1) for _ in range(4)]),
        }
        self.items = [(draw[kind](), number % 3) for number in range(40 if train else 20)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.items[number]


def pair(kind: str) -> Any:
    if kind == "torch":
        return tuple(random_split([(x, 1) for x in X], [40, 20]))  # type: ignore[arg-type]
    order = order_by(kind)
    return [(X[i], 0) for i in order[:40]], [(X[i], 0) for i in order[40:]]


def urandom_pair() -> Any:
    first = int.from_bytes(os.urandom(4)) % 30
    items = [(X[i], int(i >= 30)) for i in range(first, COUNT)]
    return items[:-20], items[-20:]


class Made:
    """A model option: layers in sequence, each from a function that makes it."""

    def __init__(self, *layers: Callable[[], nn.Module]) -> None:
        self.layers = layers

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(*[make() for make in self.layers])


def plain(make: Any, **keys: Any) -> PlainDataset:
    return PlainDataset(make=make, keys=keys, batch_size=8, partition="iid", alpha=None, epochs=1)


def rows(half: Any) -> Tensor:
    return half.inputs[torch.arange(len(half))]


@pytest.mark.parametrize("kind", ["torch", "numpy", "random"])
@pytest.mark.parametrize("make", [OwnSplit, OwnSamples, pair])
def test_a_data_set_that_draws_is_a_function_of_the_seed_and_its_halves_are_disjoint(
    make: Any, kind: str
) -> None:
    before = torch.random.get_rng_state(), random.getstate()
    first, again = (load_data(plain(make, kind=kind), 3) for _ in range(2))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()
    for one, other in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(rows(one), rows(other))
        assert torch.equal(one.targets, other.targets)
    known = {tuple(row.tolist()) for row in rows(first.train)}
    assert not known & {tuple(row.tolist()) for row in rows(first.test)}
    if make is OwnSplit:
        assert len(known) + len(first.test) == COUNT


def test_samples_that_differ_by_rounding_are_the_same_and_all_else_is_not() -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    assert first_difference({"x": fingerprint(x)}, {"x": fingerprint(x * (1 + 1e-7))}) is None
    assert first_difference({"x": fingerprint(x)}, {"x": fingerprint(x.flip(0))}) == "x"
    labels = torch.arange(10_000)
    other = labels.clone()
    other[[0, 1]] = other[[1, 0]]
    assert first_difference({"y": fingerprint(labels)}, {"y": fingerprint(other)}) == "y"
    assert (
        first_difference({"x": fingerprint(x)}, {"x": fingerprint(x), "more": fingerprint(x)})
        == "more"
    )


@pytest.mark.parametrize("most", [2, 3, 7])
@pytest.mark.parametrize("count", range(2, 16))
def test_no_batch_of_an_evaluation_has_one_sample(most: int, count: int) -> None:
    parts = [*split_indices(np.arange(count), most)]
    assert np.array_equal(np.concatenate(parts), np.arange(count))
    assert all(2 <= len(part) <= most + 1 for part in parts)


def known_norm(**keys: Any) -> nn.Module:
    norm = nn.BatchNorm1d(5, **keys)
    nn.init.constant_(norm.running_mean, 3.0)  # type: ignore[arg-type]
    nn.init.constant_(norm.running_var, 4.0)  # type: ignore[arg-type]
    return norm


def test_a_model_that_was_loaded_in_evaluation_mode_is_trained() -> None:
    class Loaded(Made):
        def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
            return super().build(sample_shape, num_classes).eval()

    data = load_data(plain(OwnSplit, kind="torch"), 0)
    option = Loaded(lambda: nn.Linear(4, 5), known_norm, lambda: nn.Linear(5, 3))
    learner = Learner(option, data, task_of(data), seed=0)
    assert not torch.equal(
        learner.state_dict(learner.init())["1.running_mean"], torch.full((5,), 3.0)
    )


@pytest.fixture
def own(workplace: Path) -> list[str]:
    """Options of one's own: a model with frozen random features, and a data set that every process
    makes otherwise.
    """
    for group, text in (
        ("model/frozen", "_target_: test_identical_construction.Frozen\n"),
        (
            "dataset/apart",
            "defaults: [_own]\n_target_: test_identical_construction.urandom_pair\nepochs: 1\nbatch_size: 4\n",
        ),
        (
            "dataset/own",
            (
                "defaults: [_own]\n_target_: test_identical_construction.OwnSplit\nkind: random\nepochs:"
                " 2\nbatch_size: 8\n"
            ),
        ),
    ):
        path = Path("options") / f"{group}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        "allow_targets=[test_identical_construction]",
        "tracking=none",
        "cluster=homogeneous",
        "cluster.num_workers=2",
    ]


class Frozen(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16).requires_grad_(False), nn.Linear(16, num_classes)
        self.register_buffer("shift", torch.zeros(4))
        with torch.no_grad():
            self.body.weight.copy_(
                torch.tensor([random.gauss(0, 1) for _ in range(64)]).view(16, 4)
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x - self.shift).relu())


def test_a_run_that_starts_from_another_takes_its_whole_state(own: list[str]) -> None:
    chosen = [*own, "dataset=own", "model=frozen", "sync=bsp", "runtime=sim"]
    first = ashl.train(*chosen, config_dir="options")
    weights = torch.load(first.folder / "final.pt")
    weights["shift"] += 2
    torch.save(weights, "weights.pt")
    second = ashl.train(
        *chosen,
        "seed=5",
        "run.start_from=weights.pt",
        "stop.steps=2",
        "optimizer.lr=1e-30",
        config_dir="options",
    )
    after = torch.load(second.folder / "final.pt")
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    model = second.model(allow_targets=["test_identical_construction"])
    assert torch.equal(model.body.weight, weights["body.weight"])
    assert torch.equal(model.shift, weights["shift"])


def test_processes_that_make_different_data_are_refused(own: list[str]) -> None:
    with pytest.raises(
        AshlError, match=r"the number of training samples differ .* which have the run's seed"
    ):
        ashl.train(
            *own, "dataset=apart", "model=mlp", "sync=bsp", "runtime=local", config_dir="options"
        )
