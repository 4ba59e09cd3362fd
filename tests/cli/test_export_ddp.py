"""`ashl export RUN --to ddp`: the buckets of DDP are the messages of the run, and it learns the
same.
"""

import json
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ashl.cli.app import main
from ashl.overlap.timeline import merge_buckets, untimed_timeline
from ashl.plan.files import read_plan
from ashl.plan.plan import Plan
from ashl.planning.instantiate import OptionFactory, layer_groups
from tests.exported import exported, on_the_batches_of
from tests.support import planned

RUN = (
    "runtime=sim tracking=none topology=all_reduce sync=bsp cluster.compute=[1] stop.steps=6"
    " eval.every_commits=6"
)
OWN = "from ashl.data.digits import Digits\n\n\nclass Photos(Digits):\n    pass\n"
TEXT = (
    "model=gpt model.width=64 model.layers=2 dataset=text task=language_model dataset.batch_size=2"
)


def trained(*overrides: str) -> Path:
    assert main(["train", "-q", *RUN.split(), *overrides, "run.dir=run"]) == 0
    return Path("run")


@pytest.mark.parametrize(
    "what",
    [
        "overlap=merged overlap.plan=[2,1,1] model.hidden=[24,16,8]",
        "overlap=wfbp model=cnn dataset.batch_size=8",
        f"overlap=wfbp {TEXT}",  # a backward pass mixes the gradients of neighbouring messages
    ],
    ids=["mlp", "cnn", "gpt"],
)
def test_ddp_has_the_same_messages_and_learns_the_same(
    what: str, workplace, gloo, monkeypatch
) -> None:
    run = trained(*what.split())
    plan = read_plan(str(run / "plan.json"))
    written = on_the_batches_of(run, exported(run, "ddp"), 6)
    steps: list[list[set[int]]] = []

    def wrapped(net: torch.nn.Module, **keys: Any) -> DistributedDataParallel:
        indices = {id(p): i for i, p in enumerate(net.parameters())}
        net = DistributedDataParallel(net, **keys)

        def summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            steps[-1].append({indices[id(p)] for p in bucket.parameters()})
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        net.register_comm_hook(None, summed)
        return net

    monkeypatch.setattr(written, "DistributedDataParallel", wrapped)
    losses = []
    training = written.train(0)
    for _ in range(6):
        steps.append([])
        losses.append(next(training))
    assert steps == [messages_of(plan)] * 6
    rounds = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(
        [row["loss"] for row in rounds if row["kind"] == "round"], rel=1e-5
    )


def messages_of(plan: Plan) -> list[set[int]]:
    """Return the indices of the parameters in each message, the last layers first."""
    groups = layer_groups(plan)
    counts = (
        OptionFactory(())
        .get_option("overlap", plan.stages[0].overlap)
        .messages(untimed_timeline(groups))
    )
    stops = list(accumulate(prod(shape) for _, shape in plan.layers))
    return [
        {i for i, stop in enumerate(stops) if m.start < stop <= m.stop}
        for m in merge_buckets(groups, counts)
    ]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run --to horovod", "--to horovod: what exists is ddp"),
        ("run --to deepspeed", "--to deepspeed: what exists is ddp, torchft, script"),
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


def test_a_data_set_of_ones_own_is_left_to_the_user(workplace) -> None:
    """The script makes a model that is known, and says what its batches have to be."""
    Path("mine.py").write_text(OWN)
    plan = planned(*RUN.split(), "model.hidden=[8]", "cluster.compute=[1,1]")
    own = replace(
        plan, dataset={**plan.dataset, "_target_": "mine.Photos"}, allow_targets=("mine",)
    )
    Path("run").mkdir()
    Path("run/plan.json").write_text(own.to_json())
    written = exported(Path("run"), "ddp")
    assert isinstance(written.model(), torch.nn.Module)
    with pytest.raises(
        NotImplementedError, match=r"\(inputs, targets\), BATCH samples at a time, of mine.Photos"
    ):
        next(written.batches(0))
