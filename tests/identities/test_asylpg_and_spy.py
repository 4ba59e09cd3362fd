"""Two sync modes with messages of their own: AsyLPG comes to the optimum where asynchronous SGD
stalls, SPY to that of a problem with an l1 term, on a model whose zeros are not told of.
"""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ashl.compression.contract import EncodeContext
from ashl.compression.grid import Grid
from ashl.compression.payload import PayloadError, read_payload
from ashl.data.quadratic import optimum
from ashl.planning.instantiate import assemble_job
from ashl.size_only import SizeOnly
from ashl.sync import asylpg, spy
from ashl.sync.asylpg import read_model
from tests.conf_option import conf_option
from tests.laws.codecs import VECTORS, vector
from tests.support import Ran, simulated

PLAIN = (
    "schedule=single",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "cluster.jitter=0.2",
)
QUADRATIC = (
    *PLAIN,
    "dataset=quadratic",
    "model=linear",
    "optimizer.lr=0.2",
    "dataset.batch_size=40",
)
ASYLPG = ("sync=asylpg", "compression=grid", "compression.bits=4")


def from_optimum(ran: Ran) -> float:
    return float((ran.params - optimum(assemble_job(ran.plan, "cpu").data)[0]).norm())


def test_it_is_exact_where_asynchronous_sgd_stalls() -> None:
    few, more = (
        from_optimum(simulated(*QUADRATIC, *ASYLPG, f"stop.epochs={epochs}")) for epochs in (10, 36)
    )
    assert few < 0.3
    assert more < 1e-4, "linearly"
    assert (
        from_optimum(simulated(*QUADRATIC, "sync=asp", "optimizer.lr=1", "stop.epochs=15")) > 3e-3
    )


def test_bits_change_how_many_are_sent_and_hardly_the_way() -> None:
    base = (*PLAIN, "sync=asylpg", "optimizer.lr=0.1", "stop.epochs=8", "model=linear")
    low = simulated(*base, "compression=grid", "compression.bits=6")
    exact = simulated(*base, "sync.mu=null")
    first = assemble_job(exact.plan, "cpu").learner.init()
    assert float((low.params - exact.params).norm()) < 0.15 * float((exact.params - first).norm())
    low_bytes, dense = (
        [sum(r[key] for r in ran.of("TimeTotals")[:4]) for key in ("bytes_up", "bytes_down")]
        for ran in (low, exact)
    )
    assert low_bytes[0] < 0.4 * dense[0]
    assert low_bytes[1] < 0.5 * dense[1]


@pytest.mark.parametrize("mu", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("apart", [1e-3, 0.1, 3.0])
def test_a_pull_is_as_exact_as_the_model_is_near_its_snapshot(mu: float, apart: float) -> None:
    """E‖Q(x) − x‖² ≤ μ‖x − x̃‖², with as few bits as do it."""
    rule, x = conf_option("sync", "asylpg", mu=mu), vector("normal", 2000)
    anchor = x + apart * vector("normal", 2000, 1)
    bodies = [asylpg.write_model(x, anchor, EncodeContext(round=k), rule.mu) for k in range(20)]
    errors = [float(((read_model(body, 2000) - x) ** 2).sum()) for body in bodies]
    allowed = mu * float(((x - anchor) ** 2).sum())
    assert np.mean(errors) <= allowed
    bits = read_payload(bodies[0], Grid.code, 2000).form
    assert bits == 0 or np.mean(errors) > allowed / 10


FAILS = "{time_s: 2.0, worker: 1, fail: true}"
REJOINS = "{time_s: 3.0, worker: 1, rejoin: true}"


@pytest.mark.parametrize(
    ("share", "events", "members"),
    [
        (0.1, "", (0, 1, 2, 3)),
        pytest.param(1.0, "", (0, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(1.0, FAILS, (0, 2, 3), marks=pytest.mark.slow),
        (1.0, f"{FAILS}, {REJOINS}", (0, 1, 2, 3)),
    ],
)
def test_spy_finds_the_sparse_optimum_and_its_zeros(
    share: float, events: str, members: tuple[int, ...]
) -> None:
    """|∂f| ≤ λ where x is zero, ∂f = −λ·sign(x) elsewhere, though the shards differ and
    nobody waits; f is that of the members at the end.
    """
    lam = 0.3
    chosen = (
        *QUADRATIC,
        "sync=spy",
        f"sync.l1={lam}",
        f"sync.share={share}",
        "optimizer.lr=0.5",
        "stop.epochs=150",
        f"cluster.events=[{events}]",
    )
    ran = simulated(*chosen, "dataset.batch_size=240", "cluster.jitter=0")
    x = ran.params
    trainer = assemble_job(ran.plan, "cpu").stages[0].trainer
    slope = sum(trainer.full_gradient(x, rank, 240)[1] for rank in members) / len(members)
    zero = x == 0
    assert 3 < int(zero.sum()) < len(x)
    assert float(slope[zero].abs().max()) <= lam * (1 + 1e-3)
    torch.testing.assert_close(slope[~zero], -lam * torch.sign(x[~zero]), rtol=1e-3, atol=1e-4)


def test_zeros_are_not_told_of() -> None:
    x = torch.zeros(1000)
    x[[3, 500, 999]] = torch.tensor([1.0, torch.nan, -2.0])
    body = spy.write_sparse(x)
    assert body.nbytes == 20 + 3 * 4 + 4  # 3 places of 10 bits
    torch.testing.assert_close(spy.read_sparse(body, 1000), x, equal_nan=True)
    rule = conf_option("sync", "spy", share=0.1)
    point, change = spy.model_and_push(
        x.nan_to_num(), vector("normal", 1000), torch.zeros(1000), EncodeContext(lr=0.1), rule.share
    )
    nonzero = int(spy.read_sparse(change, 1000).count_nonzero())
    assert 60 < nonzero < 150
    assert int(point.count_nonzero()) == nonzero
    assert torch.equal(spy.read_sparse(change, 1000), point)
    assert (
        spy.model_and_push(
            SizeOnly(4000), SizeOnly(4000), SizeOnly(4000), EncodeContext(), rule.share
        )[1].nbytes
        == 20 + 100 * 4 + 125
    )


@given(st.binary(max_size=80), st.sampled_from(list(VECTORS)), st.integers(0, 79))
def test_a_malformed_body_is_refused_or_read(noise: bytes, kind: str, at: int) -> None:
    for body in (
        spy.write_sparse(vector(kind, 30) * (vector("normal", 30) > 1)),
        asylpg.write_model(
            vector("normal", 30),
            vector("normal", 30, 1),
            EncodeContext(),
            conf_option("sync", "asylpg").mu,
        ),
    ):
        wire = bytearray(body.numpy().tobytes())
        wire[at % len(wire) : at % len(wire) + len(noise)] = noise
        for read in (spy.read_sparse, read_model):
            with suppress(PayloadError):
                assert read(torch.frombuffer(wire, dtype=torch.uint8), 30).shape == (30,)
