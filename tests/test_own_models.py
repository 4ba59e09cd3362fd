"""Models as users write them: one worker equals plain torch, two by all-reduce equal
DistributedDataParallel.

Buffers are each worker's own during training. At the end floating-point ones are averaged, and
others are the first worker's. BatchNorm's statistics, if the model trains it, are estimated again
and not compared.
"""

from pathlib import Path

import pytest
import torch
from own_models import MODELS, Blobs, Counting, Net, Remembering, Running
from support import Ran, run
from torch import Tensor, nn
from torch.nn import functional

import ashl
from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.data.batches import Batches
from ashl.data.rng import Purpose, torch_seed
from ashl.device import HOST, seed_generators
from ashl.learn.making import make_module
from ashl.learn.module_state import mean_of, set_values, state_of
from ashl.learn.trainer import Trainer
from ashl.model.plain import PlainModel
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import assemble_job
from ashl.run.monitor import FINAL
from tests.support import slow_unless

STEPS, RATE, MOMENTUM, DECAY = 12, 0.05, 0.9, 1e-3
OPTIMIZER = (
    f"optimizer.lr={RATE}",
    f"optimizer.momentum={MOMENTUM}",
    f"optimizer.weight_decay={DECAY}",
)
ESTIMATED = ("running_mean", "running_var", "num_batches_tracked")
SETTINGS = (
    "allow_targets=[own_models]",
    "tracking=none",
    "dataset=blobs",
    "topology=all_reduce",
    "sync=bsp",
    "cluster=homogeneous",
    "cluster.step_s=0.001",
    "cluster.exchange_s=0.001",
    "seed=3",
    *OPTIMIZER,
)


@pytest.fixture(autouse=True)
def _options(workplace: Path) -> None:
    options()


def options() -> None:
    """Write the options of the models and of their data."""
    for name, text in {
        "dataset/blobs": "defaults: [_own]\n_target_: own_models.Blobs\nbatch_size: 8\nepochs: 4\n",
        **{
            f"model/{kind.__name__.lower()}": f"_target_: own_models.{kind.__name__}\n"
            for kind in MODELS
        },
    }.items():
        path = Path(f"options/{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def chosen(kind: type[nn.Module], workers: int, *more: str) -> tuple[str, ...]:
    own = (
        f"model={kind.__name__.lower()}",
        f"cluster.num_workers={workers}",
        f"stop.steps={workers * STEPS}",
    )
    return (*SETTINGS, *own, *more)


def simulated(kind: type[nn.Module], workers: int, *more: str) -> Ran:
    return run(
        compile_plan(compose(["runtime=sim", *chosen(kind, workers, *more)], Path("options")))
    )


def made(kind: type[nn.Module]) -> nn.Module:
    return make_module(PlainModel(kind, {}), (4,), 4, 3)


def plain_torch(kind: type[nn.Module], batches: list[Batches]) -> nn.Module:
    """A loop of plain torch on these workers' batches: each has a module of its own, and gradients
    are averaged.
    """
    train, modules = Blobs(True), [made(kind) for _ in batches]
    optimizers = []
    for module in modules:
        held = [part for part in module.modules() if not part.training]
        module.train()
        for part in held:
            part.training = False
        learned = [p for p in module.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(learned, RATE, MOMENTUM, weight_decay=DECAY))
    for step in range(STEPS):
        for worker, module in enumerate(modules):
            x, y = train.x[batches[worker].indices(step)], train.y[batches[worker].indices(step)]
            with seed_generators(torch_seed(3, Purpose.MODEL, worker, step), HOST):
                functional.cross_entropy(module(x), y).backward()
        for same in zip(*(module.parameters() for module in modules), strict=True):
            if same[0].grad is not None:
                total = torch.stack([p.grad for p in same]).mean(0)  # type: ignore[list-item]
                for p in same:
                    p.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        set_values(modules[0], mean_of([state_of(module) for module in modules]))
    return modules[0]


def assert_same(state: dict[str, Tensor], expected: nn.Module, kind: type[nn.Module]) -> None:
    theirs = expected.state_dict()
    assert state.keys() == theirs.keys()
    for name, value in state.items():
        if kind.__name__ not in ("Normed",) or not name.endswith(ESTIMATED):
            torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("workers", slow_unless([2], [1, 2]))
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm|spectral_norm:FutureWarning")
def test_workers_learn_what_plain_torch_learns(kind: type[nn.Module], workers: int) -> None:
    """Train with evaluations in between, which change nothing."""
    ran = simulated(kind, workers, "eval.every_commits=5")
    assert ran.learner is not None
    trainer = assemble_job(ran.plan, HOST).stages[0].trainer
    assert isinstance(trainer, Trainer)
    expected = plain_torch(kind, trainer.batches)
    for _ in range(2):
        assert_same(ran.learner.state_dict(ran.params), expected, kind)
        found = ran.learner.evaluate(ran.params)
    test = Blobs(False)
    if kind.__name__ != "Normed":
        loss = functional.cross_entropy(expected.eval()(test.x), test.y).item()
        assert found["test_loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("kind", [Running, Counting, Remembering], ids=lambda kind: kind.__name__)
def test_a_run_that_was_interrupted_ends_with_the_same_state(kind: type[Net]) -> None:
    own = chosen(
        kind, 2, "runtime=sim", "sync=asp", "topology=parameter_server", "run.checkpoint_s=0.004"
    )
    whole = ashl.train(*own, config_dir="options")
    part = ashl.train(*own, "stop.steps=14", config_dir="options")
    again = [
        "train",
        "-q",
        "--config-dir",
        "options",
        "allow_targets=[own_models]",
        "--resume",
        str(part.folder),
    ]
    assert main([*again, f"stop.steps={2 * STEPS}"]) == 0
    first, second = (torch.load(one.folder / FINAL) for one in (whole, part))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", [Running], ids=lambda kind: kind.__name__)
def test_processes_evaluate_and_save_what_the_workers_have(kind: type[Net]) -> None:
    real = ashl.train(*chosen(kind, 2, "runtime=local"), config_dir="options")
    virtual = simulated(kind, 2)
    assert virtual.learner is not None
    expected = virtual.learner.state_dict(virtual.params)
    found = torch.load(real.folder / FINAL)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert real["final"]["test_loss"] == pytest.approx(
        virtual.learner.evaluate(virtual.params)["test_loss"], rel=1e-6
    )
