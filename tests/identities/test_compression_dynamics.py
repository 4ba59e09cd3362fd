"""The effect of compression on training: examples that one method solves and another does not, and
drops.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext
from ashl.compression.wrappers import WrappedCodec, wrap_codec
from ashl.stage.compression_pipeline import CompressionPipeline
from tests.conf_option import conf_option
from tests.support import simulated


def descent(option, gradients, start: list[float], steps: int, rate) -> Tensor:
    """Return x after steps along the mean of the workers' decoded gradients."""
    codec, x = wrap_codec(option, ()), torch.tensor(start, dtype=torch.float64)
    senders: list = [None] * len(gradients)
    receivers = list(senders)
    for step in range(steps):
        update = torch.zeros_like(x)
        for worker, gradient in enumerate(gradients):
            context = EncodeContext(seed=1, worker=worker, round=step, lr=rate(step))
            senders[worker], body = codec.encode(senders[worker], gradient(x), context)
            receivers[worker], got = codec.decode(receivers[worker], body, x.numel())
            update += got / len(gradients)
        x = x - rate(step) * update
    return x


def test_diana_converges_linearly_where_qsgd_stalls() -> None:
    """8 unlike quadratics, full gradients, the same ternary code; at the optimum gradients of
    workers are not 0.
    """
    rng, n, d = np.random.default_rng(0), 8, 16
    curvature, centre = (
        torch.from_numpy(v) for v in (rng.uniform(1, 10, (n, d)), 5 * rng.standard_normal((n, d)))
    )
    optimum = (curvature * centre).sum(0) / curvature.sum(0)
    gradients = [lambda x, a=a, b=b: a * (x - b) for a, b in zip(curvature, centre, strict=True)]

    def error(name: str, steps: int, **fields) -> float:
        option = conf_option("compression", name, bucket=8, norm="l2", **fields)
        return float(
            ((descent(option, gradients, [0.0] * d, steps, lambda _: 0.05) - optimum) ** 2).sum()
        )

    assert error("diana", 120) < 1e-12
    assert error("diana", 50) < 1e-4
    assert error("qsgd", 120, levels=1) > 1


def test_signs_fail_where_feedback_does_not() -> None:
    """Counter-example 2 of Karimireddy et al.: f = ε|x₁ + x₂| + |x₁ − x₂| from (1, 1).

    Signs are ±(1, −1), so x₁ + x₂ stays 2 for all steps. With scale and error feedback they reach
    the optimum at 0.
    """

    def gradient(x: Tensor) -> Tensor:
        along, across = torch.sign(x.sum()), torch.sign(x[0] - x[1]) if x[0] != x[1] else 1.0
        return 0.5 * along * torch.ones(2) + across * torch.tensor([1.0, -1.0], dtype=torch.float64)

    def rate(step: int) -> float:
        return 0.1 / (1 + step) ** 0.5

    plain = descent(
        conf_option("compression", "sign", scale="none", error_feedback=False),
        [gradient],
        [1.0, 1.0],
        3000,
        rate,
    )
    assert float(plain.sum()) == pytest.approx(2, abs=1e-3)
    kept = descent(
        conf_option("compression", "sign", scale="mean", error_feedback=True),
        [gradient],
        [1.0, 1.0],
        3000,
        rate,
    )
    assert float(kept.abs().max()) < 0.02


BACKUP = ("sync=backup", "stop.epochs=2", "model.hidden=[16]", "optimizer.momentum=0")


def test_dropped_pushes_return_to_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under backup workers: what was put in = what was applied + what is kept, for each worker, in
    the end.
    """
    given: dict[int, Tensor] = {}
    applied: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    # by the address of a payload, which is kept in memory
    owner: dict[int, tuple[int, Tensor]] = {}

    encode, restore_dropped, decode = (
        WrappedCodec.encode,
        WrappedCodec.restore_dropped,
        CompressionPipeline.decode,
    )

    def watched_encode(self, sender, x, context):
        state, body = encode(self, sender, x, context)
        owner[body.data_ptr()] = (context.worker, body)
        given[context.worker] = given.get(context.worker, 0) + x.double()
        kept[context.worker] = state.error
        return state, body

    def watched_restore(self, sender, body):
        state = restore_dropped(self, sender, body)
        kept[owner[body.data_ptr()][0]] = state.error
        return state

    def watched_decode(self, ends, worker, body):
        x = decode(self, ends, worker, body)
        if isinstance(x, Tensor):  # a forecast comes before it
            applied[worker] = applied.get(worker, 0) + x.double()
        return x

    monkeypatch.setattr(WrappedCodec, "encode", watched_encode)
    monkeypatch.setattr(WrappedCodec, "restore_dropped", watched_restore)
    monkeypatch.setattr(CompressionPipeline, "decode", watched_decode)
    ran = simulated(*BACKUP, "compression=topk")
    assert sum(ran.end["dropped_by"]) > 10
    assert set(given) == set(range(ran.plan.num_workers))
    for worker, whole in given.items():
        rest = applied.get(worker, 0) + kept[worker].double()
        assert torch.allclose(rest, whole, atol=1e-4)
