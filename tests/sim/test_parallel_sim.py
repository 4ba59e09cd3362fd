"""A simulation on several cores: the same bits, computed elsewhere."""

import json
import threading
import time
from pathlib import Path

import pytest

from ashl.cli.app import main
from ashl.errors import UsageError
from ashl.learn.learner import Learner
from ashl.runtime.effects import Compute
from ashl.runtime.parallel_sim import (
    MIN_PARALLEL_S,
    TIMED_COMPUTATIONS,
    ParallelCompute,
    use_cores,
)
from tests.support import slow_unless

RUN = (
    "runtime=sim tracking=none cluster.compute=[1,2,3] stop.steps=60 model.hidden=[16]"
    " eval.every_commits=20"
)
MODES = {
    "asp": "sync=asp compression=topk",
    "pairs": "topology=gossip sync=ad_psgd topology.graph=complete",
    "in parts": "topology=all_reduce sync=bsp overlap=merged overlap.plan=[1,1]",
    "batch norm": "sync=ssp model=resnet8 dataset.batch_size=4 stop.steps=9",
}


def outcome(*overrides: str) -> tuple[str, str]:
    """The hash of the parameters, and the evaluations without what the host took."""
    folder = Path("run" + str(len(list(Path().glob("run*")))))
    overrides = tuple(
        key
        for key in overrides
        if not (key.startswith("model.hidden") and "model=resnet8" in overrides)
    )
    assert main(["train", "-q", *overrides, f"run.dir={folder}"]) == 0
    lines = (folder / "metrics.jsonl").read_text()
    rows = [
        {k: v for k, v in json.loads(line).items() if k != "host_s"} for line in lines.splitlines()
    ]
    return json.loads((folder / "summary.json").read_text())["params_sha256"], str(rows)


@pytest.mark.parametrize("mode", slow_unless(["asp", "batch norm"], MODES))
def test_same_bits_on_other_threads(
    mode: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, threads, gradient = (
        [*RUN.split(), *MODES[mode].split()],
        set[str](),
        Learner.gradient_found,
    )

    def seen(self: Learner, *args, **named):
        threads.add(threading.current_thread().name)
        return gradient(self, *args, **named)

    monkeypatch.setattr(Learner, "gradient_found", seen)
    alone = outcome(*line, "runtime.cores=1")
    assert threads <= {"MainThread"}
    threads.clear()
    assert outcome(*line, "runtime.cores=3") == alone
    assert threads <= {"core_0", "core_1", "core_2"}
    assert threads or mode == "in parts"  # which run where they are asked for


def test_one_core_where_the_model_draws_from_the_only_generator() -> None:
    class Drawing:
        device, threadsafe = "cpu", False

    class Simulation:
        begin_compute = None

    with use_cores(Simulation, 4, 4, Drawing()):
        assert Simulation.begin_compute is None


@pytest.mark.parametrize(("takes_s", "elsewhere"), [(0.0, False), (2 * MIN_PARALLEL_S, True)])
def test_short_steps_are_not_handed_over_by_themselves(takes_s: float, elsewhere: bool) -> None:
    class Pool:
        def submit(self, fn):
            return "begun"

    ahead = ParallelCompute(Pool, TIMED_COMPUTATIONS)
    effect = Compute(lambda: time.sleep(takes_s), 1)
    assert [ahead(effect) for _ in range(TIMED_COMPUTATIONS)] == [None] * TIMED_COMPUTATIONS
    assert ahead(effect) == ("begun" if elsewhere else None)
    assert ahead(Compute(lambda: "merged", 1, "apply")) == "merged"


def test_an_error_on_another_core_is_told_as_ever(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradient = Learner.gradient_found

    def fails(self: Learner, params, indices, worker: int, step: int, *more, **named):
        if step == 5:
            raise UsageError(f"worker {worker} will not")
        return gradient(self, params, indices, worker, step, *more, **named)

    monkeypatch.setattr(Learner, "gradient_found", fails)
    assert main(["train", "-q", *RUN.split(), "sync=bsp", "run.dir=run", "runtime.cores=2"]) == 2
    assert capsys.readouterr().err == "ashl: worker 0 will not\n"
    assert threading.active_count() == 1
