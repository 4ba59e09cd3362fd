"""`ashl export RUN --to ddp`: plain DDP has the run's messages as buckets, and learns the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import vector_to_parameters

from ashl.cli.app import main
from ashl.export.ddp import messages_of, script
from ashl.learn.trainer import Trainer
from ashl.plan.files import read_plan
from ashl.planning.build import assemble
from tests.exported import exported
from tests.support import planned

RUN = "runtime=sim tracking=none topology=all_reduce sync=bsp cluster.compute=[1] stop.steps=6 eval.every_commits=6"
TEXT = "model=transformer dataset=text task=language_model dataset.batch_size=2"


def trained(*overrides: str) -> Path:
    assert main(["train", "-q", *RUN.split(), *overrides, "run.dir=run"]) == 0
    return Path("run")


@pytest.mark.parametrize(
    "what",
    [
        "overlap=merged overlap.plan=[2,1,1] model.hidden=[24,16,8]",
        "overlap=wfbp model=cnn dataset.batch_size=8",
        f"overlap=wfbp {TEXT} runtime.gradients=false",  # a backward pass mixes the gradients of neighbouring messages
    ],
    ids=["mlp", "cnn", "transformer"],
)
def test_plain_ddp_has_the_same_groups_and_learns_the_same(what: str, workplace, gloo) -> None:
    run = trained(*what.split())
    plan = read_plan(str(run / "plan.json"))
    learned = plan.runtime["gradients"]
    job = assemble(replace(plan, runtime={**plan.runtime, "gradients": True}), "cpu")
    trainer = job.stages[0].trainer
    assert isinstance(trainer, Trainer)
    written = exported(run, "ddp")
    net = written.wrapped(written.model())
    vector_to_parameters(trainer.init()[0], net.parameters())
    buckets: list[set[int]] = []
    places = {id(p): i for i, p in enumerate(net.parameters())}

    def summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append({places[id(p)] for p in bucket.parameters()})
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    net.register_comm_hook(None, summed)
    spec = plan.stages[0].optimizer
    sgd = torch.optim.SGD(net.parameters(), spec["lr"], spec["momentum"], weight_decay=spec["weight_decay"])
    batches, size, losses = trainer.batches[0], plan.stages[0].workers[0].batch, []
    for step in range(6):
        buckets.clear()
        inputs, targets = job.data.train.batch(batches.span(step * size, size))
        loss = job.parts.task.loss(net(inputs), targets)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        if step >= 2:
            assert buckets == groups_of(plan)
    rounds = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    if learned:
        assert losses == pytest.approx([row["loss"] for row in rounds if row["kind"] == "round"], rel=1e-5)


def groups_of(plan: Any) -> list[set[int]]:
    """The parameters of each message."""
    stops, groups = [], []
    for _, shape in plan.layers:
        stops.append((stops[-1] if stops else 0) + torch.Size(shape).numel())
    for message in messages_of(plan):
        groups.append({i for i, stop in enumerate(stops) if message.start < stop <= message.stop})
    return groups


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run --to horovod", "--to horovod: what exists is ddp"),
        ("run --to ddp", "run cannot be written for DistributedDataParallel: it was only timed"),
        ("nowhere --to ddp", "nowhere is no folder of a run"),
        ("run nowhere --to ddp", "2 folders are named; name one"),
        ("run --to ddp --format csv", "give one of them"),
    ],
)
def test_wrong_exports(command: str, says: str, workplace, capsys) -> None:
    trained("runtime.gradients=false")
    capsys.readouterr()
    assert main(["export", *command.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ashl: ")
    assert said.count("\n") == 1
    assert says in said


def test_compressed_messages_are_no_buckets() -> None:
    """DDP sums its buckets as they are."""
    common = ("topology=all_reduce", "sync=bsp", "overlap=layerwise")
    assert messages_of(planned(*common))
    assert not messages_of(planned(*common, "compression=topk"))


def test_a_data_set_of_ones_own_leaves_the_model_to_be_made(tmp_path) -> None:
    """The data are not looked at, and the script makes the module of a model that is known."""
    plan = planned("topology=all_reduce", "sync=bsp", "overlap=wfbp", "model.hidden=[8]")
    own = replace(plan, dataset={**plan.dataset, "_target_": "mine.Photos"})
    (tmp_path / "plan.json").write_text(own.to_json())
    written = script(tmp_path)
    assert "return MLP(hidden=[8]).build(sample_shape=" in written
    assert "was not looked at" in written
