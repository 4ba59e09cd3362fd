"""Schedules with decay stages: the ends of the stages, and the schedules at their limits."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ashl.errors import UsageError
from tests.support import planned, simulated

BASE = (
    "model.hidden=[16]",
    "cluster=ashl_paper",
    "stop.epochs=2",
    "eval.every_commits=10",
    "optimizer.lr=0.2",
)
NEXT = (*BASE, "schedule=ashl_next")
SWINGS = ("optimizer.lr=1", "eval.every_commits=5")
ONE_H = ("sync=ssp", "sync.local_steps=plan", "schedule.h_preset=[2]", "compression=topk")


@pytest.mark.parametrize(
    "schedule", [("ashl_next",), ("decay_on_rise", *ONE_H)], ids=lambda schedule: schedule[0]
)
def test_a_decay_stage_ends_at_each_rise_of_the_evaluated_loss(schedule):
    name, *more = schedule
    ran = simulated(
        *BASE,
        f"schedule={name}",
        "schedule.decay_stages=3",
        "schedule.decay_factor=0.5",
        *SWINGS,
        *more,
    )
    stages = ran.of("StageEnd")
    assert [(stage["name"], stage["reason"]) for stage in stages] == [
        ("decay1", "rises"),
        ("decay2", "rises"),
        ("decay3", "epochs"),
    ]
    assert [stage.aggregate["scale"] for stage in ran.plan.stages] == [1, 0.5, 0.25]
    merges = [record["merges"] for record, _ in ran.snapshots]
    losses = [scores["train_loss"] for scores in ran.scored.values()]
    rose = [
        at
        for at, (before, after) in zip(merges[1:], pairwise(losses), strict=False)
        if after > before
    ]
    for at, stage in zip(rose, stages[:-1], strict=False):
        assert at <= stage["merges"] <= at + 2 * ran.plan.num_workers, (
            "the work that is under way counts still"
        )


@pytest.mark.limit("schedule=ashl_next")
def test_two_decay_stages_with_a_loss_between_are_ashl_plus():
    alike = ("overlap=delayed", "schedule.h_preset=[2,1]")
    own = simulated(
        *NEXT,
        *alike,
        "schedule.decay_stages=2",
        "schedule.loss_switch=[1.0]",
        "schedule.decay_factor=0.4",
    )
    plus = (
        "schedule=ashl_plus",
        "schedule.profile_steps=0",
        "schedule.loss_switch=1.0",
        "schedule.shl_scale=0.4",
    )
    other = simulated(*BASE, *plus, *alike)
    assert [stage["name"] for stage in own.of("StageEnd")] == ["decay1", "decay2"]
    assert (own.sha256, own.time_ns, own.ledgers) == (other.sha256, other.time_ns, other.ledgers)


@pytest.mark.limit("schedule=decay_on_rise")
def test_one_decay_stage_is_a_single_stage():
    falling = planned(*BASE, "schedule=decay_on_rise", "schedule.decay_stages=1", *ONE_H).stages
    assert [replace(stage, name="ssp") for stage in falling] == list(
        planned(*BASE, "schedule=single", *ONE_H).stages
    )


def test_only_costs_that_nobody_declares_are_profiled():
    plan = planned(*NEXT, "runtime=local", "cluster=real", "cluster.num_workers=2")
    assert [stage.name for stage in plan.stages] == ["profile", *(f"decay{k}" for k in range(1, 9))]
    assert planned(*NEXT).stages[0].name == "decay1"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["schedule.loss_switch=[1.0]"], "need 7 losses"),
        (
            ["schedule.decay_stages=3", "schedule.loss_switch=[1.0,1.0]"],
            "each lower than the one before",
        ),
        (["topology=all_reduce"], "sync=ahl: needs its pattern of messages"),
        (["runtime.gradients=false"], "ends by rises"),
        (
            [
                "cluster.step_s=null",
                "runtime=local",
                "schedule=ashl_plus",
                "schedule.profile_steps=0",
            ],
            "needs initial costs",
        ),
    ],
)
def test_wrong_decay_stages_are_errors(overrides, said):
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        planned(*NEXT, *overrides)


@pytest.mark.parametrize("sync", ["bsp", "bsp topology=all_reduce", "ringleader"])
def test_where_the_optimizer_steps_no_servers_step_can_fall(sync: str) -> None:
    falling = ("schedule=decay_on_rise", *f"sync={sync}".split())
    with pytest.raises(
        UsageError,
        match=rf"stage decay2: .* sync={sync.split()[0]} has none, as it merges gradients",
    ):
        planned(*BASE, *falling)
    assert len(planned(*BASE, *falling, "schedule.decay_stages=1").stages) == 1


def test_a_last_decay_stage_without_steps() -> None:
    with pytest.raises(
        UsageError, match=r"decay_factor=0\.01: .* last of schedule\.decay_stages=500 stages is 0"
    ):
        planned("schedule=decay_on_rise", "schedule.decay_factor=0.01", "schedule.decay_stages=500")
