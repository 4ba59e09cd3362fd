"""Guarantees of every outer optimizer, and their published rules: a new one is tried by its
file alone.
"""

import math

import pytest
import torch

from ashl.config.catalog import catalog
from ashl.outer.contract import Outer
from tests.conf_option import conf_option
from tests.support import simulated

METHODS = tuple(catalog()["outer"])
D, LR = 1000, 0.1
LOCAL = ("sync=local_sgd", "sync.local_steps=4", "stop.steps=96", "model.hidden=[16]")
every_method = pytest.mark.parametrize("method", METHODS)


def updates(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(D, generator=generator) * 0.01 for _ in range(count)]


def walk(outer: Outer, steps: list[torch.Tensor], rates: list[float] | None = None) -> torch.Tensor:
    """The model after these merged updates, from zero."""
    moments, params = None, torch.zeros(D)
    for update, rate in zip(steps, rates or [LR] * len(steps), strict=True):
        moments, params = outer.step(moments, params, update, rate)
    return params


def flat(moments: object) -> list[torch.Tensor]:
    return [part for part in moments or () if isinstance(part, torch.Tensor)]  # type: ignore[union-attr]


# --- all of them
# --------------------------------------------------------------------------------------------------


@every_method
def test_nothing_changes_in_place(method):
    outer, moments, params = conf_option("outer", method), None, torch.ones(D)
    for update in updates(5):
        before = [tensor.clone() for tensor in (params, update, *flat(moments))]
        new, moved = outer.step(moments, params, update, LR)
        after = [params, update, *flat(moments)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        moments, params = new, moved


@every_method
def test_the_same_with_and_without_a_server(method):
    runs = [
        simulated(*LOCAL, f"outer={method}", f"topology={t}")
        for t in ("parameter_server", "all_reduce")
    ]
    assert runs[0].sha256 == runs[1].sha256
    assert runs[0].params.isfinite().all()


# --- each
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "nesterov"), [("nesterov", True), ("heavy_ball", False)])
def test_momentum_is_sgd_on_the_pseudo_gradient(method, nesterov):
    """The steps equal those of torch.optim.SGD: its gradient is −Δ."""
    weight = torch.nn.Parameter(torch.zeros(D))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=nesterov)
    steps = updates(12)
    for update in steps:
        weight.grad = -update
        sgd.step()
    torch.testing.assert_close(
        walk(conf_option("outer", method, lr=0.7, momentum=0.9), steps), weight.detach()
    )


@pytest.mark.limit("outer=slowmo", "outer=heavy_ball")
def test_slowmo_at_a_constant_rate_is_heavy_ball_bit_for_bit():
    slow, heavy = (
        conf_option("outer", "slowmo", alpha=0.7, beta=0.6),
        conf_option("outer", "heavy_ball", lr=0.7, momentum=0.6),
    )
    assert torch.equal(walk(slow, updates(9)), walk(heavy, updates(9)))


def test_slowmo_is_the_published_recursion():
    """Check u ← β·u + (x₀ − x_τ)/γ, x ← x₀ − α·γ·u, with a decaying rate; to zero in the end, and
    it stays finite.
    """
    rates, alpha, beta = [0.1, 0.08, 0.02, 0.005], 0.9, 0.7
    steps, u, x = updates(4), torch.zeros(D), torch.zeros(D)
    for update, rate in zip(steps, rates, strict=True):
        u = beta * u - update / rate
        x = x - alpha * rate * u
    slow = conf_option("outer", "slowmo", alpha=alpha, beta=beta)
    torch.testing.assert_close(walk(slow, steps, rates), x)
    assert walk(slow, updates(4), [0.1, 0.0, 0.0, 0.0]).isfinite().all()


@pytest.mark.limit("outer=adam")
def test_adam_has_its_closed_form():
    """A coordinate that always moves by Δ: m = (1 − β1^t)·Δ, v = β2^t·τ² + (1 − β2^t)·Δ²."""
    lr, b1, b2, tau, delta, w = 0.05, 0.9, 0.99, 0.001, -0.02, 0.0
    for t in range(1, 11):
        w += lr * (1 - b1**t) * delta / (math.sqrt(b2**t * tau**2 + (1 - b2**t) * delta**2) + tau)
    moved = walk(
        conf_option("outer", "adam", lr=lr, beta1=b1, beta2=b2, tau=tau),
        [torch.full((D,), delta)] * 10,
    )
    torch.testing.assert_close(moved, torch.full((D,), w))


@pytest.mark.limit("outer=adam")
def test_adam_without_memory_is_a_sign_or_average():
    (update,) = updates(1)
    sign = walk(conf_option("outer", "adam", lr=0.5, beta1=0.0, beta2=0.0, tau=1e-12), [update])
    torch.testing.assert_close(sign, 0.5 * update.sign())
    plain = walk(conf_option("outer", "adam", lr=1e4, beta1=0.0, beta2=0.0, tau=1e4), [update])
    torch.testing.assert_close(plain, update, rtol=1e-4, atol=1e-7)


@pytest.mark.limit("outer=yogi")
def test_yogi_is_the_published_recursion_and_begins_as_adam():
    steps, chosen = updates(12), {"lr": 0.02, "beta1": 0.8, "beta2": 0.9, "tau": 0.005}
    params, m, v = (torch.zeros(D, dtype=torch.float64) for _ in range(3))
    v += 0.005**2
    for delta in (update.double() for update in steps):
        m = 0.8 * m + 0.2 * delta
        v = v - 0.1 * delta**2 * torch.sign(v - delta**2)
        params = params + 0.02 * m / (v.sqrt() + 0.005)
    moved = walk(conf_option("outer", "yogi", **chosen), steps)
    torch.testing.assert_close(moved.double(), params, rtol=1e-4, atol=1e-6)
    tiny = chosen | {"tau": 1e-9}
    first = [walk(conf_option("outer", method, **tiny), steps[:1]) for method in ("yogi", "adam")]
    torch.testing.assert_close(*first, rtol=1e-4, atol=0)
    vast = {"lr": 2e4, "beta1": 0.0, "beta2": 0.5, "tau": 1e4}
    plain = walk(conf_option("outer", "yogi", **vast), steps)
    torch.testing.assert_close(plain, sum(steps), rtol=1e-4, atol=1e-7)


def test_mla_is_the_published_recursion():
    """θ ← θ + d − lr·g with g made at θ + d, d = −lr·γ·m, m ← γ·m + (1 − γ)·g; workers receive θ +
    d.
    """
    lr, gamma, steps = 0.7, 0.9, updates(7)
    theta = m = torch.zeros(D)
    for update in steps:
        theta = theta - lr * gamma * m + lr * update
        m = gamma * m - (1 - gamma) * update
    found = walk(conf_option("outer", "mla", lr=lr, momentum=gamma), steps)
    torch.testing.assert_close(found, theta - lr * gamma * m)


@pytest.mark.limit("outer=heloco")
def test_heloco_that_keeps_everything_is_mla():
    steps = updates(6)
    keeps = conf_option("outer", "heloco", align_threshold=-1.0).for_layers(
        (("a", (10, 60)), ("b", (400,)))
    )
    assert torch.equal(walk(keeps, steps), walk(conf_option("outer", "mla"), steps))


def test_heloco_shortens_what_goes_back_and_turns_what_hardly_goes_along():
    """Two layers against a momentum along (1, 0): (−1, 1) shrinks in its first element, (0, 2)
    turns at equal length.
    """
    heloco = conf_option(
        "outer", "heloco", lr=1.0, momentum=0.0, kappa=0.0, rotate_gain=0.5, shrink_gain=1.0
    )
    momentum = (torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0, 1.0]),)
    update = torch.tensor([-1.0, 1.0, 0.0, 2.0, 0.25, 3.0])
    _, moved = heloco.for_layers([(name, (2,)) for name in "abc"]).step(
        momentum, torch.zeros(6), update, LR
    )
    back, turned, kept = moved.split(2)
    torch.testing.assert_close(back, torch.tensor([-1 + math.sqrt(0.5), 1.0]))
    torch.testing.assert_close(turned, torch.tensor([math.sqrt(2.0)] * 2))
    assert kept.tolist() == [0.25, 3.0]
    cautious = conf_option("outer", "heloco", lr=1.0, momentum=0.0, kappa=0.5, shrink_gain=1.0)
    _, less = cautious.step(
        (torch.tensor([2.0, 0.0]),), torch.zeros(2), update[:2], LR
    )  # (−1, 1): √2/(√2 + 1)
    torch.testing.assert_close(
        less[0], torch.tensor(-1 + math.sqrt(0.5) * math.sqrt(2) / (math.sqrt(2) + 1))
    )
    _, most = conf_option("outer", "heloco", lr=1.0, momentum=0.0, kappa=0.0, shrink_gain=9.0, max_shrink=0.25).step(
        (torch.tensor([2.0, 0.0]),), torch.zeros(2), update[:2], LR)  # fmt: skip
    assert most.tolist() == pytest.approx([-0.75, 1.0])
    still = heloco.step((torch.zeros(6),), torch.zeros(6), update, LR)[1]
    assert torch.equal(still, update)


# --- plans and stages
# -------------------------------------------------------------------------------------------------


def test_moments_cross_a_stage_boundary_as_the_schedule_defines():
    base = (
        "schedule=post_local",
        "schedule.switch_epochs=0.2",
        "schedule.local_steps=2",
        "outer=nesterov",
        *LOCAL[2:],
    )
    kept, reset = (
        simulated(*base, "optimizer.momentum=0", f"schedule.momentum={how}")
        for how in ("keep", "reset")
    )
    assert len(kept.of("StageEnd")) == 2
    assert (
        kept.sha256 != reset.sha256
    )  # without inner momentum, the outer one is all that stages transfer


def test_moments_of_another_method_are_not_taken_over(monkeypatch):
    slow = {"_target_": "ashl.outer.slowmo.SlowMo", "alpha": 1.0, "beta": 0.5}
    sync = {"_target_": "ashl.sync.local_sgd.LocalSGD", "local_steps": 2}

    def first(choices, until):
        return choices.stage("first", sync=sync, outer=slow, local_steps=2, until=until)

    monkeypatch.setattr("ashl.schedule.post_local.bsp_stage", first)
    base = (
        "schedule=post_local",
        "schedule.switch_epochs=0.2",
        "schedule.local_steps=2",
        *LOCAL[2:],
    )
    for topology in ("parameter_server", "all_reduce"):
        ran = simulated(*base, "outer=nesterov", f"topology={topology}")
        assert [stage["name"] for stage in ran.of("StageEnd")] == ["first", "local_sgd"]
        assert ran.params.isfinite().all()


@pytest.mark.limit("outer=co2")
def test_co2_without_a_penalty_and_a_bound_is_heavy_ball_and_both_hold_it_back():
    steps = updates(6)
    ball = walk(conf_option("outer", "heavy_ball", lr=0.7, momentum=0.9), steps)
    assert torch.equal(walk(conf_option("outer", "co2", lr=0.7, momentum=0.9), steps), ball)
    half = walk(conf_option("outer", "co2", lr=0.7, momentum=0.9, penalty=2.0), steps)
    torch.testing.assert_close(half, ball / 2)
    bounded, params, bound = None, torch.zeros(D), 0.004
    outer = conf_option("outer", "co2", momentum=0.9, clip=bound)
    for update in steps:
        bounded, params = outer.step(bounded, params, update, LR)
        assert bounded is not None
        assert float(bounded[0].abs().max()) == pytest.approx(bound)
