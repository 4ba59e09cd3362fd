"""Overlap between two network namespaces whose link is really slow; how fast is for `tests.benchmarks.links` to say."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.ddp import free_port
from tests.namespaces import job, machines, missing

RUN = (
    "topology=all_reduce sync=bsp runtime=torchrun cluster=real tracking=none model=resnet8 dataset=synthetic "
    "dataset.num_train=640 dataset.num_test=10 stop.steps=24 eval.every_commits=1000 run.dir=run --quiet"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sums_are_hidden_behind_backward_and_change_no_bit(tmp_path: Path) -> None:
    """As root; elsewhere it says why not."""
    if why := missing():
        pytest.skip(why)
    found = {}
    with machines(50, 50) as names:
        for overlap in ("none", "wfbp", "priority", "dear"):
            chosen = [f"overlap={overlap}", *(["overlap.plan=layers"] if overlap in ("priority", "dear") else [])]
            command = [sys.executable, "-m", "ashl.cli", "train", *RUN.split(), *chosen]
            job(names, free_port(), command, tmp_path / overlap)
            found[overlap] = json.loads((tmp_path / overlap / "0" / "run" / "summary.json").read_text())
    assert len({summary["params_sha256"] for summary in found.values()}) == 1
    assert {summary["steps"] for summary in found.values()} == {24}
    assert all(found[overlap]["comm_hidden_share"] > 0.05 for overlap in ("wfbp", "priority", "dear"))
