"""Guarantees of every aggregation rule, checked for all of them: a new rule is one row of the
table.
"""

from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ashl.aggregate.weighted import Push
from ashl.plan.assignments import Assignments
from ashl.plan.plan import WorkerPlan
from ashl.size_only import SizeOnly
from ashl.stage.contract import StageConfig
from ashl.stage.members import assign, merge_weights
from tests.conf_option import conf_option
from tests.support import simulated

STEPS, BATCHES = (7, 4, 2), (8, 16, 32)


class Row(NamedTuple):
    rule: str
    fields: dict[str, Any]
    weights: tuple[
        float, ...
    ]  # of workers with H = (7, 4, 2), b = (8, 16, 32) and shares 7/13, 4/13, 2/13


ROWS = {
    "data_share": Row("data_share", {}, (7 / 13, 4 / 13, 2 / 13)),
    "uniform": Row("uniform", {}, (1 / 3, 1 / 3, 1 / 3)),
    "samples": Row("samples", {}, (56 / 184, 64 / 184, 64 / 184)),
    "mean": Row("mean", {}, (56 / 184, 64 / 184, 64 / 184)),
    "mean-data_share": Row("mean", {"weights": "data_share"}, (7 / 13, 4 / 13, 2 / 13)),
    "fednova": Row(
        "fednova", {}, (69 / 169, 69 / 169, 69 / 169)
    ),  # p_i·τ/H_i with τ = (49 + 16 + 4)/13
}
every_rule = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def workers(
    steps: Sequence[int] = STEPS, batches: Sequence[int] = BATCHES
) -> tuple[WorkerPlan, ...]:
    """Workers with shares of the data as of their steps."""
    return tuple(
        WorkerPlan(
            local_steps=h,
            batch=b,
            data_share=h / sum(steps),
            compression_ratio=1.0,
            predicted_cycle_s=None,
        )
        for h, b in zip(steps, batches, strict=True)
    )


def staged(row: Row, *, barrier: bool, plan: Any = None, **fields: Any) -> Any:
    """A stage with this rule, at a barrier or one push at a time. Only what weighing and folding
    look at is there.
    """
    plan = plan or workers()
    sync = SimpleNamespace(averages=barrier, estimator="minibatch", exchange="difference")
    rule = conf_option("aggregate", row.rule, **{**row.fields, **fields})
    rest = {
        "trainer": SimpleNamespace(statistics=0),
        **dict.fromkeys(("topology", "outer", "codec", "limits")),
    }
    return StageConfig(
        index=0,
        plan=SimpleNamespace(workers=plan),
        sync=sync,
        aggregate=rule,
        epoch_samples=1,
        **rest,
    )


def work_of(stage: Any) -> Assignments:
    """Return the planned work of all workers."""
    return assign(stage, stage.workers, stage.plan.workers)


def push(worker: int, body: Any, staleness: int = 0) -> Push:
    return Push(
        worker, body, STEPS[worker], STEPS[worker] * BATCHES[worker], staleness, 0.0, 0.0, 0.0, 0.0
    )


def unit(worker: int, length: float = 1.0) -> torch.Tensor:
    body = torch.zeros(3)
    body[worker] = length
    return body


def folded(stage: Any, *members: Push) -> list[float]:
    """The update: with unit vectors, by worker what each was multiplied with."""
    return update_of(stage, members).tolist()


def update_of(stage: Any, members: Sequence[Push]) -> Any:
    """Return the merged update of the members of a merge, independent of their order."""
    members = sorted(members, key=lambda push: push.worker)
    return stage.aggregate.fold(members, merge_weights(stage, work_of(stage), members))


@every_rule
def test_weights(row):
    """The coefficients at a barrier and for single pushes are the same, each push with its own
    worker's.
    """
    everybody = [push(i, unit(i)) for i in range(3)]
    assert folded(staged(row, barrier=True), *everybody) == pytest.approx(row.weights)
    alone = [folded(staged(row, barrier=False), one)[one.worker] for one in everybody]
    assert alone == pytest.approx(row.weights)
    if row.rule != "fednova":  # its step has length τ_eff
        assert sum(row.weights) == pytest.approx(1)


@every_rule
def test_scale(row):
    for barrier in (True, False):
        members = [push(i, unit(i)) for i in (range(3) if barrier else [1])]
        once, fivefold = (
            folded(staged(row, barrier=barrier, scale=scale), *members) for scale in (1.0, 5.0)
        )
        assert fivefold == pytest.approx([5 * x for x in once])


@every_rule
def test_those_who_make_a_merge_share_its_weight(row):
    """Weights are renormalised without one worker (backup) and with several pushes of one (Rennala,
    FedBuff).
    """
    stage = staged(row, barrier=True)
    a, b = row.weights[0], row.weights[2]
    if row.rule == "fednova":  # p = 7/9, 2/9; τ = (49 + 4)/9
        a = b = 53 / 81
    else:
        a, b = a / (a + b), b / (a + b)
    assert folded(stage, push(0, unit(0)), push(2, unit(2))) == pytest.approx([a, 0, b])
    a, b = row.weights[0], row.weights[2]
    if row.rule == "fednova":  # p = 7/16, 7/16, 2/16; τ = (49 + 49 + 4)/16
        a = b = 102 / 256
    else:
        a, b = a / (2 * a + b), b / (2 * a + b)
    twice = push(0, unit(0)), push(2, unit(2)), push(0, unit(0))
    assert folded(stage, *twice) == pytest.approx([2 * a, 0, b])


@every_rule
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_discount(row, power):
    stage = staged(row, barrier=False, staleness_discount=power)
    fresh, stale = (folded(stage, push(1, unit(1), staleness))[1] for staleness in (0, 3))
    assert fresh == pytest.approx(row.weights[1])
    assert stale == pytest.approx(row.weights[1] * 4**-power)


@every_rule
def test_clip(row):
    """Each update by itself, before it is sent and weighed; one that is short enough stays as it
    is, bit for bit.
    """
    stage = staged(row, barrier=True, clip_norm=2.0)
    bodies = [unit(0, 5.0), unit(1, 1.5), unit(2, -8.0)]
    update = folded(stage, *(push(i, stage.aggregate.clip(body)) for i, body in enumerate(bodies)))
    assert update == pytest.approx(
        [w * x for w, x in zip(row.weights, (2.0, 1.5, -2.0), strict=True)]
    )
    assert stage.aggregate.clip(bodies[1]) is bodies[1]
    assert stage.aggregate.clip(SizeOnly(12)) == SizeOnly(12)
    assert bodies[0][0] == 5.0


@every_rule
def test_the_order_of_arrival_plays_no_part_at_a_barrier(row):
    bodies = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    stage = staged(row, barrier=True)
    updates = [
        update_of(stage, [push(i, bodies[i]) for i in order]) for order in permutations(range(3))
    ]
    assert all(torch.equal(update, updates[0]) for update in updates)


@every_rule
def test_pushes_are_values(row):
    bodies = [unit(i) for i in range(3)]
    stage = staged(row, barrier=True)
    update_of(stage, [push(i, body) for i, body in enumerate(bodies)])
    assert all(torch.equal(body, unit(i)) for i, body in enumerate(bodies))


@every_rule
def test_sizes_fold_like_vectors(row):
    stage = staged(row, barrier=True, clip_norm=1.0, staleness_discount=1.0)
    assert update_of(stage, [push(i, SizeOnly(12)) for i in range(3)]) == SizeOnly(12)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_what_is_too_late_is_dropped_and_counted(max_staleness):
    """Every step is either applied or counted as dropped, on the paper's cluster without a bound."""
    base = (
        "cluster=ashl_paper",
        "sync=asp",
        "sync.local_steps=2",
        "stop.steps=120",
        "runtime.gradients=false",
    )
    ran = simulated(*base, f"aggregate.max_staleness={max_staleness}")
    rounds = [r for r in ran.of("Round") if r["end_ns"] < ran.time_ns]
    late = [r for r in rounds if r["staleness"] >= max_staleness]
    assert all(r["dropped"] == (r["staleness"] >= max_staleness) for r in rounds)
    assert late or max_staleness == 4
    for rank in range(3):
        dropped = sum(r["steps"] for r in late if r["rank"] == rank)
        assert (
            0 <= ran.end["dropped_by"][rank] - dropped <= 2
        )  # and the push that was in flight at the end
    assert ran.end["steps"] == sum(ran.end["steps_by"]) == 120


# --- the work behind a push (reference 4.1)
# ---------------------------------------------------------------------------


def per_gradient(rule: str) -> list[float]:
    """Return the weight of a worker's mean gradient as a share of the whole: Δ_i = H_i · g_i, times
    its weight.
    """
    stage = staged(Row(rule, {}, ()), barrier=False)
    counts = [weight * h for weight, h in zip(work_of(stage).weights, STEPS, strict=True)]
    return [round(100 * count / sum(counts)) for count in counts]


def test_what_a_gradient_counts():
    assert per_gradient("data_share") == [71, 23, 6]  # ASHL: H²
    assert per_gradient("uniform") == [54, 31, 15]  # ADSP: H
    assert per_gradient("fednova") == [54, 31, 15]  # with the plan's shards as p_i
    shards = [round(100 * w.data_share) for w in workers()]
    assert shards == [54, 31, 15]


@pytest.mark.limit("aggregate=fednova")
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2**12), min_size=1, max_size=6), st.sampled_from([1, 2, 5, 8, 100]))
def test_fednova_with_equal_work_is_the_mean_by_share(shares, h):
    """Exactly: τ_eff / a is a ratio of equal numbers."""
    plan = [
        WorkerPlan(
            local_steps=h, batch=8, data_share=share, compression_ratio=1.0, predicted_cycle_s=None
        )
        for share in shares
    ]
    nova, mean = (
        work_of(staged(Row(rule, {}, ()), barrier=True, plan=plan)).weights
        for rule in ("fednova", "data_share")
    )
    assert nova == pytest.approx(mean, rel=1e-15)
    if len(set(shares)) == 1:
        assert len(set(nova)) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("h", [1, 2, 7, 40])
def test_fednova_counts_momentum_as_the_recursion_does(momentum, h):
    """Check the recursion u ← ρu + 1, s ← s + u for H steps: ‖a‖₁ = s."""
    u = s = 0.0
    for _ in range(h):
        u = momentum * u + 1
        s += u
    plan = workers((h, 1), (8, 8))
    nova = staged(Row("fednova", {"momentum": momentum}, ()), barrier=True, plan=plan)
    weights = work_of(nova).weights
    p = h / (h + 1)
    effective = p * s + (1 - p)
    assert weights == pytest.approx([p * effective / s, (1 - p) * effective])


def test_what_is_kept_for_later_was_clipped_with_and_without_a_server() -> None:
    """A server clipped what it decoded, and what it cut off counted as sent."""
    base = (
        "sync=bsp",
        "sync.exchange=difference",
        "stop.steps=48",
        "model.hidden=[16]",
        "optimizer.momentum=0",
    )
    clipped = (*base, "compression=topk", "compression.ratio=0.1", "aggregate.clip_norm=0.02")
    server, peers = (
        simulated(*clipped, f"topology={name}") for name in ("parameter_server", "all_reduce")
    )
    assert server.sha256 == peers.sha256 != simulated(*clipped[:-1]).sha256


@pytest.mark.parametrize("fields", [("aggregate.clip_norm=0.05",), ("aggregate=fednova",)])
def test_a_sum_without_a_server_obeys_the_rule_too(fields):
    base = ("sync=local_sgd", "sync.local_steps=3", "stop.steps=48", "model.hidden=[16]", *fields)
    assert simulated(*base).sha256 == simulated(*base, "topology=all_reduce").sha256
    assert (
        simulated(*base).sha256 != simulated(*base[:4]).sha256 or fields[0] == "aggregate=fednova"
    )
