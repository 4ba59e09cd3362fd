"""`run.start_from`: a run that begins with the weights of another one, on other workers and
another topology.
"""

import json
import re
from pathlib import Path

import pytest
import torch

import ashl
from ashl.errors import UsageError
from cli.app import main

SHORT = ("cluster=homogeneous", "tracking=none", "model.hidden=[4]", "stop.steps=12")
STILL = "optimizer.lr=1e-30"  # steps that round to nothing


@pytest.fixture
def first(workplace: Path) -> Path:
    """A run of two workers."""
    return ashl.train("runtime=sim", "sync=bsp", "cluster.num_workers=2", *SHORT).folder


def hash_of(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["params_sha256"]


@pytest.mark.parametrize(
    "own",
    [
        "sync=bsp",
        "topology=all_reduce sync=local_sgd",
        "topology=gossip sync=ad_psgd topology.graph=complete",
    ],
)
def test_steps_of_no_length_leave_the_weights_of_the_other_run(first: Path, own: str) -> None:
    run = ashl.train(
        "runtime=sim",
        "cluster.num_workers=3",
        *own.split(),
        *SHORT,
        STILL,
        f"run.start_from={first}",
    )
    assert run["params_sha256"] == hash_of(first)
    assert run.plan["start_from"] == str(first.resolve() / "final.pt")


def test_processes_start_from_it_too_and_a_file_of_plain_torch_will_do(first: Path) -> None:
    own = (
        "runtime=local",
        "topology=all_reduce",
        "sync=bsp",
        "cluster.num_workers=3",
        "cluster.step_s=0.0001",
    )
    run = ashl.train(*own, *SHORT, STILL, f"run.start_from={first / 'final.pt'}")
    assert run["params_sha256"] == hash_of(first)


def test_it_continues_learning_from_there(first: Path) -> None:
    run = ashl.train(
        "runtime=sim", "sync=bsp", *SHORT, "eval.every_commits=1", f"run.start_from={first}"
    )
    before = json.loads((first / "summary.json").read_text())["final"]["train_loss"]
    assert run["final"]["train_loss"] < before < 2.3 < run.metrics["train/loss"].iloc[0] + 0.5


def test_a_script_of_such_a_run_starts_from_it(first: Path) -> None:
    run = ashl.train(
        "runtime=sim", "topology=all_reduce", "sync=bsp", *SHORT, f"run.start_from={first}"
    )
    assert main(["export", str(run.folder), "--to", "script", "--out", "train.py"]) == 0
    scope: dict = {"__name__": "script"}
    exec(Path("train.py").read_text(), scope)
    for name, tensor in torch.load(first / "final.pt", weights_only=True).items():
        assert torch.equal(scope["model"]().state_dict()[name], tensor)


def test_what_does_not_fit_is_refused(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("runtime=sim", "sync=bsp", *SHORT)
    with pytest.raises(UsageError, match=r"final\.pt does not fit the model: .*size mismatch"):
        ashl.train(*own, "model.hidden=[5]", f"run.start_from={first}")
    with pytest.raises(UsageError, match="nowhere is neither a file of weights nor a run folder"):
        ashl.train(*own, "run.start_from=nowhere")
    torch.save(
        {name: t * 1j for name, t in torch.load(first / "final.pt", weights_only=True).items()},
        "complex.pt",
    )
    with pytest.raises(UsageError, match=r"complex\.pt does not fit the model: .*complex numbers"):
        ashl.train(*own, "run.start_from=complex.pt")
    assert main(["train", "--resume", str(first), "topology=all_reduce"]) == 2
    assert f"start a new one from its weights: run.start_from={first}" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("kind", ["plan", "empty", "truncated", "whole module", "loop"])
def test_a_file_that_is_no_state_dict_is_refused_in_words_of_ashl(first: Path, kind: str) -> None:
    """Torch's own text has several sentences, and advises to run the code in the file."""
    file = Path("file.pt")
    if kind == "plan":
        file = first / "plan.json"
    elif kind == "empty":
        file.touch()
    elif kind == "truncated":
        file.write_bytes((first / "final.pt").read_bytes()[:-100])
    elif kind == "whole module":
        torch.save(torch.nn.Linear(2, 2), file)
    else:
        file.symlink_to(file.name)
    says = "is damaged or no state dict of torch; name a file that torch.save(model.state_dict()"
    if kind == "loop":
        says = "is neither a file of weights nor a run folder"
    with pytest.raises(UsageError, match=re.escape(f"{file.name} {says}")):
        ashl.train("runtime=sim", "sync=bsp", *SHORT, f"run.start_from={file}")
