"""Lazy uploads equal gradient descent without skips, and keep its accuracy with fewer uploads.

The two copies of the sent gradient never differ.
"""

import numpy as np
import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.compression.payload import PayloadError
from ashl.data.quadratic import optimum
from ashl.planning.instantiate import assemble_job
from tests.conf_option import conf_option
from tests.laws.codecs import bits, vector
from tests.support import Ran, planned, simulated

PLAIN = (
    "schedule=single",
    "sync=bsp",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "cluster=homogeneous",
)
QUADRATIC = (
    *PLAIN,
    "dataset=quadratic",
    "model=linear",
    "optimizer.lr=0.8",
    "dataset.partition=interleaved",
)
WHOLE = "dataset.batch_size=240"  # a worker's shard
LAG = ("compression=laq", "compression.bits=null")
DIGITS = (
    *PLAIN,
    "model=linear",
    "optimizer.lr=0.5",
    "dataset.partition=dirichlet",
    "dataset.alpha=1",
)


def sent(ran: Ran, ratio: float = 1.0) -> float:
    """The share of the rounds in which something was pushed, by the bytes, each of which is `ratio`
    of a dense one.
    """
    dense = 4 * ran.plan.num_params
    up = sum(
        record["bytes_up"]
        for record in ran.of("TimeTotals")
        if record["rank"] < ran.plan.num_workers
    )
    return up / (ran.end["steps"] * (20 + ratio * dense))


def test_laq_is_the_same_with_and_without_a_server() -> None:
    chosen = (*DIGITS, "compression=laq", "compression.bits=4", "stop.epochs=20")
    server, ring = (
        simulated(*chosen, f"topology={topology}")
        for topology in ("parameter_server", "all_reduce")
    )
    assert server.sha256 == ring.sha256
    assert sent(server, 1 / 8) < 0.7, "some are skipped"


@pytest.mark.parametrize("bits", ["4", "null"])
def test_it_comes_as_far_as_gradient_descent_with_fewer_uploads(bits: str) -> None:
    """A strongly convex problem, conditioned 1 : 10, to the optimum."""
    base = (*QUADRATIC, WHOLE, "compression=laq", f"compression.bits={bits}", "stop.epochs=150")
    lazy, best = simulated(*base), optimum(assemble_job(planned(*QUADRATIC), "cpu").data)[0]
    eager = simulated(*QUADRATIC, WHOLE, *LAG, "compression.xi=0", "stop.epochs=150")
    assert float((eager.params - best).norm()) < 1e-5
    assert float((lazy.params - best).norm()) < 1e-5
    assert sent(eager) > 0.8, "until nothing changes any more"
    assert sent(lazy, 1 if bits == "null" else 35 / 272) < 0.6


def test_minibatches_are_noted_and_never_skipped() -> None:
    chosen = (*DIGITS, *LAG, "compression.estimator=minibatch", "stop.epochs=10")
    assert any("minibatch" in note for note in planned(*chosen).notes)
    assert sent(simulated(*chosen)) > 0.95
    assert not any("minibatch" in note for note in planned(*DIGITS, *LAG).notes)


@pytest.mark.parametrize("width", [1, 4, 11, None])
def test_both_ends_keep_the_same(width: int | None) -> None:
    """The copies agree through skipped and lost messages; a lost message has no effect."""
    codec = conf_option("compression", "laq", bits=width, xi=5.0, max_age=3)
    rng, sender, receiver, ages = np.random.default_rng(0), None, None, []
    x, model = vector("normal", 300), torch.zeros(300)
    for k in range(60):
        model = model + 0.1 * vector("normal", 300, k)
        x = x + 0.3 * 0.9**k * vector("normal", 300, 100 + k)
        before = (bits(x), bits(model))
        old = sender
        sender, body = codec.encode(sender, x, EncodeContext(params=model))
        assert (bits(x), bits(model)) == before
        ages.append(sender.age)
        if k and rng.random() < 0.2:
            sender = codec.restore_dropped(sender, body)
            assert (sender.sent is old.sent, sender.error, sender.age) == (True, old.error, old.age)
        else:
            kept = receiver
            receiver, got = codec.decode(receiver, body, 300)
            assert body.numel() or receiver is kept
            assert torch.equal(got, receiver)
        assert torch.equal(sender.sent, receiver)
        assert body.nbytes in (0, codec.encoded_nbytes(None, 300))
    assert max(ages) == 3, "and none is older than it may be"
    assert ages.count(0) < 50


def test_nothing_before_anything_is_refused() -> None:
    codec = conf_option("compression", "laq")
    with pytest.raises(PayloadError, match="before any gradient"):
        codec.decode(None, torch.empty(0, dtype=torch.uint8), 8)
