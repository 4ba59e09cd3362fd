"""Parameters without a gradient in a step are left alone, as torch.optim leaves them, wherever
models meet.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ashl.cli.app import main
from tests.own_parts import choose_own
from tests.support import slow_unless

CODE = '''
import torch
from torch import nn


class Blobs(torch.utils.data.Dataset):
    """Even samples are small, odd ones large, so that each of two workers has one kind."""

    def __init__(self, train):
        draw = torch.Generator().manual_seed(int(train))
        self.y = torch.arange(160) // 2 % 3
        self.x = torch.randn(160, 4, generator=draw) + 2 * torch.eye(4)[self.y]
        self.x[:, 3] = torch.arange(160) % 2 * 2.0 - 1

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], int(self.y[number])


class Net(nn.Module):
    """One layer for each step, one that no step uses, and two of which the batch takes one."""

    def __init__(self, num_classes):
        super().__init__()
        self.first, self.never = nn.Linear(4, 8), nn.Linear(5, 5)
        self.small, self.large = nn.Linear(8, num_classes), nn.Linear(8, num_classes)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.large(hidden) if x[:, 3].sum() > 0 else self.small(hidden)


class Alternating(Net):
    """The second head is used in every second step only; frozen in between, as a GAN's other half."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.steps = 0

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.steps += self.training
        return self.small(hidden) + (self.large(hidden) if self.steps % 2 else 0)


class Words(nn.Module):
    """Sparse gradients, of an embedding and of a bag."""

    def __init__(self, num_classes):
        super().__init__()
        self.words, self.bag = nn.Embedding(30, 4, sparse=True), nn.EmbeddingBag(30, 4, sparse=True, mode="sum")
        self.never, self.last = nn.Embedding(5, 5, sparse=True), nn.Linear(8, num_classes)

    def forward(self, x):
        words = (x * 3 + 15).round().clamp(0, 29).long()
        return self.last(torch.cat([self.words(words).mean(1), self.bag(words)], 1))


class Short(nn.Module):
    """Forward passes shorten the embedding's rows, and keep the last layer within bounds; of a large model, too."""

    def __init__(self, num_classes, rows=30):
        super().__init__()
        self.words, self.last = nn.Embedding(rows, 4, max_norm=0.5), nn.Linear(16, num_classes)

    def forward(self, x):
        with torch.no_grad():
            self.last.weight.clamp_(-0.2, 0.2)
        return self.last(self.words((x * 3 + 15).round().clamp(0, 29).long()).flatten(1))


class Long(Short):
    def __init__(self, num_classes):
        super().__init__(num_classes, 20000)


class Replaced(Short):
    def forward(self, x):
        self.last.weight.data = self.last.weight.data / self.last.weight.data.norm()
        return super().forward(x)


class Later(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.steps > 4:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return super().forward(x)
'''
OPTIMIZERS = {
    "sgd": (["optimizer=sgd"], torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (
        ["optimizer=sgd", "optimizer.nesterov=true"],
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    "plain": (["optimizer=sgd", "optimizer.momentum=0"], torch.optim.SGD, {"weight_decay": 0.1}),
    "adam": (["optimizer=adam"], torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (["optimizer=adamw"], torch.optim.AdamW, {"weight_decay": 0.1}),
}
RATE = ["optimizer.weight_decay=0.1", "optimizer.lr=0.05"]  # settings of ashl's own optimizers
BATCH, STEPS = 16, 30


@pytest.fixture
def place(workplace: Path):
    """Trains a model of the module from `start.pt`, and returns its last weights."""
    (workplace / "netmodels.py").write_text(CODE)
    sys.path.insert(0, str(workplace))

    def train(kind: str, *overrides: str) -> dict:
        import netmodels  # ty: ignore[unresolved-import]

        torch.manual_seed(0)
        torch.save(getattr(netmodels, kind)(3).state_dict(), "start.pt")
        shutil.rmtree("out", ignore_errors=True)
        data = f"netmodels.Blobs\nepochs: 10\nbatch_size: {BATCH}\n"
        own = choose_own("netmodels", model=f"netmodels.{kind}", dataset=data)
        fixed = [
            "tracking=none",
            "dataset.partition=interleaved",
            "run.start_from=start.pt",
            "cluster=homogeneous",
        ]
        rate = [] if "optimizer=mine" in overrides else RATE
        code = main(["train", "-q", *own, "run.dir=out", *fixed, *rate, *overrides])
        return torch.load("out/final.pt") if not code else {"code": code}

    yield train
    sys.path.remove(str(workplace))
    sys.modules.pop("netmodels", None)


def plain_torch(kind: str, twin: type, arguments: dict, workers: int = 1) -> dict:
    """The same with torch.optim, on the mean gradient: a worker without one adds zero to those of
    the others.
    """
    import netmodels  # ty: ignore[unresolved-import]

    torch.manual_seed(0)
    nets, data = [getattr(netmodels, kind)(3) for _ in range(workers)], netmodels.Blobs(True)
    for net in nets:
        net.load_state_dict(torch.load("start.pt"))
    optimizer = twin(nets[0].parameters(), **{"lr": 0.05, **arguments})
    for step in range(STEPS):
        for worker, net in enumerate(nets):
            numbers = [(step * BATCH + i) * workers + worker for i in range(BATCH)]
            index = [number % 160 for number in numbers]
            net.zero_grad()
            functional.cross_entropy(net(data.x[index]), data.y[index]).backward()
        for own, *others in zip(*(net.parameters() for net in nets), strict=True):
            found = [p.grad.to_dense() for p in (own, *others) if p.grad is not None]
            own.grad = sum(found) / workers if found else None
        optimizer.step()
        for net in nets[1:]:
            with torch.no_grad():
                for own, other in zip(nets[0].parameters(), net.parameters(), strict=True):
                    other.copy_(own)
    return nets[0].state_dict()


def assert_close(found: dict, expected: dict) -> None:
    assert {
        name: float((found[name] - value).abs().max()) for name, value in expected.items()
    } == pytest.approx(dict.fromkeys(expected, 0), abs=2e-6)


@pytest.mark.parametrize("kind", slow_unless(["Alternating"], ["Net", "Alternating", "Words"]))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_is_a_loop_of_plain_torch(place, kind: str, optimizer: str) -> None:
    keys, twin, arguments = OPTIMIZERS[optimizer]
    found = place(
        kind, "runtime=sim", "sync=bsp", "cluster.compute=[1]", f"stop.steps={STEPS}", *keys
    )
    assert_close(found, plain_torch(kind, twin, arguments))


# that messages queue at
PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=100 cluster.latency_s=0.0001"


@pytest.mark.parametrize(
    "how", ["topology=parameter_server", "topology=all_reduce", f"topology=sharded_server {PORTS}"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_worker_without_a_gradient_adds_zero_to_those_of_the_others(
    place, how: str, optimizer: str
) -> None:
    keys, twin, arguments = OPTIMIZERS[optimizer]
    found = place(
        "Net",
        "runtime=sim",
        "sync=bsp",
        *how.split(),
        "cluster.compute=[1,1]",
        f"stop.steps={2 * STEPS}",
        *keys,
    )
    assert_close(found, plain_torch("Net", twin, arguments, workers=2))


@pytest.mark.parametrize("kind", ["Short", "Long", "Replaced"])
@pytest.mark.parametrize("every", [1, 1000])
def test_what_forward_writes_into_weights_stays_in_them(place, kind: str, every: int) -> None:
    keys, twin, arguments = OPTIMIZERS["adam"]
    own = [
        "runtime=sim",
        "sync=bsp",
        "sync.exchange=difference",
        "cluster.compute=[1]",
        f"eval.every_commits={every}",
    ]
    found = place(kind, *own, f"stop.steps={STEPS}", *keys)
    assert_close(found, plain_torch(kind, twin, arguments))


@pytest.mark.parametrize("runtime", ["sim", "local"])
def test_gradients_do_not_carry_what_forward_writes(place, capsys, runtime: str) -> None:
    own = ["sync=bsp", "topology=all_reduce", "cluster.compute=[1,1]", "stop.steps=8"]
    assert place("Short", f"runtime={runtime}", *own) == {"code": 2}
    said = " ".join(capsys.readouterr().err.split())
    assert "writes into words.weight, last.weight" in said
    assert "take sync.exchange=difference" in said


def test_a_step_that_begins_to_write_is_refused(place, capsys) -> None:
    assert place("Later", "runtime=sim", "sync=bsp", "cluster.compute=[1]", "stop.steps=30") == {
        "code": 2
    }
    assert "wrote into its own parameters" in " ".join(capsys.readouterr().err.split())


WAYS = [
    "sync=bsp",
    "sync=bsp sync.exchange=difference",
    "sync=asp",
    "sync=ringleader",
    f"sync=bsp overlap=slices {PORTS}",
    f"sync=bsp overlap=priority {PORTS}",
    f"topology=sharded_server sync=asp {PORTS}",
    "topology=all_reduce sync=bsp",
    "topology=all_reduce sync=bsp overlap=dear",
    "topology=all_reduce sync=local_sgd",
    "topology=gossip sync=d_psgd",
    "topology=gossip sync=ad_psgd topology.graph=complete",
    "topology=gossip sync=d_admm",
    "topology=partial_all_reduce sync=ripples_smart sync.group_size=2",
    "sync=bsp optimizer=muon",
]


@pytest.mark.parametrize("way", slow_unless(WAYS[::3], WAYS))
def test_what_no_worker_uses_stays_as_it_was(place, way: str) -> None:
    found = place("Net", "runtime=sim", "cluster.compute=[1,2]", "stop.steps=24", *way.split())
    start = torch.load("start.pt")
    assert all(torch.equal(found[name], start[name]) for name in start if name.startswith("never"))
    assert not any(
        torch.equal(found[name], start[name]) for name in start if not name.startswith("never")
    )


@pytest.mark.parametrize(
    "how",
    [pytest.param("topology=parameter_server", marks=pytest.mark.slow), "topology=all_reduce"],
)
def test_real_processes_agree_with_plain_torch(place, how: str) -> None:
    keys, twin, arguments = OPTIMIZERS["adam"]
    own = [
        "runtime=local",
        "cluster.step_s=0.0001",
        "cluster.exchange_s=0.0001",
        "cluster.compute=[1,1]",
    ]
    found = place("Net", *own, "sync=bsp", how, f"stop.steps={2 * STEPS}", *keys)
    assert_close(found, plain_torch("Net", twin, arguments, workers=2))
