"""A real run that continues with the data or the batch of a failed worker has the bits of virtual
time with the same failure.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ashl.cli.app import main
from tests.support import planned, run

LINE = (
    "cluster.compute=[1,1.5,2] cluster.link=null cluster.step_s=0.01 cluster.exchange_s=0.002"
    " aggregate=data_share eval.every_commits=100000 stop.steps=300"
    " model.hidden=[8]"
)
LOST = 2


@pytest.mark.slow
@pytest.mark.parametrize("taken_over", ["reshard", "keep_batch"])
@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_the_survivors_take_over_its_work(topology: str, taken_over: str, workplace: Path) -> None:
    line = [*LINE.split(), f"topology={topology}", "sync=bsp", "optimizer.momentum=0.9"]
    line += [f"runtime.on_worker_failure={taken_over}"]
    fails = f"cluster.events=[{{time_s: 1.0, worker: {LOST}, fail: true}}]"
    assert main(["train", *line, fails, "runtime=local", "run.dir=run", "tracking=none", "-q"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    rounds = summary["workers"][LOST]["commits"]
    assert 10 < rounds < summary["workers"][0]["commits"] - 10
    plan = planned(*line)
    ends = [r["end_ns"] for r in run(plan).of("Round") if r["rank"] == LOST]
    event = {"time_s": (ends[rounds - 1] + 1_000_000) / 1e9, "worker": LOST, "fail": True}
    found = run(replace(plan, cluster=plan.cluster | {"events": [event]}))
    assert found.end["commits"] == [worker["commits"] for worker in summary["workers"]]
    assert found.sha256 == summary["params_sha256"]
    kept = planned(*line, "runtime.on_worker_failure=skip")
    assert run(replace(kept, cluster=kept.cluster | {"events": [event]})).sha256 != found.sha256
