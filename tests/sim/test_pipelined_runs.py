"""Sums that go on under the next forward pass: the same model as without overlap, however the run
ends.
"""

from dataclasses import replace

import pytest

from tests.conformance.test_kernels import trained
from tests.run_folders import adds_up
from tests.sim.test_overlapped_runs import SUMS, UNEQUAL
from tests.support import planned, simulated

SLICES = ("overlap=priority", "overlap.slice=500", "overlap.credit=2")
HALVES = ("overlap=dear", "overlap.plan=layers")
NETS = (
    "dataset=digits",
    "model=mlp",
    "model.hidden=[24,16]",
    "cluster.bandwidth_mbit_s=2",
    "cluster.latency_s=0.0002",
)


def test_the_same_model_of_one_sample_at_a_time() -> None:
    """Products with a vector, of a model that is not copied each step: where a matrix lies plays a
    part.
    """
    chosen = (*SUMS, *NETS[:2], "model.hidden=[301,257]", "dataset.batch_size=1", "stop.steps=6")
    assert (
        len(
            {
                simulated(*chosen, "cluster.compute=[1,2]", *o).sha256
                for o in ((), ("overlap=priority",), HALVES)
            }
        )
        == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        ("model=resnet8", "dataset=synthetic", "dataset.batch_size=8"),
        ("dataset=text", "model=gpt", "model.width=32"),
    ],
    ids=["normalised", "gpt"],
)
def test_the_same_model_of_other_networks(model) -> None:
    chosen = (*SUMS, *UNEQUAL, *model, "stop.steps=14", "optimizer.momentum=0.9")
    overlaps = ((), ("overlap=wfbp",), SLICES, HALVES)
    assert len({simulated(*chosen, *overlap).sha256 for overlap in overlaps}) == 1


@pytest.mark.parametrize("overlap", [SLICES, HALVES], ids=["priority", "dear"])
def test_a_target_ends_the_run_a_step_later_at_most(overlap, tmp_path) -> None:
    small = (
        *SUMS,
        *NETS,
        "cluster.compute=[1,2]",
        "stop.target_accuracy=0.2",
        "eval.every_commits=2",
        "runtime=sim",
    )
    serial, other = (
        trained(tmp_path / name, *small, *o) for name, o in (("serial", ()), ("other", overlap))
    )
    assert (
        serial["stages"][0]["exit_reason"] == other["stages"][0]["exit_reason"] == "target_accuracy"
    )
    assert serial["steps"] <= other["steps"] <= serial["steps"] + 2
    assert adds_up(other)


def test_a_stage_that_follows_knows_how_old_its_model_is(tmp_path) -> None:
    """Late gradients after a pipelined stage: one step late, as without it; the plan's own overlap
    is in its note.
    """
    first, second = (
        planned(*SUMS, *NETS, *overlap).stages[0] for overlap in (HALVES, ("overlap=delayed",))
    )
    stages = (replace(first, until={"commits": 3}), replace(second, name="late"))
    plan = replace(planned(*SUMS, *NETS, "overlap=delayed"), stages=stages)
    (tmp_path / "plan.json").write_text(plan.to_json())
    run = simulated(*SUMS, *NETS, "stop.steps=24", f"plan={tmp_path / 'plan.json'}")
    assert set(run.end["stale_max"]) == {1}
    assert any(
        note.startswith("overlap=delayed changes what is learned") for note in run.plan.notes
    )
