"""Estimators that workers exchange instead of a minibatch's gradient: their expectation and their
cost.
"""

import numpy as np
import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.learn.trainer import Trainer
from ashl.planning.instantiate import assemble_job
from tests.conf_option import conf_option
from tests.laws.codecs import bits, decoded
from tests.support import planned, simulated

SMALL = (
    "dataset=quadratic",
    "model=linear",
    "schedule=single",
    "sync=bsp",
    "cluster=homogeneous",
    "dataset.batch_size=20",
)
EXACT = ("optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=0.1")


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return assemble_job(planned(*SMALL), "cpu").stages[0].trainer


def points(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(trainer.num_params, generator=generator) for _ in range(2))


def test_the_full_gradient_is_that_of_all_samples(trainer: Trainer) -> None:
    w, _ = points(trainer)
    shard = trainer.batches[1].shard
    assert trainer.shard_size(1) == len(shard) == 240
    loss, whole = trainer.learner.gradient(w, shard, 1, 0)
    assert loss.dim() == 0
    for batch in (240, 100, 20, 7):
        mean, gradient = trainer.full_gradient(w, 1, batch)
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-6)
        assert mean == pytest.approx(float(loss), rel=1e-5)


def test_variance_reduced_gradients_are_the_full_one_in_the_mean(trainer: Trainer) -> None:
    """The mean over an epoch is the full gradient, and exact at the snapshot; the spread falls with
    the distance from it.
    """
    w, other = points(trainer)
    anchor = w + 0.01 * other
    full, at_anchor = (trainer.full_gradient(x, 1, 20)[1] for x in (w, anchor))
    spans = [range(20 * k, 20 * k + 20) for k in range(12)]
    reduced = torch.stack(
        [trainer.reduced_gradient(w, anchor, 1, k, s)[1] + at_anchor for k, s in enumerate(spans)]
    )
    plain = torch.stack([trainer.gradient(w, 1, k, s)[1] for k, s in enumerate(spans)])
    torch.testing.assert_close(reduced.mean(0), full, rtol=1e-4, atol=1e-5)
    assert float((reduced - full).norm()) < 0.05 * float((plain - full).norm())
    assert not trainer.reduced_gradient(w, w, 1, 3, spans[3])[1].any()


def test_moments_over_parts_of_a_minibatch(trainer: Trainer) -> None:
    w, _ = points(trainer)
    span = range(40, 60)
    samples = trainer.batches[1].span(40, 20)
    each = torch.stack([trainer.learner.gradient(w, np.array([i]), 1, 0)[1] / 20 for i in samples])
    loss, mean, squares = trainer.spread_gradient(w, 1, 2, span, 20)
    torch.testing.assert_close(squares, (each**2).sum(0))
    torch.testing.assert_close(mean, each.sum(0))
    for parts in (1, 3, 7, 1000):
        again, same, more = trainer.spread_gradient(w, 1, 2, span, parts)
        torch.testing.assert_close(same, mean)
        assert again == pytest.approx(loss, rel=1e-5)
    assert (more == squares).all(), "no more parts than samples"
    torch.testing.assert_close(trainer.spread_gradient(w, 1, 2, span, 1)[2], mean**2)


def test_a_full_gradient_costs_as_much_as_its_samples() -> None:
    """240 samples where 20 take 10 ms; each of them counts, for epochs and for the forecast."""
    chosen = (
        *SMALL,
        *EXACT,
        "compression=laq",
        "cluster.step_s=0.01",
        "cluster.exchange_s=0",
        "stop.epochs=3",
    )
    ran = simulated(*chosen)
    assert (ran.end["steps"], ran.end["samples"], ran.time_ns) == (12, 3 * 960, 3 * 12 * 10_000_000)
    assert ran.plan.stages[0].workers[0].predicted_cycle_s == pytest.approx(0.12)
    assert ran.plan.stages[0].predicted_steps_per_s == pytest.approx(ran.steps_per_s, rel=1e-3)
    reduced = simulated(*chosen, "compression.estimator=svrg")
    assert reduced.end["steps"] == 3 * 48
    assert reduced.time_ns == 3 * (12 * 2 + 12) * 10_000_000, (
        "two of each minibatch, and the shard once a pass"
    )


@pytest.mark.parametrize("topology", ["parameter_server", "all_reduce"])
def test_many_workers_are_one_with_all_the_data(topology: str) -> None:
    """The mean is the full gradient for all sizes of shards."""
    base = (
        *EXACT,
        "schedule=single",
        "model=linear",
        "sync=bsp",
        "compression=laq",
        "compression.bits=null",
        "seed=1",
    )
    base = (*base, "compression.xi=0", "stop.epochs=10", "cluster=homogeneous")
    uneven = ("dataset.partition=dirichlet", "dataset.alpha=1", f"topology={topology}")
    many, one = simulated(*base, *uneven), simulated(*base, "cluster.compute=[1]")
    sizes = [many.plan.stages[0].workers[0].batch, many.end["samples"] / 40]
    assert sizes[1] > 10 * sizes[0]
    torch.testing.assert_close(many.params, one.params, rtol=1e-4, atol=1e-6)
    shares = {
        round(record["totals_ns"]["compute"] / many.time_ns, 2)
        for record in many.of("TimeTotals")[:4]
    }
    assert len(shares) > 1, "their shards differ"


def test_the_variance_criterion_element_by_element() -> None:
    """Against the rule as it stands in the paper, one element after the other, with lost messages
    in between.
    """
    codec, rng = (
        conf_option("compression", "variance", alpha=1.5, zeta=0.9),
        np.random.default_rng(0),
    )
    sender, sums, squares = None, np.zeros(200), np.zeros(200)
    for k in range(40):
        x = torch.from_numpy(
            (rng.standard_normal(200) * np.logspace(-3, 0, 200) + 0.01).astype(np.float32)
        )
        spread = torch.from_numpy(
            rng.random(200).astype(np.float32) * np.logspace(-6, 0, 200).astype(np.float32)
        )
        before = bits(x)
        sender, body = codec.encode(sender, x, EncodeContext(squares=spread))
        assert bits(x) == before
        got = decoded(codec, body, 200).double().numpy()
        sums, squares = sums + x.double().numpy(), squares + spread.double().numpy()
        sure = sums**2 > 1.5 * squares
        sent = got != 0
        assert not (sent & ~sure).any()
        largest = 2.0 ** np.floor(np.log2(np.abs(sums[sure]).max()))
        assert set(np.flatnonzero(sure & ~sent)) == set(
            np.flatnonzero(sure & (np.abs(sums) < 0.75 * largest / 128))
        )
        assert np.isin(np.abs(got[sent]), largest * 2.0 ** -np.arange(8)).all()
        assert (np.abs(got / sums - 1)[sent & (np.abs(sums) < 1.5 * largest)] < 0.34).all()
        assert body.nbytes == 24 + 4 * sent.sum()
        lost = k % 5 == 3
        if lost:
            sender = codec.restore_dropped(sender, body)
        sums = np.where(sent & (not lost), 0, sums)
        squares = np.where(sent, 0, squares * 0.9)
        np.testing.assert_allclose(sender.error.numpy(), sums, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(sender.squares.numpy(), squares, rtol=1e-4, atol=1e-9)


def test_what_waits_is_kept_in_units_of_the_model() -> None:
    codec, x, much = conf_option("compression", "variance"), torch.ones(8), torch.full((8,), 100.0)
    sender, _ = codec.encode(None, x, EncodeContext(squares=much, lr=0.1))
    again, _ = codec.encode(sender, 0 * x, EncodeContext(squares=0 * much, lr=0.2))
    torch.testing.assert_close(again.error, x / 2)
    torch.testing.assert_close(again.squares, much / 4 * 0.999**2)
