"""Element-wise optimizers of plain torch, by `_target_`: what they learn, what they keep, what is
refused.
"""

import inspect
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ashl.cli.app import main
from ashl.errors import UsageError
from ashl.optimizer.plain import plain_optimizer

CODE = '''
import torch
from torch import nn


class Blobs(torch.utils.data.Dataset):
    def __init__(self, train):
        draw = torch.Generator().manual_seed(int(train))
        self.y = torch.arange(160) // 2 % 3
        self.x = torch.randn(160, 4, generator=draw) + 2 * torch.eye(4)[self.y]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return self.x[number], int(self.y[number])


class Net(nn.Module):
    """Each head takes part in about half of the steps."""

    def __init__(self):
        super().__init__()
        self.first, self.small, self.large = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.large(hidden) if x[:, 3].sum() > 0 else self.small(hidden)


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., 2023); it writes over the gradient that it is given."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        if not 0 <= betas[0] < 1:
            raise ValueError(f"betas[0] is {betas[0]}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, state["momentum"], beta1).sign_(), alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - beta2)
                p.grad.zero_()


class Counting(torch.optim.Optimizer):
    """The rate falls with the steps of each parameter, counted as an int."""

    def __init__(self, params, **keys):
        super().__init__(params, keys)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                p.data.sub_(p.grad, alpha=group["lr"] / self.state[p]["steps"] ** 0.5)


class Grouped(Lion):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] / group["steps"])


class ByNorm(Lion):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.div_(p.grad.norm())
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"]) if not torch.is_grad_enabled() else p.data.sub_(p.grad)


class Matrices(Lion):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad if p.ndim == 1 else 2 * p.grad, alpha=self.param_groups[0]["lr"])


class Hidden(Lion):
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=self.param_groups[0]["lr"] / self.steps)


class Words(Lion):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["name"] = "w"


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, size=0.1):
        super().__init__(params, {"lr": size})


class Crash(Lion):
    def step(self, closure=None):
        raise RuntimeError("no more steps")


class Late(Lion):
    """Fails on a model, not in the try-out."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].numel() > 50:
            raise RuntimeError("too large")
        super().step()
'''
BATCH, STEPS = 16, 30
TWINS = {  # the lines of the file, the class, and its arguments
    "sgd": ("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": ("torch.optim.SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": ("torch.optim.AdamW", {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}),
    "lion": ("ownsteps.Lion", {"lr": 0.003, "betas": [0.8, 0.95], "weight_decay": 0.1}),
    "counting": ("ownsteps.Counting", {"lr": 0.2}),
    "adagrad": ("torch.optim.Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "nadam": ("torch.optim.NAdam", {"lr": 0.01}),
}


@pytest.fixture
def place(workplace: Path, capsys: pytest.CaptureFixture[str]):
    """Trains from `start.pt` with an optimizer of a file; returns the last weights, or what was
    said.
    """
    (workplace / "ownsteps.py").write_text(CODE)
    sys.path.insert(0, str(workplace))
    for group in ("model", "dataset", "optimizer"):
        (workplace / "options" / group).mkdir(parents=True)
    Path("options/model/mine.yaml").write_text("_target_: ownsteps.Net\n")
    own = f"defaults: [_own]\n_target_: ownsteps.Blobs\nepochs: 10\nbatch_size: {BATCH}\n"
    Path("options/dataset/mine.yaml").write_text(own)

    def train(target: str, keys: dict, *overrides: str, defaults: str = "") -> dict | str:
        lines = [
            defaults,
            f"_target_: {target}",
            *(f"{key}: {str(value).lower()}" for key, value in keys.items()),
        ]
        Path("options/optimizer/mine.yaml").write_text("\n".join(lines))
        shutil.rmtree("out", ignore_errors=True)
        own = [
            "--config-dir",
            "options",
            "allow_targets=[ownsteps,torch]",
            "model=mine",
            "dataset=mine",
        ]
        fixed = ["optimizer=mine", "run.dir=out", "tracking=none", "dataset.partition=interleaved"]
        fixed += [
            "run.start_from=start.pt",
            "cluster=homogeneous",
            "cluster.step_s=0.001",
            "sync=bsp",
        ]
        code = main(
            ["train", "-q", *own, *fixed, f"stop.steps={STEPS}", "cluster.compute=[1]", *overrides]
        )
        return capsys.readouterr().err if code else torch.load("out/final.pt")

    import ownsteps  # ty: ignore[unresolved-import]

    torch.manual_seed(0)
    torch.save(ownsteps.Net().state_dict(), "start.pt")
    yield train
    sys.path.remove(str(workplace))
    sys.modules.pop("ownsteps", None)


def plain_torch(target: str, keys: dict, workers: int = 1) -> dict:
    """A loop of plain torch on the mean gradient of the workers."""
    import ownsteps  # ty: ignore[unresolved-import]

    nets, data = [ownsteps.Net() for _ in range(workers)], ownsteps.Blobs(True)
    for net in nets:
        net.load_state_dict(torch.load("start.pt"))
    module = torch.optim if target.startswith("torch.") else ownsteps
    optimizer = getattr(module, target.rpartition(".")[2])(nets[0].parameters(), **keys)
    for step in range(STEPS):
        for worker, net in enumerate(nets):
            index = [((step * BATCH + i) * workers + worker) % 160 for i in range(BATCH)]
            net.zero_grad()
            functional.cross_entropy(net(data.x[index]), data.y[index]).backward()
        for own, *others in zip(*(net.parameters() for net in nets), strict=True):
            found = [p.grad for p in (own, *others) if p.grad is not None]
            own.grad = sum(found) / workers if found else None
        optimizer.param_groups[0]["lr"] = keys["lr"]
        optimizer.step()
        for net in nets[1:]:
            net.load_state_dict(nets[0].state_dict())
    return nets[0].state_dict()


def assert_close(found: dict | str, expected: dict) -> None:
    assert isinstance(found, dict), found
    assert {
        name: float((found[name] - value).abs().max()) for name, value in expected.items()
    } == pytest.approx(dict.fromkeys(expected, 0), abs=1e-6)


@pytest.mark.parametrize("name", TWINS)
def test_one_worker_is_a_loop_of_plain_torch(place, name: str) -> None:
    target, keys = TWINS[name]
    assert_close(place(target, keys, "runtime=sim"), plain_torch(target, keys))


@pytest.mark.parametrize("how", ["parameter_server", "all_reduce", "sharded_server"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_two_workers_step_on_their_mean_gradient(place, how: str, name: str) -> None:
    target, keys = TWINS[name]
    two = ["runtime=sim", "cluster.compute=[1,1]", f"topology={how}", f"stop.steps={2 * STEPS}"]
    if how == "sharded_server":
        two += [
            "cluster.exchange_s=null",
            "cluster.bandwidth_mbit_s=100",
            "cluster.latency_s=0.0001",
        ]
    assert_close(place(target, keys, *two), plain_torch(target, keys, workers=2))


@pytest.mark.slow
def test_processes_make_the_same_steps(place) -> None:
    two = ["topology=all_reduce", "cluster.compute=[1,1]"]
    assert_close(
        place(*TWINS["lion"], *two, "runtime=local"), place(*TWINS["lion"], *two, "runtime=sim")
    )


def test_the_rate_follows_the_schedule_of_the_keys_that_every_optimizer_has(place) -> None:
    target, keys = TWINS["lion"]
    falling = ["runtime=sim", "optimizer.schedule=linear", "optimizer.horizon_epochs=3"]
    assert "optimizer=mine has no key schedule" in place(target, keys, *falling)
    still = place(target, keys, *falling, f"stop.steps={STEPS}", defaults="defaults: [_own]")
    longer = place(target, keys, *falling, f"stop.steps={STEPS + 20}", defaults="defaults: [_own]")
    assert_close(longer, still)  # three epochs of ten steps: the rate has reached zero


@pytest.mark.parametrize(
    ("target", "keys", "words"),
    [
        ("torch.optim.Adafactor", {}, "its state 'row_var' is a tensor of shape [6, 1]"),
        ("torch.optim.Muon", {}, "cannot step on a model as one vector"),
        ("torch.optim.LBFGS", {}, "its step needs a closure"),
        ("torch.optim.SparseAdam", {}, "does not support dense gradients"),
        ("ownsteps.ByNorm", {}, "is not element by element"),
        ("ownsteps.Matrices", {}, "is not element by element"),
        ("ownsteps.Hidden", {}, "keep the state in state[parameter]"),
        ("ownsteps.Grouped", {}, "keep the state in state[parameter]"),
        ("ownsteps.Words", {}, "its state 'name' is str"),
        ("ownsteps.NoRate", {}, "takes no lr"),
        ("ownsteps.Crash", {}, "RuntimeError: no more steps"),
        (
            "ownsteps.Lion",
            {"beta": 0.9},
            "has no argument 'beta'; its arguments are: lr, betas, weight_decay",
        ),
        ("ownsteps.Lion", {"betas": [1.5, 0.9]}, "ValueError: betas[0] is 1.5"),
        ("ownsteps.Lion", {"lr": -1.0}, "optimizer.lr=-1.0 is not possible"),
        (
            "ownsteps.Net",
            {},
            "which is no optimizer: it has to extend ashl.optimizer.contract.Optimizer, or",
        ),
        ("ownsteps.Late", {}, "optimizer ownsteps.Late failed"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    place, target: str, keys: dict, words: str
) -> None:
    said = place(target, keys, "runtime=sim")
    assert words in said
    assert said.count("\n") == 1


def test_a_class_of_torch_needs_permission_too(place) -> None:
    said = place("torch.optim.AdamW", {}, "runtime=sim", "allow_targets=[ownsteps]")
    assert "outside of ashl; allow it with 'allow_targets=[torch]'" in said


ALL = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_class_of_torch_steps_as_itself_or_is_refused(cls: type) -> None:
    try:
        ours = plain_optimizer(cls, {"lr": 0.01})
    except UsageError:
        assert cls.__name__ in ("Adafactor", "LBFGS", "Muon", "SparseAdam")
        return
    assert ours is not None
    draw = torch.Generator().manual_seed(1)
    theirs = torch.nn.Parameter(torch.randn(37, generator=draw))
    other, params, moments = cls([theirs], lr=0.01), theirs.detach().clone(), ours.init(37)
    for step in range(20):
        grad, lr = torch.randn(37, generator=draw), 0.01 / (1 + step)
        other.param_groups[0]["lr"], theirs.grad = lr, grad.clone()
        other.step()
        before = [tensor.clone() for tensor in (*moments, params, grad)]
        after, moved = ours.step(moments, params, grad, lr)
        assert all(map(torch.equal, before, (*moments, params, grad)))
        moments, params = after, moved
        torch.testing.assert_close(params, theirs.detach(), rtol=1e-6, atol=1e-7)
