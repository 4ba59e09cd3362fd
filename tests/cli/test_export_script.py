"""`ashl export RUN --to script`: the script learns what the run learned, on the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.exported import exported, on_the_batches_of

RUN = (
    "runtime=sim tracking=none cluster.compute=[1] stop.steps=24 eval.every_commits=100"
    " model.hidden=[16] run.dir=run"
)


def trained(*overrides: str) -> Path:
    assert main(["train", "-q", *RUN.split(), *overrides]) == 0
    return Path("run")


@pytest.mark.parametrize(
    "what",
    [
        (
            "topology=all_reduce sync=bsp optimizer.nesterov=true optimizer.schedule=cosine"
            " optimizer.horizon_epochs=1"
        ),
        (
            "sync=bsp compression=topk compression.ratio=0.1 optimizer.momentum=0"
            " optimizer.warmup_epochs=0.3"
        ),
        "topology=all_reduce sync=local_sgd sync.local_steps=4 outer=nesterov optimizer=adamw",
        "sync=local_sgd sync.local_steps=3 outer=heavy_ball compression=topk",
    ],
)
def test_the_same_losses_on_the_same_batches(what: str, workplace: Path, gloo: None) -> None:
    run = trained(*what.split())
    written = on_the_batches_of(run, exported(run, "script"), 24)
    rounds = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rounds if row["kind"] == "round"]
    assert len(losses) >= 6
    assert list(written.train(0)) == pytest.approx(losses, rel=1e-4)


def test_its_own_batches_are_shares_of_the_data(workplace: Path) -> None:
    trained("sync=bsp", "cluster.compute=[1,1]")
    written = exported(Path("run"), "script")
    shares = []
    for rank in (0, 1):
        stream = written.batches(rank)
        shares.append({tuple(x.flatten().tolist()) for _ in range(20) for x in next(stream)[0]})
    assert not shares[0] & shares[1]
    assert all(len(share) > 500 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "what"),
    [
        ("script", "sync=local_sgd"),
        ("ddp", "sync=bsp"),
    ],
)
def test_it_runs_under_torchrun(to: str, what: str, workplace: Path) -> None:
    """Train all workers on newly drawn shards; the loss falls like the run's."""
    run = trained("topology=all_reduce", *what.split(), "cluster.compute=[1,1]", "stop.steps=1200")
    exported(run, to)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"train_{to}.py",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    _, _, loss = done.stdout.splitlines()[-1].rpartition(" ")
    assert float(loss) < 0.5
