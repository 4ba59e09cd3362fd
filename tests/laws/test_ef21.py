"""Laws of EF21, EF21-SGDM and EControl: both ends agree, changes are learned, and their limits."""

import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.compression.payload import PayloadError
from tests.laws.codecs import codec, length, vector
from tests.support import simulated

KINDS = {
    "ef21": codec("ef21", ratio=0.1),
    "ef21-sign": codec("ef21", compressor="sign"),
    "ef21-natural": codec("ef21", compressor="natural"),
    "econtrol": codec("econtrol", ratio=0.1, eta=0.3),
    "whole": codec("econtrol", ratio=1.0),
}
D = 300


@pytest.mark.parametrize("name", KINDS)
def test_both_ends_agree_to_the_bit_and_a_dropped_message_leaves_no_trace(name: str) -> None:
    kind, sender, receiver = KINDS[name], None, None
    for context in range(9):
        before = sender
        sender, body = kind.encode(
            sender, vector("normal", D, context), EncodeContext(round=context)
        )
        assert body.nbytes == kind.encoded_nbytes(None, D)
        if context % 3 == 1:
            sender = kind.restore_dropped(sender, body)
            lost = [None if state is None else state[:2] for state in (before, sender)]
            assert all(a is b or torch.equal(a, b) for a, b in zip(*lost, strict=True))
            continue
        receiver, got = kind.decode(receiver, body, D)
        assert torch.equal(receiver, sender.sum)
        assert got is receiver


@pytest.mark.parametrize("name", ["ef21", "ef21-sign", "ef21-natural", "whole"])
def test_a_vector_that_stays_is_learned(name: str) -> None:
    kind, sender, x = KINDS[name], None, vector("normal", D)
    for context in range(200):
        sender, body = kind.encode(sender, x, EncodeContext(round=context))
    assert length(x - kind.decode(sender.sum_before, body, D)[1]) <= 1e-3 * length(x)


@pytest.mark.limit("compression=econtrol")
def test_econtrol_is_the_published_recursion_and_ef21_forgets() -> None:
    """Δ = C(η·e + x − h), e ← e + x − h − Δ, h ← h + Δ."""
    control, top = KINDS["econtrol"], codec("topk", ratio=0.1, error_feedback=False)
    sender, h, e = None, torch.zeros(D), torch.zeros(D)
    for context in range(6):
        x = vector("normal", D, context)
        change = top.decode(None, top.encode(None, 0.3 * e + x - h)[1], D)[1]
        e, h = e + x - h - change, h + change
        sender, _ = control.encode(sender, x)
        torch.testing.assert_close(sender.sum, h, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sender.error, e, rtol=1e-4, atol=1e-5)
    forgets, _ = KINDS["ef21"].encode(None, vector("normal", D))
    assert forgets.error is None


def test_a_body_of_another_length_is_refused() -> None:
    for body in (torch.zeros(299), torch.zeros(1199, dtype=torch.uint8)):
        with pytest.raises(PayloadError):
            KINDS["whole"].decode(None, body, 300)


STILL = (
    "stop.steps=24",
    "model.hidden=[16]",
    "sync=bsp",
    "cluster=homogeneous",
    "optimizer.momentum=0",
)


@pytest.mark.limit("compression=ef21", "compression=econtrol")
def test_without_loss_it_is_sgd() -> None:
    dense, whole = (
        simulated(*STILL, *more) for more in ((), ("compression=econtrol", "compression.ratio=1"))
    )
    assert whole.sha256 == dense.sha256


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
