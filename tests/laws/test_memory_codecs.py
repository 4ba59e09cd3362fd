"""Laws of Strom's threshold, of adaptive quantization, ATOMO, DIANA, EF21 and EControl that are not
those of every codec.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.atomo import draw_components, find_slope
from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.dryden import learn_centroids
from ashl.compression.payload import PayloadError
from ashl.compression.wrappers import WrappedCodec, wrap_codec
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import bits, codec, decoded, length, vector
from tests.support import simulated

# --- Strom
# --------------------------------------------------------------------------------------------------


def test_a_threshold_sends_signs() -> None:
    x = torch.tensor([0.5, -0.5, 0.6, -3.0, 0.0, 0.4])
    strom = codec("strom", threshold=0.5)
    for whole in (x, torch.cat([x, torch.zeros(1000)])):  # two bits an element, and words
        got = decoded(strom, strom.encode(None, whole)[1], len(whole))
        assert got[:6].tolist() == [0, 0, 0.5, -0.5, 0, 0]
        assert not got[6:].any()


def test_the_residual_of_a_threshold_stays_below_it() -> None:
    """The residual stays below the threshold while small updates add up: all are sent in the end."""
    strom = wrap_codec(codec("strom", threshold=1.0), ())
    rng, sender, sent, whole = np.random.default_rng(0), None, torch.zeros(100), torch.zeros(100)
    for context in range(200):
        x = torch.from_numpy(rng.uniform(-1, 0.8, 100).astype(np.float32))
        sender, body = strom.encode(sender, x, EncodeContext(round=context))
        sent, whole = sent + decoded(strom, body, 100), whole + x
        assert float(sender.error.abs().max()) <= 1.0
    assert torch.allclose(sent + sender.error, whole, atol=1e-4)


# --- adaptive quantization
# --------------------------------------------------------------------------------------------


def test_a_share_of_each_side_becomes_its_mean() -> None:
    x = torch.tensor([4.0, 1, 2, 3, 0, -1, -5, 0, 0, 1])
    dryden = codec("dryden", ratio=0.4, indices="bitmap")
    assert decoded(dryden, dryden.encode(None, x)[1], 10).tolist() == [
        3.5,
        0,
        0,
        3.5,
        0,
        0,
        -5,
        0,
        0,
        0,
    ]
    for one_sided in (x.abs(), -x.abs()):
        got = decoded(dryden, dryden.encode(None, one_sided)[1], 10)
        assert int(got.count_nonzero()) == 3
        assert (got * one_sided >= 0).all()


def test_learned_levels_fit_better() -> None:
    """One level of Lloyd's is the mean; more of them lose less, as little as the best for two
    points.
    """
    values = np.abs(np.random.default_rng(0).standard_normal(5000)) + 1
    assert learn_centroids("lloyd", values, 1) == pytest.approx(learn_centroids("mean", values, 9))
    assert learn_centroids("lloyd", np.array([5.0, 1.0, 1.0, 5.0]), 2).tolist() == [1, 5]
    x, losses = vector("heavy", 5000), []
    for fields in ({"levels": "mean"}, *({"levels": "lloyd", "num_levels": n} for n in (2, 4, 16))):
        dryden = codec("dryden", ratio=0.05, **fields)
        got = decoded(dryden, dryden.encode(None, x)[1], 5000)
        losses.append(length((x - got)[got != 0]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.05 * losses[0]


def test_levels_of_a_sample_enlarge_nothing() -> None:
    """Every fourth element is large, and so is every one that levels are learned from."""
    d, dryden = 2**16, codec("dryden", ratio=1.0, levels="lloyd", num_levels=2)
    x = torch.full((d,), 0.01)
    x[::4] = 1.0
    got = decoded(dryden, dryden.encode(None, x)[1], d)
    assert length(x - got) <= dryden.bound(None, d) * length(x)


# --- ATOMO
# --------------------------------------------------------------------------------------------------


def chances(x: np.ndarray, budget: float) -> np.ndarray:
    """Check p_j of the paper's algorithm: a probability above 1 becomes 1, and the others share the
    rest again.
    """
    sizes = np.abs(x.astype(np.float64))
    p, free = np.zeros(x.size), sizes > 0
    if free.sum() <= budget:
        return free.astype(float)
    while True:
        share = sizes * (budget - (p == 1).sum()) / sizes[free].sum()
        over = free & (share > 1)
        if not over.any():
            return np.where(free, share, p)
        p[over], free = 1, free & ~over


@pytest.mark.parametrize("kind", ["normal", "heavy", "layered", "constant", "mostly zero", "zero"])
@pytest.mark.parametrize("budget", [1.0, 2.5, 30.0, 399.0, 400.0])
def test_chances_of_atoms(kind: str, budget: float) -> None:
    """Heavy atoms come for sure, Σ p = s, and the variance is Σ λ²(1/p − 1) as counted."""
    vector_ = vector(kind, 400)
    x = vector_.numpy()
    expected, slope = chances(x, budget), find_slope(vector_, budget)
    p = (
        np.minimum(1, slope * np.abs(x.astype(np.float64)))
        if np.isfinite(slope)
        else (x != 0).astype(float)
    )
    assert p == pytest.approx(expected, rel=1e-9)
    assert p.sum() == pytest.approx(min(budget, np.count_nonzero(x)))
    draws = [draw_components(vector_, budget, np.random.default_rng(seed)) for seed in range(100)]
    counts = np.array([len(places) for places, _ in draws])
    spread = (p * (1 - p)).sum() ** 0.5
    assert abs(counts.mean() - p.sum()) <= 5 * spread / 100**0.5 + 1e-9
    assert (
        abs(counts.std() - spread) <= 0.25 * spread + 1e-6
    )  # as of independent draws, empty ones included
    for places, values in draws[:20]:
        assert values.numpy() == pytest.approx(x[places] / p[places], rel=1e-5)


def test_singular_triples_of_a_model() -> None:
    """Matrices become triples, a bias stays as it is, convolutions are matrices by output; of all
    nothing is lost.
    """
    layout = (Layer("conv", (8, 3, 3, 3)), Layer("bias", (8,)), Layer("weight", (20, 30)))
    x = vector("normal", 8 * 27 + 8 + 600)
    atomo = codec("atomo", atoms="singular", ratio=0.05).for_layout(layout)
    low = (
        torch.outer(torch.arange(20.0), torch.arange(30.0)) + torch.outer(torch.ones(20), x[:30])
    ).reshape(-1)
    x[-600:] = low
    everything = decoded(atomo, atomo.encode(None, x, EncodeContext(1.0))[1], x.numel())
    assert torch.allclose(everything, x, rtol=1e-4, atol=1e-4 * float(x.abs().max()))
    draws = torch.stack(
        [
            decoded(atomo, atomo.encode(None, x, EncodeContext(round=k))[1], x.numel())
            for k in range(400)
        ]
    )
    assert torch.equal(draws[0][216:224], x[216:224])
    lost = ((draws - x).double() ** 2).sum(1).mean()
    assert lost <= atomo.bound(None, x.numel()) * length(x)
    error = (draws.double().mean(0) - x).abs()
    assert (error <= 5.5 * draws.double().std(0) / 20 + 1e-4 * x.abs().max()).all()
    assert atomo.encode(None, x)[1].nbytes < x.nbytes
    with pytest.raises(PayloadError):
        atomo.decode(None, codec("atomo", atoms="singular").encode(None, x)[1], x.numel())


# --- DIANA, EF21, EControl
# --------------------------------------------------------------------------------------------------

DIANAS = {
    "l2": codec("diana", norm="l2"),
    "max": codec("diana", norm="max"),
    "qsgd": codec("diana", quantizer="qsgd"),
    "natural": codec("diana", quantizer="natural"),
    "alpha": codec("diana", alpha=0.2),
}
EF21S = {
    "ef21": codec("ef21", ratio=0.1),
    "ef21-sign": codec("ef21", compressor="sign"),
    "ef21-natural": codec("ef21", compressor="natural"),
    "econtrol": codec("econtrol", ratio=0.1, eta=0.3),
    "whole": codec("econtrol", ratio=1.0),
}


@pytest.mark.parametrize("name", [*DIANAS, *EF21S])
def test_both_ends_learn_the_same(name: str) -> None:
    """Both ends agree to the bit, also with dropped messages; nothing is changed in place, and
    sizes are as declared.
    """
    kind: Any = (DIANAS | EF21S)[name]
    sender = receiver = None
    for context in range(12):
        x = vector("normal", 1000, context)
        before, old = bits(x), sender
        sender, body = kind.encode(old, x, EncodeContext(seed=1, round=context))
        assert bits(x) == before
        assert body.nbytes == kind.encoded_nbytes(None, 1000)
        if context % 3 == 1:
            sender = kind.restore_dropped(sender, body)
            kept, left = (None if old is None else old.h), sender.h
            assert left is kept or torch.equal(left, kept)
            continue
        held = None if receiver is None else bits(receiver)
        after, got = kind.decode(receiver, body, 1000)
        assert held is None or bits(receiver) == held
        receiver = after
        assert bits(receiver) == bits(sender.h)
        assert got.isfinite().all()


@pytest.mark.parametrize("diana", DIANAS.values(), ids=DIANAS)
def test_what_is_learned_goes_to_what_stays(diana: Any) -> None:
    """The error of a constant vector falls geometrically: E‖x − h‖² by 1 − α each time or faster."""
    x = vector("heavy", 512)
    alpha = diana.alpha or 1 / (1 + diana.bound(None, 512))
    sender = receiver = None
    for context in range(200):
        sender, body = diana.encode(sender, x, EncodeContext(seed=1, round=context))
        receiver, got = diana.decode(receiver, body, 512)
    assert length(x - receiver) <= 3 * (1 - alpha) ** 200 * length(x) + 1e-12 * length(x)
    assert length(x - got) <= 10 * (1 + diana.bound(None, 512)) * (1 - alpha) ** 199 * length(
        x
    ) + 1e-12 * length(x)


@pytest.mark.limit("compression=diana")
def test_diana_is_unbiased_whatever_was_learned() -> None:
    diana, x = codec("diana"), vector("normal", 64)
    sender, _ = diana.encode(None, vector("normal", 64, 1))
    draws = [
        diana.decode(sender.h, diana.encode(sender, x, EncodeContext(round=k))[1], 64)[1]
        for k in range(2000)
    ]
    found = torch.stack(draws).double()
    assert ((found.mean(0) - x).abs() <= 5.5 * found.std(0) / 2000**0.5 + 0.02).all()


@pytest.mark.parametrize(
    ("norm", "omega"), [("l2", math.sqrt(64) / 1), ("max", (1 + math.sqrt(64)) / 2)]
)
def test_alpha_is_that_of_the_quantizer(norm: str, omega: float) -> None:
    diana = codec("diana", norm=norm, bucket=64)
    assert diana.bound(None, 1000) <= omega
    sender, body = diana.encode(None, vector("normal", 1000))
    m = diana.decode(None, body, 1000)[1]
    assert torch.equal(sender.h, m * (1 / (1 + diana.bound(None, 1000))))


def test_diana_without_content() -> None:
    diana = codec("diana")
    link, ends = CompressionPipeline(diana, 100), CodecState()
    body = link.encode(ends, SizeOnly(400), EncodeContext())
    assert body == SizeOnly(diana.encoded_nbytes(None, 100))
    link.restore_dropped(ends, body)
    assert link.decode(ends, 0, body) == SizeOnly(400)
    assert ends == CodecState()
    x: Tensor = vector("normal", 100)
    x[3] = math.nan
    assert not diana.decode(None, diana.encode(None, x)[1], 100)[1].isfinite().all()
    assert not isinstance(wrap_codec(diana, ()), WrappedCodec)


@pytest.mark.parametrize("name", ["ef21", "ef21-sign", "ef21-natural", "whole"])
def test_a_vector_that_stays_is_learned(name: str) -> None:
    kind, sender, x = EF21S[name], None, vector("normal", 300)
    for context in range(200):
        sender, body = kind.encode(sender, x, EncodeContext(round=context))
    assert length(x - kind.decode(sender.before, body, 300)[1]) <= 1e-3 * length(x)


@pytest.mark.limit("compression=econtrol")
def test_econtrol_is_the_published_recursion_and_ef21_forgets() -> None:
    """Δ = C(η·e + x − h), e ← e + x − h − Δ, h ← h + Δ."""
    control, top = EF21S["econtrol"], codec("topk", ratio=0.1, error_feedback=False)
    sender, h, e = None, torch.zeros(300), torch.zeros(300)
    for context in range(6):
        x = vector("normal", 300, context)
        change = top.decode(None, top.encode(None, 0.3 * e + x - h)[1], 300)[1]
        e, h = e + x - h - change, h + change
        sender, _ = control.encode(sender, x)
        torch.testing.assert_close(sender.h, h, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sender.error, e, rtol=1e-4, atol=1e-5)
    forgets, _ = EF21S["ef21"].encode(None, vector("normal", 300))
    assert forgets.error is None


STILL = (
    "stop.steps=24",
    "model.hidden=[16]",
    "sync=bsp",
    "cluster=homogeneous",
    "optimizer.momentum=0",
)


@pytest.mark.slow
def test_with_beta_and_without_loss_it_is_momentum_sgd() -> None:
    moving = ("optimizer.momentum=0.9", "optimizer.lr=0.02", "optimizer.weight_decay=0")
    plain = ("optimizer.weight_decay=0", "optimizer.lr=0.2", "topology=all_reduce")
    mean = simulated(
        *STILL, *plain, "compression=ef21", "compression.ratio=1", "compression.beta=0.9"
    )
    torch.testing.assert_close(
        mean.params, simulated(*STILL[:-1], *moving).params, rtol=1e-3, atol=2e-5
    )
