"""The same plan in another process, under another hash seed: the same parameters and records, byte
for byte.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.learn.allocator import reduce_collections
from ashl.runtime.rank_context import RankContext
from ashl.tracking import jsonl
from tests.kernels import in_virtual_time
from tests.laws.machines import cluster

RUNS = {  # what has an order to lose: ties, arrivals, jitter, ports, events, evaluations
    "ssp": [
        "sync=ssp",
        "cluster.jitter=0.3",
        "cluster.events=[{time_s: 0.5, worker: 1, compute: 6}]",
    ],
    "ties": ["sync=asp", "cluster=homogeneous", "eval.every_commits=7"],
    "ports": [
        "sync=backup",
        "cluster.exchange_s=null",
        "cluster.bandwidth_mbit_s=50",
        "cluster.latency_s=0.001",
        "cluster.server_bandwidth_mbit_s=50",
        "dataset.partition=dirichlet",
        "dataset.alpha=0.5",
    ],
    "ring": ["sync=local_sgd", "topology=all_reduce", "optimizer=adam"],
}
ALWAYS = [
    "-q",
    "runtime=sim",
    "tracking=none",
    "tracking.events=all",
    "stop.steps=80",
    "model.hidden=[16]",
]
COMMANDS = [["train", f"run.dir={name}", *ALWAYS, *overrides] for name, overrides in RUNS.items()]
SCRIPT = """
import json, sys
from ashl.cli.app import main
for command in json.loads(sys.argv[1]):
    assert main(command) == 0
"""
FILES = ("events.jsonl", "trace.json.gz", "plan.json", "config.yaml", "overrides.yaml")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Make the folders of this process, with a random hash seed, and of another process."""
    here, there = (tmp_path_factory.mktemp(name) for name in ("here", "there"))
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    with contextlib.chdir(here):
        assert [main(command) for command in COMMANDS] == [0] * len(COMMANDS)
    script = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
    subprocess.run(script, cwd=there, env=environment, check=True, timeout=100)
    return [here, there]


@pytest.mark.parametrize("name", RUNS)
def test_another_process_and_another_hash_seed(name: str, folders: list[Path]) -> None:
    one, other = (folder / name for folder in folders)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    assert summaries[0]["params_sha256"] == summaries[1]["params_sha256"] is not None
    for summary in summaries:
        del summary["host_s"]
    assert summaries[0] == summaries[1]
    for file in FILES:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    metrics = [list(jsonl.read(run / "metrics.jsonl")) for run in (one, other)]
    for record in [*metrics[0], *metrics[1]]:
        del record["host_s"]
    assert metrics[0] == metrics[1]


def test_garbage_is_sought_as_before() -> None:
    """The collector ignores objects from before a run."""
    before, seen = gc.get_threshold(), []

    async def main(ctx: RankContext) -> None:
        with reduce_collections():
            seen.append(gc.get_freeze_count() > 0)
        seen.append(gc.get_freeze_count() > 0)
        await ctx.sleep(0.1)

    in_virtual_time(main, cluster(1))
    assert seen == [True, True], "of one inside another the outer one holds"
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
