"""Optimizers are torch.optim's, as pure functions of flat vectors; rates are functions of the
samples applied.
"""

import pytest
import torch
from conf_option import conf_option

from ashl.errors import UsageError
from ashl.optimizer.schedule import with_horizon

STEPS, SIZE = 60, 37

TWINS = [
    ("sgd", {"momentum": 0.0, "weight_decay": 0.0}, torch.optim.SGD, {}),
    ("sgd", {"momentum": 0.0, "weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.0}, torch.optim.SGD, {"momentum": 0.9}),
    (
        "sgd",
        {"momentum": 0.9, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    (
        "sgd",
        {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True},
    ),
    (
        "sgd",
        {"momentum": 0.8, "weight_decay": 0.0, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True},
    ),
    ("adam", {"weight_decay": 0.0}, torch.optim.Adam, {}),
    (
        "adam",
        {"weight_decay": 0.1, "beta1": 0.8},
        torch.optim.Adam,
        {"weight_decay": 0.1, "betas": (0.8, 0.999)},
    ),
    ("adamw", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "fields", "twin", "arguments"), TWINS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_torch_over_many_steps_of_changing_rate(
    name, fields, twin, arguments, dtype, tolerance
):
    draw = torch.Generator().manual_seed(0)
    params = torch.randn(SIZE, generator=draw, dtype=dtype)
    theirs = params.clone().requires_grad_()
    other = twin([theirs], lr=0.1, **arguments)
    ours = conf_option("optimizer", name, **fields)
    moments = tuple(m.to(dtype) if m.is_floating_point() else m for m in ours.init(SIZE))
    for step in range(STEPS):
        grad = torch.randn(SIZE, generator=draw, dtype=dtype)
        other.param_groups[0]["lr"] = lr = 0.1 / (1 + step)
        theirs.grad = grad.clone()
        other.step()
        moments, params = ours.step(moments, params, grad, lr)
        torch.testing.assert_close(params, theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for name, fields, _, _ in TWINS])
def test_arguments_stay_and_results_are_new(name, fields):
    ours = conf_option("optimizer", name, **fields)
    params, grad = torch.randn(SIZE), torch.randn(SIZE)
    moments, moved = ours.step(ours.init(SIZE), params, grad, 0.1)
    given = (params, grad, *moments)
    before = [tensor.clone() for tensor in given]
    after, moved = ours.step(moments, params, grad, 0.1)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
    assert not {t.data_ptr() for t in (*after, moved)} & {t.data_ptr() for t in given}


@pytest.mark.parametrize(
    ("schedule", "rates"),  # at 0, 2.5, 5, 7.5, 10 and 20 epochs of a horizon of 10
    [
        ("linear", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [1, 0.8535533905932737, 0.5, 0.1464466094067262, 0, 0]),
        ("step", [1, 1, 0.1, 0.01, 0.01, 0.01]),
    ],
)
def test_decay(schedule, rates):
    optimizer = conf_option("optimizer", "sgd", lr=2.0, schedule=schedule, horizon_epochs=10)
    assert [optimizer.rate(s, 100) / 2 for s in (0, 250, 500, 750, 1000, 2000)] == pytest.approx(
        rates
    )


def test_warmup_rises_from_a_tenth_and_the_decay_begins_where_it_ends():
    optimizer = conf_option(
        "optimizer", "sgd", lr=1.0, schedule="linear", warmup_epochs=2, horizon_epochs=12
    )
    assert [optimizer.rate(s, 100) for s in (0, 100, 200, 700, 1200)] == pytest.approx(
        [0.1, 0.55, 1, 0.5, 0]
    )


def test_horizon_is_the_run_s_own_where_it_ends_by_epochs():
    optimizer = conf_option("optimizer", "sgd", schedule="cosine")
    assert with_horizon(optimizer, 8).horizon_epochs == 8
    assert (
        with_horizon(
            conf_option("optimizer", "sgd", schedule="cosine", horizon_epochs=3), 8
        ).horizon_epochs
        == 3
    )
    assert with_horizon(conf_option("optimizer", "sgd"), None).horizon_epochs is None
    with pytest.raises(UsageError, match=r"horizon_epochs=20"):
        with_horizon(optimizer, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"nesterov": True, "momentum": 0.0},
        {"warmup_epochs": 5, "horizon_epochs": 5, "schedule": "linear"},
    ],
)
def test_combinations_that_make_no_sense(fields):
    with pytest.raises(UsageError):
        conf_option("optimizer", "sgd", **fields)
