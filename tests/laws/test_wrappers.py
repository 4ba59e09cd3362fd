"""Wrappers of a codec: memory, momentum, clipping, schedules of the ratio, layers."""

import pytest
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.payload import PayloadError
from ashl.compression.wrappers import (
    Clipping,
    ErrorFeedback,
    Layerwise,
    MomentumCorrection,
    Regime,
    Residual,
    Velocity,
    codec_for_layers,
    convert_sender,
    find_residual,
    inner_codec,
    with_steps,
    wrap_codec,
)
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.conf_option import conf_option
from tests.laws.codecs import decoded, vector

D = 200
LAYOUT = (Layer("in.weight", (10, 12)), Layer("in.bias", (10,)), Layer("out.weight", (7, 10)))
TOPK = conf_option("compression", "topk", ratio=0.1)


def updates(count: int, d: int = D) -> list[Tensor]:
    return [vector("normal", d, seed) for seed in range(count)]


def test_ecq_is_the_recursion_of_its_paper() -> None:
    """Check g̃ = C(g + α·h), h ← β·h + (g − g̃)."""
    codec, sender, h = with_steps(TOPK, ErrorFeedback(gain=0.5, decay=0.9)), None, torch.zeros(D)
    for k, g in enumerate(updates(5)):
        sender, body = codec.encode(sender, g, EncodeContext(round=k))
        sent = decoded(codec, body, D)
        assert torch.allclose(sent, decoded(TOPK, TOPK.encode(None, g + h * 0.5)[1], D))
        h = 0.9 * h + (g - sent)
        assert torch.allclose(sender.error, h, atol=1e-6)


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_what_is_kept_follows_the_learning_rate(momentum: float | None) -> None:
    """Σ lr·sent + lr·e = Σ lr·g: nothing is lost when the rate changes, or is 0 for a while."""
    codec = wrap_codec(
        conf_option("compression", "topk", ratio=0.1, momentum=momentum, masking=False), LAYOUT
    )
    sender, sent, asked = None, torch.zeros(D), torch.zeros(D)
    rate = 1.0
    for g, lr in zip(updates(6), (0.1, 0.1, 0.01, 0.5, 0.5, 0.02), strict=True):
        sender, body = codec.encode(sender, g, EncodeContext(lr=lr))
        sent, asked, rate = sent + lr * decoded(codec, body, D), asked + lr * g, lr
    assert torch.allclose(sent + rate * sender.error, asked, atol=1e-6)


def test_momentum_correction_is_the_recursion_of_its_paper() -> None:
    codec, sender = with_steps(TOPK, MomentumCorrection(decay=0.9, masking=True)), None
    u, v = torch.zeros(D), torch.zeros(D)
    for g in updates(5):
        sender, body = codec.encode(sender, g)
        u = 0.9 * u + g
        v = v + u
        sent = decoded(codec, body, D)
        assert torch.equal(
            sent != 0, torch.zeros(D).index_fill(0, v.abs().topk(20).indices, 1) != 0
        )
        u, v = torch.where(sent == 0, u, 0), v - sent
        assert torch.allclose(sender.steps[0].velocity, u, atol=1e-6)
        assert torch.allclose(sender.error, v, atol=1e-6)


def test_momentum_correction_of_everything_is_momentum_sgd() -> None:
    codec, sender, buffer = (
        with_steps(TOPK, MomentumCorrection(decay=0.9, masking=False)),
        None,
        torch.zeros(D),
    )
    for g in updates(5):
        sender, body = codec.encode(sender, g, EncodeContext(ratio=1.0))
        buffer = 0.9 * buffer + g
        assert torch.allclose(decoded(codec, body, D), buffer, atol=1e-6)


@pytest.mark.parametrize("masking", [True, False])
def test_a_dropped_message_goes_back_where_it_came_from(masking: bool) -> None:
    codec = with_steps(TOPK, MomentumCorrection(decay=0.9, masking=masking))
    first, second, third = updates(3)
    sender, _ = codec.encode(None, first)
    dropped, body = codec.encode(sender, second)
    restored = codec.restore_dropped(dropped, body)
    u = 0.9 * sender.steps[0].velocity + second
    assert torch.allclose(restored.steps[0].velocity, u)
    assert torch.allclose(restored.error, sender.error + u)
    _, after = codec.encode(restored, third)
    assert torch.allclose(
        decoded(codec, after, D).abs().sum(),
        (restored.error + 0.9 * u + third).abs().topk(20)[0].sum(),
    )


def test_clipping_comes_before_anything_is_added() -> None:
    codec = wrap_codec(conf_option("compression", "topk", clip_norm=2.0), LAYOUT)
    x = vector("normal", D)
    short = x * (1.0 / torch.linalg.vector_norm(x))
    sender, body = codec.encode(None, x, EncodeContext(workers=4))
    assert torch.allclose(sender.error + decoded(codec, body, D), short, atol=1e-7)
    sender, body = codec.encode(None, short * 0.5, EncodeContext(workers=4))
    assert torch.equal(sender.error + decoded(codec, body, D), short * 0.5)


def test_what_is_huge_is_shortened_and_not_lost() -> None:
    """A long update is clipped although the sum of its squares exceeds float32."""
    codec = with_steps(TOPK, Clipping(2.0))
    x = torch.full((D,), 3e38)
    _, body = codec.encode(None, x, EncodeContext(1.0))
    assert torch.allclose(decoded(codec, body, D), torch.full((D,), 2 / D**0.5))


def test_what_is_weighed_already_is_clipped_as_if_it_were_not() -> None:
    codec, x = with_steps(TOPK, Clipping(2.0)), vector("normal", D)
    plain, weighed = (
        codec.encode(None, x * w, EncodeContext(1.0, workers=4, weight=w))[1] for w in (1.0, 0.25)
    )
    assert torch.allclose(decoded(codec, plain, D) * 0.25, decoded(codec, weighed, D))


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_what_is_kept_of_gradients_moves_the_model_as_a_difference(momentum: float | None) -> None:
    """A step of −lr·g is the difference −lr·g: changing from one to the other, and back, changes
    nothing.
    """
    codec = wrap_codec(conf_option("compression", "topk", ratio=0.1, momentum=momentum), LAYOUT)
    one = other = None
    for k, g in enumerate(updates(6)):
        rate = -0.25  # a power of two: nothing is rounded
        one, body = codec.encode(one, g, EncodeContext(lr=rate))
        gradients = k in (0, 1, 4)
        other, again = codec.encode(
            other, g if gradients else rate * g, EncodeContext(lr=rate if gradients else 1.0)
        )
        moved = decoded(codec, again, D) * (rate if gradients else 1.0)
        assert torch.allclose(decoded(codec, body, D) * rate, moved, atol=1e-6)


def test_warm_up_is_the_papers() -> None:
    """25, 6.3, 1.6, 0.4 and 0.1 % of a million."""
    option, d = conf_option("compression", "topk", ratio=0.001, warmup_epochs=4), 1_000_000
    codec = wrap_codec(option, (Layer("all", (d,)),))
    link, x = CompressionPipeline(codec, d), SizeOnly(4 * d)
    sizes = [
        link.encode(CodecState(), x, EncodeContext(0.001, epoch=epoch)).nbytes
        for epoch in (0, 1.5, 2, 3, 4, 90)
    ]
    shares = (0.2512, 0.0631, 0.01585, 0.00398, 0.001, 0.001)
    assert sizes == pytest.approx([option.encoded_nbytes(share, d) for share in shares], rel=2e-3)


def test_accordion_sends_much_while_gradients_change() -> None:
    codec = wrap_codec(conf_option("compression", "topk", ratio=0.01, critical_ratio=0.5), LAYOUT)
    sizes, sender = [], None
    for epoch, scale in enumerate((1.0, 1.0, 1.1, 5.0, 5.0, 5.0)):
        for x in updates(3):
            sender, body = codec.encode(sender, scale * x, EncodeContext(0.01, epoch=epoch))
        sizes.append(body.nbytes)
    much, little = TOPK.encoded_nbytes(0.5, D), TOPK.encoded_nbytes(0.01, D)
    assert sizes == [much, much, little, little, much, little]


def test_accordion_begins_again_in_a_later_stage() -> None:
    """Its first epoch there is judged whole, not by its first message."""
    codec = wrap_codec(conf_option("compression", "topk", ratio=0.01, critical_ratio=0.5), LAYOUT)
    sender, sizes = convert_sender(Residual(torch.zeros(D)), codec), []
    for epoch in (3, 4, 5):
        for x in updates(3):
            sender, body = codec.encode(sender, x, EncodeContext(0.01, epoch=epoch))
        sizes.append(body.nbytes)
    much, little = TOPK.encoded_nbytes(0.5, D), TOPK.encoded_nbytes(0.01, D)
    assert sizes == [much, much, little]


def test_each_layer_by_itself() -> None:
    option = conf_option("compression", "topk", ratio=0.1, per_layer=True, error_feedback=False)
    codec, x = wrap_codec(option, LAYOUT), vector("layered", D)
    assert codec == Layerwise(option, (120, 10, 70)) == codec_for_layers(option, LAYOUT)
    _, body = codec.encode(None, x)
    parts = [
        decoded(option, option.encode(None, part)[1], part.numel())
        for part in x.split((120, 10, 70))
    ]
    assert torch.equal(decoded(codec, body, D), torch.cat(parts))
    assert [int(part.count_nonzero()) for part in parts] == [12, 1, 7]
    assert (
        body.nbytes
        == codec.encoded_nbytes(None, D)
        == 20 + sum(4 + option.encoded_nbytes(None, size) for size in (120, 10, 70))
    )
    out = vector("normal", D)
    expected = out + decoded(codec, body, D)
    codec.add(out, body)
    assert torch.equal(out, expected)
    assert CompressionPipeline(codec, D).encode(
        CodecState(), SizeOnly(4 * D), EncodeContext()
    ) == SizeOnly(body.nbytes)
    for broken in (body[:-1], torch.cat([body, body[:1]]), body[:30]):
        with pytest.raises(PayloadError):
            codec.decode(None, broken, D)
    worse = body.clone()
    worse[20] += 1
    with pytest.raises(PayloadError):
        codec.add(out, worse)


def test_everything_at_once_and_what_is_handed_over() -> None:
    fields = {"clip_norm": 1e9, "critical_ratio": 0.2, "warmup_epochs": 2, "per_layer": True}
    codec = wrap_codec(conf_option("compression", "topk", **fields), LAYOUT)
    assert isinstance(codec.steps[0], Clipping)
    assert isinstance(inner_codec(codec), Layerwise)
    sender, total = None, torch.zeros(D)
    for k, x in enumerate(updates(5)):
        sender, body = codec.encode(sender, x, EncodeContext(0.05, round=k, epoch=k / 2))
        total += x - decoded(codec, body, D)
    assert isinstance(sender.steps[1], Regime)
    assert torch.allclose(sender.error, total, atol=1e-5)
    plain = wrap_codec(TOPK, LAYOUT)
    assert torch.equal(convert_sender(sender, plain).error, sender.error)
    assert torch.equal(convert_sender(Residual(total), codec).error, total)
    velocity = wrap_codec(conf_option("compression", "topk", momentum=0.9), LAYOUT)
    assert convert_sender(sender, velocity) is None
    assert find_residual(convert_sender(Velocity(total, total), velocity)) == Velocity(total, total)
    assert convert_sender(Residual(total), conf_option("compression", "adacomp")) == Residual(total)
    undone = codec.restore_dropped(sender, body)
    assert torch.allclose(undone.error, sender.error + decoded(codec, body, D))
