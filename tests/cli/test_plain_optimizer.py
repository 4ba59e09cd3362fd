"""Element-wise optimizers of plain torch, by `_target_`: what they learn, what they keep, what is
refused.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch

from ashl.errors import UsageError
from ashl.optimizer.plain import plain_optimizer
from tests.cli.test_absent_gradients import STEPS, assert_close, plain_torch
from tests.cli.test_absent_gradients import place as place

CODE = '''
import torch


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
def trained(place, workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    """Trains from `start.pt` with an optimizer of a file; returns the last weights, or what was
    said.
    """
    (workplace / "ownsteps.py").write_text(CODE)
    monkeypatch.syspath_prepend(workplace)
    (workplace / "options/optimizer").mkdir(parents=True)

    def train(target: str, keys: dict, *overrides: str, defaults: str = "") -> dict | str:
        lines = [
            defaults,
            f"_target_: {target}",
            *(f"{key}: {str(value).lower()}" for key, value in keys.items()),
        ]
        Path("options/optimizer/mine.yaml").write_text("\n".join(lines))
        own = ["allow_targets=[netmodels,ownsteps,torch]", "optimizer=mine", "sync=bsp"]
        own += ["cluster.step_s=0.001", "cluster.compute=[1]", f"stop.steps={STEPS}"]
        found = place("Alternating", *own, *overrides)
        return capsys.readouterr().err if "code" in found else found

    yield train
    sys.modules.pop("ownsteps", None)


def expected(target: str, keys: dict, workers: int = 1) -> dict:
    import ownsteps  # ty: ignore[unresolved-import]

    module = torch.optim if target.startswith("torch.") else ownsteps
    return plain_torch("Alternating", getattr(module, target.rpartition(".")[2]), keys, workers)


@pytest.mark.parametrize("name", TWINS)
def test_one_worker_is_a_loop_of_plain_torch(trained, name: str) -> None:
    target, keys = TWINS[name]
    assert_close(trained(target, keys, "runtime=sim"), expected(target, keys))


@pytest.mark.parametrize("how", ["parameter_server", "all_reduce", "sharded_server"])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_two_workers_step_on_their_mean_gradient(trained, how: str, name: str) -> None:
    target, keys = TWINS[name]
    two = ["runtime=sim", "cluster.compute=[1,1]", f"topology={how}", f"stop.steps={2 * STEPS}"]
    if how == "sharded_server":
        two += [
            "cluster.exchange_s=null",
            "cluster.bandwidth_mbit_s=100",
            "cluster.latency_s=0.0001",
        ]
    assert_close(trained(target, keys, *two), expected(target, keys, workers=2))


@pytest.mark.slow
def test_processes_make_the_same_steps(trained) -> None:
    two = ["topology=all_reduce", "cluster.compute=[1,1]"]
    assert_close(
        trained(*TWINS["lion"], *two, "runtime=local"), trained(*TWINS["lion"], *two, "runtime=sim")
    )


def test_the_rate_follows_the_schedule_of_the_keys_that_every_optimizer_has(trained) -> None:
    target, keys = TWINS["lion"]
    falling = ["runtime=sim", "optimizer.schedule=linear", "optimizer.horizon_epochs=3"]
    assert "optimizer=mine has no key schedule" in trained(target, keys, *falling)
    still = trained(target, keys, *falling, f"stop.steps={STEPS}", defaults="defaults: [_own]")
    longer = trained(
        target, keys, *falling, f"stop.steps={STEPS + 20}", defaults="defaults: [_own]"
    )
    assert_close(longer, still)  # three epochs of ten steps: the rate has reached zero


@pytest.mark.parametrize(
    ("target", "keys", "words"),
    [
        ("torch.optim.Adafactor", {}, "its state 'row_var' is a tensor of shape [6, 1]"),
        ("torch.optim.Muon", {}, "its try-out on one vector failed: ValueError"),
        ("torch.optim.LBFGS", {}, "missing 1 required positional argument: 'closure'"),
        ("torch.optim.SparseAdam", {}, "does not support dense gradients"),
        ("ownsteps.ByNorm", {}, "is not element by element"),
        ("ownsteps.Matrices", {}, "is not element by element"),
        ("ownsteps.Hidden", {}, "keep the state in state[parameter]"),
        ("ownsteps.Grouped", {}, "keep the state in state[parameter]"),
        ("ownsteps.Words", {}, "its state 'name' is str"),
        ("ownsteps.NoRate", {}, "it needs a learning rate"),
        ("ownsteps.Crash", {}, "RuntimeError: no more steps"),
        ("ownsteps.NoRate", {"lr": 0.1}, "unexpected keyword argument 'lr'"),
        ("ownsteps.Lion", {"beta": 0.9}, "unexpected keyword argument 'beta'"),
        ("ownsteps.Lion", {"betas": [1.5, 0.9]}, "ValueError: betas[0] is 1.5"),
        ("ownsteps.Lion", {"lr": -1.0}, "optimizer.lr=-1.0 is not possible"),
        (
            "netmodels.Net",
            {},
            "which is no optimizer: it has to extend ashl.optimizer.contract.Optimizer, or",
        ),
        ("ownsteps.Late", {}, "optimizer ownsteps.Late failed"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    trained, target: str, keys: dict, words: str
) -> None:
    said = trained(target, keys, "runtime=sim")
    assert words in said
    assert said.count("\n") == 1


def test_a_class_of_torch_needs_permission_too(trained) -> None:
    said = trained("torch.optim.AdamW", {}, "runtime=sim", "allow_targets=[netmodels,ownsteps]")
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
