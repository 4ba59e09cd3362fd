"""Plans of several stages on every topology, on both kernels: each goes on to its last stage, with
the same bits.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from ashl.plan.plan import Plan, Spec
from tests.conformance.test_kernels import QUICK, real
from tests.run_folders import adds_up
from tests.support import Ran, planned, simulated, slow_unless

COMMON = (*QUICK, "cluster=homogeneous", "stop.steps=96")
TWICE = {  # the first stage, and what differs in the second one
    "server": (("sync=bsp",), {"exchange": "difference"}, 1),
    "all_reduce": (
        ("topology=all_reduce", "sync=local_sgd", "sync.local_steps=2"),
        {"local_steps": 3},
        3,
    ),
    "gossip": (
        ("topology=gossip", "sync=d_psgd", "sync.local_steps=2"),
        {"local_steps": 1, "order": "atc"},
        1,
    ),
    "groups": (
        ("topology=partial_all_reduce", "sync=ripples_static", "sync.local_steps=2"),
        {"local_steps": 1},
        1,
    ),
}
ROAMING = ("topology=gossip", "topology.graph=exponential", "sync=ad_psgd")


def of_two(overrides: tuple[str, ...], change: Spec, local_steps: int) -> Plan:
    """The plan of these overrides up to four commits per worker, and after it a stage that
    differs.
    """
    plan = planned(*COMMON, *overrides)
    (stage,) = plan.stages
    workers = tuple(replace(worker, local_steps=local_steps) for worker in stage.workers)
    second = replace(stage, name="second", sync={**stage.sync, **change}, workers=workers)
    return replace(plan, stages=(replace(stage, until={"commits": 4}), second))


@pytest.mark.parametrize("topology", slow_unless(["server", "gossip"], TWICE))
def test_a_plan_reaches_its_last_stage(topology: str, tmp_path: Path) -> None:
    """Partial all-reduce ended after its first stage, as finished."""
    overrides, change, local_steps = TWICE[topology]
    (tmp_path / "plan.json").write_text(of_two(overrides, change, local_steps).to_json())
    chosen = (*COMMON, *overrides, f"plan={tmp_path / 'plan.json'}")
    sim, summary = simulated(*chosen), real(tmp_path / "run", *chosen)
    ends = sim.of("StageEnd")
    assert [end["reason"] for end in ends] == ["commits", "steps"]
    assert min(ends[0]["commits"]) >= 4
    assert summary["params_sha256"] == sim.sha256
    assert [stage["exit_reason"] for stage in summary["stages"]] == ["commits", "steps"]
    assert [stage["steps"] for stage in summary["stages"]] == [
        ends[0]["steps"],
        ends[1]["steps"] - ends[0]["steps"],
    ]
    assert summary["steps"] >= 96
    assert adds_up(summary)


def test_roaming_workers_reach_the_last_stage(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(of_two(ROAMING, {"overlap": False}, 1).to_json())
    summary = real(tmp_path / "run", *COMMON, *ROAMING, f"plan={tmp_path / 'plan.json'}")
    assert [stage["exit_reason"] for stage in summary["stages"]] == ["commits", "steps"]
    assert summary["steps"] >= 96
    assert adds_up(summary)


def stages_of_two(folder: Path, overrides: tuple[str, ...]) -> Ran:
    """Twice the same stage, in virtual time, evaluated at each merge."""
    (folder / "plan.json").write_text(of_two(overrides, {}, 1).to_json())
    return simulated(*COMMON, *overrides, "eval.every_commits=1", f"plan={folder / 'plan.json'}")


def test_workers_that_went_on_alone_average_their_models_again(tmp_path: Path) -> None:
    """Each worker kept its own last work at a stage boundary, and groups took their models for
    identical from then on.
    """
    ran = stages_of_two(
        tmp_path, ("topology=partial_all_reduce", "sync=ripples_first_come", "sync.group_size=4")
    )
    met = [
        record["group"] for record in ran.of("Round") if record["stage"] == 1 and record["group"]
    ]
    assert met
    assert all(group == [0, 1, 2, 3] for group in met)
    assert ran.snapshots[-1][0]["consensus_distance"] < 1e-10


def test_relays_do_not_fall_back_to_the_first_model(tmp_path: Path) -> None:
    """A message that is missing at the start of a stage was replaced by the first model of the run."""
    ran = stages_of_two(tmp_path, ("topology=gossip", "topology.graph=ring", "sync=relay_sum"))
    models = {record["merges"]: params for record, params in ran.snapshots}
    border = ran.of("StageEnd")[0]["merges"]
    before, after = (float((models[k] - models[1]).norm()) for k in (border, border + 1))
    assert after > before


def test_replicas_start_from_the_models_at_the_stage_boundary(tmp_path: Path) -> None:
    """They started from the model that the run began with, and a few per cent of what is between
    cannot catch up.
    """
    sparse = (
        "compression=topk",
        "compression.error_feedback=false",
        "sync.gamma=1",
        "optimizer.momentum=0",
    )
    graph = ("topology=gossip", "topology.graph=complete")
    ran = stages_of_two(tmp_path, (*graph, "sync=choco", *sparse))
    border = ran.of("StageEnd")[0]["merges"]
    apart = {record["merges"]: record["consensus_distance"] for record, _ in ran.snapshots}
    assert apart[border] > 1e-6
    assert apart[border + 1] < 1e-10, "all have heard the models of all"


@pytest.mark.parametrize("topology", slow_unless(["all_reduce", "groups"], TWICE))
def test_a_stage_gives_way_by_the_evaluated_loss(topology: str, tmp_path: Path) -> None:
    overrides, change, local_steps = TWICE[topology]
    plan = of_two(overrides, change, local_steps)
    first = replace(plan.stages[0], until={"evaluated_loss": 2.2})
    (tmp_path / "plan.json").write_text(replace(plan, stages=(first, plan.stages[1])).to_json())
    chosen = (*COMMON, *overrides, "eval.every_commits=1", f"plan={tmp_path / 'plan.json'}")
    ran = simulated(*chosen)
    ends = ran.of("StageEnd")
    assert [end["reason"] for end in ends] == ["evaluated_loss", "steps"]
    losses = [
        ran.learner.evaluate(model)["train_loss"]
        for m, model in ran.snapshots
        if m["time_ns"] <= ends[0]["end_ns"]
    ]
    assert min(losses) <= 2.2 < losses[0]
    if topology == "server":  # long enough for the result of an evaluation, which takes real time
        summary = real(tmp_path / "run", *chosen, "stop.steps=400")
        assert [stage["exit_reason"] for stage in summary["stages"]] == ["evaluated_loss", "steps"]


@pytest.mark.slow
def test_a_rise_of_the_loss_begins_a_decay_stage(tmp_path: Path) -> None:
    swings = ("optimizer.lr=1", "eval.every_commits=5", "stop.steps=600", "cluster.num_workers=2")
    summary = real(
        tmp_path / "run",
        *QUICK,
        "cluster=homogeneous",
        "schedule=ashl_next",
        "schedule.decay_stages=3",
        *swings,
    )
    assert [stage["exit_reason"] for stage in summary["stages"]] == ["rises", "rises", "steps"]
    assert [stage["name"] for stage in summary["stages"]] == ["decay1", "decay2", "decay3"]
    assert adds_up(summary)


def test_a_stage_boundary_and_a_budget_leave_no_hang(tmp_path) -> None:
    """Two stages of a mode in which nobody waits, ended by the clock."""
    (tmp_path / "plan.json").write_text(of_two(("sync=asp", "overlap=delayed"), {}, 1).to_json())
    chosen = ("sync=asp", "overlap=delayed", "stop.seconds=1", f"plan={tmp_path / 'plan.json'}")
    summary = real(tmp_path / "run", *COMMON[:-1], "stop.steps=9999", *chosen)
    assert summary["status"] == "finished"
    assert [stage["exit_reason"] for stage in summary["stages"]] == ["commits", "seconds"]
    assert summary["steps"] == sum(worker["steps"] for worker in summary["workers"]) > 0
    assert adds_up(summary)
