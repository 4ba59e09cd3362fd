"""Weight files for plain torch: the last and the best model, with the names of the model."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.config.construct import construct

SIM = ["runtime=sim", "tracking=none", "run.dir=run", "stop.epochs=2", "-q"]


def left(run: Path, name: str) -> dict[str, Tensor]:
    found = torch.load(run / name, weights_only=True)
    assert type(found) is dict
    return found


def used(weights: dict[str, Tensor], *overrides: str) -> float:
    """The accuracy of these weights in plain torch, on the test set."""
    config = compose(list(overrides))
    data = construct(config["dataset"], "dataset").load()
    model: nn.Module = construct(config["model"], "model").build(
        data.sample_shape, data.num_classes
    )
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        right = model(data.test.inputs).argmax(dim=1) == data.test.targets
    return float(right.double().mean())


@pytest.mark.parametrize(
    "model",
    [("model=mlp", "model.hidden=[8]"), ("model=resnet20", "model.depth=8", "stop.steps=24")],
)
def test_weights_in_plain_torch(model: tuple[str, ...], workplace: Path) -> None:
    more = ("eval.every_commits=4", "optimizer.lr=0.3")
    assert main(["train", *SIM, "sync=bsp", *model, *more]) == 0
    summary = json.loads((workplace / "run/summary.json").read_text())
    chosen = [override for override in model if override.startswith("model")]
    assert used(left(workplace / "run", "final.pt"), *chosen) == pytest.approx(
        summary["final"]["test_accuracy"]
    )
    assert used(left(workplace / "run", "best.pt"), *chosen) == pytest.approx(
        summary["best"]["test_accuracy"]
    )
    assert summary["best"]["test_accuracy"] >= summary["final"]["test_accuracy"]


def test_of_gossip_it_is_the_mean(workplace: Path) -> None:
    assert main(["train", *SIM, "sync=d_psgd", "topology=gossip", "model.hidden=[8]"]) == 0
    params = torch.cat(
        [weight.flatten() for weight in left(workplace / "run", "final.pt").values()]
    )
    summary = json.loads((workplace / "run/summary.json").read_text())
    assert hashlib.sha256(params.numpy().tobytes()).hexdigest() == summary["params_sha256"]


@pytest.mark.parametrize("how", ["runtime.gradients=false", "run.save_weights=false"])
def test_where_there_are_none(how: str, workplace: Path) -> None:
    assert main(["train", *SIM, "sync=bsp", "model.hidden=[8]", how]) == 0
    assert not list((workplace / "run").glob("*.pt"))


@pytest.mark.parametrize("asked", [(), ("run.save_weights=true",)])
def test_a_sweep_keeps_them_where_asked(asked: tuple[str, ...], workplace: Path) -> None:
    assert main(["sweep", *SIM, "sync=bsp", "model.hidden=[4]", "seed=0,1", *asked]) == 0
    found = [
        sorted(path.name for path in child.glob("*.pt"))
        for child in (workplace / "run").iterdir()
        if child.is_dir()
    ]
    assert found.count(["best.pt", "final.pt"] if asked else []) >= 2


def test_a_resumed_run_keeps_the_best_evaluation(workplace: Path) -> None:
    short = [
        "runtime=sim",
        "tracking=none",
        "run.dir=run",
        "-q",
        "model.hidden=[8]",
        "sync=bsp",
        "eval.every_s=0.5",
    ]
    assert main(["train", *short, "run.checkpoint_s=1.1", "stop.seconds=2"]) == 0
    whole = left(workplace / "run", "best.pt")
    assert main(["train", "--resume", "run", "-q", "stop.seconds=1.2"]) == 0
    summary = json.loads((workplace / "run/summary.json").read_text())
    again = left(workplace / "run", "best.pt")
    assert used(again, "model.hidden=[8]") == pytest.approx(summary["best"]["test_accuracy"])
    assert not all(torch.equal(again[name], whole[name]) for name in whole)
