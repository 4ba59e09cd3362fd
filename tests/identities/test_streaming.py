"""A model exchanged in fragments, beside local steps: DiLoCo at its limit, the rule as a plain
loop, time and bytes.
"""

from functools import partial

import pytest
import torch

from ashl.planning.instantiate import (
    assemble_job,
    fragments_of,
    layer_groups,
    parts_of,
    size_only_trainers,
)
from tests.support import planned, simulated

BASE = (
    "model.hidden=[16]",
    "optimizer.lr=0.05",
    "optimizer.momentum=0.9",
    "cluster.compute=[1,1,3]",
    "cluster.link=null",
    "topology=all_reduce",
    "sync=local_sgd",
    "sync.local_steps=3",
)
run = partial(simulated, *BASE)
stream = partial(run, "overlap=streaming")


def test_fragments_land_as_the_rule_says() -> None:
    h, tau, alpha, rounds = 3, 2, 0.25, 6
    at = ("overlap.fragments=2", f"overlap.delay={tau}", f"overlap.alpha={alpha}")
    ran = stream(*at, "outer=heavy_ball", "outer.momentum=0.5", f"stop.steps={3 * h * rounds}")
    stage = assemble_job(ran.plan, "cpu").stages[0]
    trainer, fragments = stage.trainer, stage.fragments
    assert sum(fragment.size for fragment in fragments) == trainer.num_params
    model, moments = trainer.init()
    own, kept, speed, due = [model] * 3, [moments] * 3, torch.zeros_like(model), None
    for step in range(h * rounds + tau):
        for worker in range(3):
            _, kept[worker], own[worker] = trainer.local_step(
                own[worker], kept[worker], worker, step, 0.05
            )
        if due is not None and step % h == tau - 1:
            part = fragments[(step // h - 1) % 2]
            pace = 0.5 * part.extract(speed) + due
            speed, model = part.insert(speed, pace), part.insert(model, part.extract(model) + pace)
            own = [
                part.insert(x, alpha * part.extract(x) + (1 - alpha) * part.extract(model))
                for x in own
            ]
        if step % h == h - 1:
            part = fragments[(step // h) % 2]
            due = sum(part.extract(x) - part.extract(model) for x in own) / 3
    torch.testing.assert_close(ran.params, model, rtol=0, atol=1e-5)
    assert ran.end["stale_max"] == [1, 1, 1]


def test_an_exchange_is_hidden_by_as_many_steps_as_it_may_take() -> None:
    """Times agree to the nanosecond: first H steps, then rounds of H steps with the visible part of
    an exchange, and the last.
    """
    h, tau, rounds, step = 3, 2, 4, 30_000_000  # of the slowest
    at = ("cluster.step_s=0.01", "cluster.exchange_s=0.2", f"stop.steps={3 * h * rounds}")
    serial, ran = run(*at), stream(*at, "overlap.fragments=1", f"overlap.delay={tau}")
    exchange = (serial.time_ns - rounds * h * step) // rounds
    one = (h - tau) * step + max(tau * step, exchange)
    assert ran.time_ns == h * step + (rounds - 1) * one + exchange
    assert ran.plan.stages[0].predicted_steps_per_s == pytest.approx(3 * h / one * 1e9)


def test_each_exchange_is_of_a_fragment() -> None:
    at = ("model.hidden=[64,64,10]", "stop.steps=72", "runtime.gradients=false")
    ran, whole = stream(*at, "overlap.fragments=2"), run(*at)
    assert "2 fragments" in ran.plan.notes[0]
    for one, other in zip(ran.of("TimeTotals"), whole.of("TimeTotals"), strict=True):
        assert one["bytes_up"] == pytest.approx(other["bytes_up"] / 2, rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        ("model=mlp",),
        ("model.hidden=[64,64,64,64]",),
        ("model=cnn",),
        ("dataset=synthetic", "model=resnet8"),
        ("dataset=text", "model=gpt", "model.width=32"),
    ],
    ids=["default", "mlp", "cnn", "resnet", "gpt"],
)
@pytest.mark.parametrize("count", [2, 3])
def test_fragments_are_whole_layer_groups_and_balanced(model: tuple[str, ...], count: int) -> None:
    """No two differ by more than the largest group; the groups are those of every other overlap."""
    chosen = ("topology=all_reduce", *model)
    groups = layer_groups(planned(*chosen, "sync=bsp", "overlap=wfbp"))
    if count > len(groups):
        return
    plan = planned(*chosen, "sync=local_sgd", "overlap=streaming", f"overlap.fragments={count}")
    fragments = fragments_of(
        plan, parts_of(plan).stages[0], size_only_trainers(plan, parts_of(plan), 100)[0]
    )
    assert sorted(run for held in fragments for run in held.runs) == sorted(
        (g.start, g.stop) for g in groups
    )
    sizes = [held.size for held in fragments]
    assert all(sizes)
    assert max(sizes) - min(sizes) <= max(group.stop - group.start for group in groups)


def test_elements_that_were_drawn_are_averaged_and_what_was_learned_meanwhile_is_kept() -> None:
    h, q, rounds = 3, 2, 5
    ran = run(
        "overlap=loscar", "overlap.share=0.3", f"overlap.delay={q}", f"stop.steps={3 * h * rounds}"
    )
    stage = assemble_job(ran.plan, "cpu").stages[0]
    model, moments = stage.trainer.init()
    own, kept, sent, drawn = [model] * 3, [moments] * 3, [], set()
    for step in range(h * rounds + q):
        for worker in range(3):
            _, kept[worker], own[worker] = stage.trainer.local_step(
                own[worker], kept[worker], worker, step, 0.05
            )
        if step >= h and step % h == q - 1:
            part = stage.fragments[0].with_drawn_indices(stage.seed, step // h - 1)
            drawn.update(part.indices.tolist())
            model = part.insert(model, sum(map(part.extract, sent)) / 3)
            own = [
                part.insert(z, part.extract(model) + part.extract(z) - part.extract(y))
                for z, y in zip(own, sent, strict=True)
            ]
        if step % h == h - 1:
            sent = [*own]
    torch.testing.assert_close(ran.params, model, rtol=0, atol=1e-5)
    assert 0.7 < len(drawn) / stage.trainer.num_params < 0.95, "of which 0.3 each time"


@pytest.mark.parametrize("overlap", ["loscar", "streaming"])
def test_a_budget_before_a_round_that_is_cut_ends_it_for_all(overlap: str) -> None:
    """The slow have no step left to take beside the exchange in which the word comes, and the quick
    have.
    """
    planned = (
        "schedule=decay_on_rise",
        "schedule.decay_stages=1",
        "schedule.h_preset=[2]",
        "sync.local_steps=plan",
    )
    for seconds in (0.27, 0.3, 0.34):
        ran = simulated(
            "topology=all_reduce",
            "sync=local_sgd",
            *planned,
            f"overlap={overlap}",
            "stop.steps=52",
            f"stop.seconds={seconds}",
        )
        assert ran.end["reason"] == "seconds"
