"""Codecs that sum on their way: low rank, gTop-k and sketches, each by its own laws and among
workers.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ashl.compression.contract import EncodeContext, Layer, size_of
from ashl.compression.gtopk import bits_bytes, tree_neighbours
from ashl.compression.payload import HEADER
from ashl.compression.power_sgd import LowRank, orthonormalize
from ashl.compression.wrappers import ErrorFeedback, with_steps, wrap_codec
from ashl.size_only import SizeOnly
from ashl.stage.compression_pipeline import CodecState, CompressionPipeline
from tests.laws.codecs import bits, codec, decoded, length, vector
from tests.laws.protocols import drawn, together, top, weighted, whole

SHAPES = ((12, 10), (12,), (6, 3, 2, 2), (5, 2))
LAYOUT = tuple(Layer(str(i), shape) for i, shape in enumerate(SHAPES))
D = size_of(LAYOUT)
REDUCERS = ("power_sgd", "gtopk", "sketch_sgd", "fetch_sgd")


def low_rank(rank: int = 2) -> LowRank:
    return codec("power_sgd", rank=rank).for_layout(LAYOUT)


# --- PowerSGD on a link
# -----------------------------------------------------------------------------------------------


def test_a_body_of_low_rank() -> None:
    """Bytes as declared; each matrix of rank 2 is a projection, each layer that would be no shorter
    is as it was.
    """
    own, x = low_rank(), vector("normal", D)
    before = bits(x)
    sender, body = own.encode(None, x)
    got = decoded(own, body, D)
    assert (
        body.nbytes
        == own.encoded_nbytes(None, D)
        == HEADER.size + 4 * (2 * (12 + 10) + 12 + 2 * (6 + 12) + 10)
    )
    assert bits(own.encode(None, x)[1]) == bits(body)
    assert bits(x) == before
    for layer, a, b in zip(
        LAYOUT,
        x.split([each.size for each in LAYOUT]),
        got.split([12 * 10, 12, 72, 10]),
        strict=True,
    ):
        if layer.shape in ((12,), (5, 2)):
            assert torch.equal(a, b)
        else:
            assert torch.linalg.matrix_rank(b.view(layer.shape[0], -1), rtol=1e-5) == 2
            assert abs(float(((a - b) * b).sum())) < 1e-4 * length(
                a
            )  # what is left out stands at a right angle
    out = torch.ones(D)
    own.add(out, body, 2.0)
    assert torch.allclose(out, 1 + 2 * got, rtol=1e-6)
    assert sender.before is None


def test_a_matrix_of_low_rank_comes_over_whole() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((40, 2)) @ rng.standard_normal((2, 30))
    own, x = LowRank(3, ((40, 30),)), torch.from_numpy(matrix.astype(np.float32)).view(-1)
    assert torch.allclose(decoded(own, own.encode(None, x)[1], 1200), x, atol=1e-5)


def test_a_warm_start_finds_the_largest_singular_values() -> None:
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((20, 20)))[0] for _ in range(2))
    values = 2.0 ** -np.arange(20)
    x = torch.from_numpy((left * values @ right).astype(np.float32)).view(-1)
    own, sender, lost = LowRank(2, ((20, 20),)), None, []
    for t in range(12):
        sender, body = own.encode(sender, x, EncodeContext(round=t))
        lost.append(length(x - decoded(own, body, 400)))
    assert lost[-1] == pytest.approx((values[2:] ** 2).sum(), rel=1e-4)
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(lost))


def test_columns_that_were_zero_come_back() -> None:
    """A layer whose gradient was 0 once would be lost for ever."""
    own = low_rank()
    sender, body = own.encode(None, torch.zeros(D))
    assert not decoded(own, body, D).any()
    assert not sender.q.any()
    sender, body = own.encode(sender, vector("normal", D), EncodeContext(round=1))
    assert decoded(own, body, D).count_nonzero() == D
    assert sender.q.all()


def test_a_dropped_message_of_low_rank() -> None:
    own = with_steps(low_rank(), ErrorFeedback())
    sender, _ = own.encode(None, vector("normal", D))
    after, body = own.encode(sender, vector("normal", D, 1), EncodeContext(round=1))
    back = own.restore_dropped(after, body)
    assert torch.equal(back.inner.q, sender.inner.q)
    assert torch.allclose(back.error, sender.error + vector("normal", D, 1), atol=1e-5)


@pytest.mark.parametrize("kind", ["zero", "constant", "tiny", "huge", "layered"])
def test_vectors_at_the_edge_have_a_low_rank(kind: str) -> None:
    x = vector(kind, D)
    got = decoded(low_rank(), low_rank().encode(None, x)[1], D)
    assert got.shape == (D,)
    assert kind == "huge" or length(x - got) <= length(x) * (1 + 1e-5)


def test_columns_become_orthonormal() -> None:
    p = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 5)).astype(np.float32))
    p[:, 1] = p[:, 0] * (1 + 1e-4) + 1e-4 * p[:, 1]  # nearly the same
    p[:, 3] = 2 * p[:, 2]  # the same
    q = orthonormalize(p)
    expected = torch.eye(5)
    expected[3, 3] = 0
    assert torch.allclose(q.T @ q, expected, atol=1e-6)


# --- among workers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_all_end_with_the_same(name: str, n: int) -> None:
    """The update equals the formula to the bit, and so do the sums of piggybacked values.

    A run without gradients moves the same bytes at the same times.
    """
    option = codec(
        name, **({"recovered_fraction": 0.1} if "sketch" in name or "fetch" in name else {})
    )
    weights = [(1 + rank) / (n * (n + 1) / 2) for rank in range(n)]
    rounds, seen = together(option, drawn(D, n, 3), weights, SHAPES)
    for row in rounds:
        assert len({bits(one.update) for one in row}) == 1
        assert len({(one.loss, one.signal) for one in row}) == 1
        assert row[0].loss == pytest.approx(n * (n + 1) / 2)
        assert row[0].signal == 5
    size_only, run_state = together(option, [[SizeOnly(4 * D)] * n] * 3, weights, SHAPES)
    assert all(
        one.update == SizeOnly(4 * D) and one.signal == 5 for row in size_only for one in row
    )
    assert run_state.records == seen.records


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", ["power_sgd", "gtopk", "sketch_sgd"])
def test_nothing_is_lost_on_the_way(name: str, feedback: bool) -> None:
    """Σ c·(x + e) before = update + Σ c·e after, exactly where elements are kept as they are."""
    fields: dict[str, Any] = {
        "gtopk": {"ratio": 0.05},
        "sketch_sgd": {"recovered_fraction": 0.05},
    }.get(name, {})
    n, weights = 7, [0.25] * 7
    rounds, _ = together(
        codec(name, error_feedback=feedback, **fields),
        [whole(D, n, t) for t in range(4)],
        weights,
        SHAPES,
    )
    for row in rounds:
        if not feedback:
            assert all(one.sender is None or name == "power_sgd" for one in row)
            continue
        before, after = (
            weighted([getattr(one, key) for one in row], weights) for key in ("x_sent", "error")
        )
        if name == "power_sgd":
            assert torch.allclose(before, row[0].update + after, atol=1e-3)
        else:
            assert torch.equal(before, row[0].update + after)
            assert all(bool(((one.error == 0) | (one.error == one.x_sent)).all()) for one in row)


def test_low_rank_is_the_projection_of_the_sum() -> None:
    n, weights, shape = 3, [0.5, 0.25, 0.25], (20, 15)
    rounds, _ = together(codec("power_sgd", rank=2), drawn(300, n, 2), weights, [shape])
    for row in rounds:
        total, update = (
            v.view(shape) for v in (weighted([one.x_sent for one in row], weights), row[0].update)
        )
        basis = torch.linalg.svd(update)[0][:, :2]
        assert torch.allclose(update, basis @ basis.T @ total, atol=1e-5)
        for one in row:  # each keeps what of its own lies outside of the common basis
            assert torch.allclose(basis.T @ one.error.view(shape), torch.zeros(2, 15), atol=1e-5)


def test_low_rank_without_compression_is_the_sum() -> None:
    weights = [0.5, 0.3, 0.2]
    rounds, _ = together(codec("power_sgd", rank=12), drawn(D, 3, 2), weights, SHAPES)
    assert all(
        torch.equal(row[0].update, weighted([one.x_sent for one in row], weights)) for row in rounds
    )
    assert not any(one.error.any() for row in rounds for one in row)


# --- gTop-k
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 20))
def test_a_tree_of_any_size(n: int) -> None:
    parents = [tree_neighbours(rank, n)[0] for rank in range(n)]
    assert parents[0] is None
    assert [[r for r in range(n) if parents[r] == rank] for rank in range(n)] == [
        list(tree_neighbours(r, n)[1]) for r in range(n)
    ]
    assert len(tree_neighbours(0, n)[1]) == (n - 1).bit_length()


@pytest.mark.limit("compression=gtopk")
def test_gtopk_of_one_worker_is_topk() -> None:
    rounds, _ = together(codec("gtopk", ratio=0.1), drawn(500, 1, 3), [1.0])
    own, sender = wrap_codec(codec("topk", ratio=0.1), ()), None
    for (one,), (x,) in zip(rounds, drawn(500, 1, 3), strict=True):
        sender, body = own.encode(sender, x)
        assert torch.equal(one.update, decoded(own, body, 500))
        assert torch.equal(one.error, sender.error)


@pytest.mark.limit("compression=gtopk")
def test_gtopk_of_workers_that_agree_is_their_sum() -> None:
    n, weights = 6, [0.25] * 6
    xs = [
        x * (torch.arange(400) % 10 == 3) + (torch.arange(400) % 10 == 3) * 100
        for x in whole(400, n)
    ]
    ((*row,),), _ = together(codec("gtopk", ratio=0.1), [xs], weights)
    assert torch.equal(row[0].update, weighted(xs, weights))
    assert not any(one.error.any() for one in row)


def test_gtopk_follows_each_part_through_the_tree() -> None:
    """Worker 3's element is dropped where it meets worker 2's, and comes through by worker 0: only
    3 takes it back.
    """
    xs = [torch.zeros(4) for _ in range(4)]
    xs[0][1], xs[2][2], xs[3][1] = 9.0, 5.0, 4.0
    ((*row,),), _ = together(codec("gtopk", ratio=0.25, indices="bitmap"), [xs], [1.0] * 4)
    assert row[0].update.tolist() == [0, 9, 0, 0]
    assert [one.error.tolist() for one in row] == [[0] * 4, [0] * 4, [0, 0, 5, 0], [0, 4, 0, 0]]


def test_bytes_of_gtopk() -> None:
    """A set for each edge up, and a set with a bit for each element down."""
    option, n, d = codec("gtopk", ratio=0.1), 5, 1000
    _, seen = together(option, drawn(d, n, 1), [0.2] * n)
    size = option.encoded_nbytes(None, d)
    sent = {record["rank"]: record["bytes_up"] for record in seen.of("TimeTotals")}
    down = size + bits_bytes(100)
    assert (bits_bytes(100), bits_bytes(96), bits_bytes(97)) == (16, 12, 16)
    assert [sent[rank] for rank in range(n)] == [3 * down, size, size + down, size, size]


def test_the_server_half_of_gtopk() -> None:
    option, d, weights = codec("gtopk", ratio=0.1), 200, [0.5, 0.25, 0.25]
    memory, kept = None, torch.zeros(d)
    for t in range(3):
        xs = whole(d, 3, t)
        bodies = [option.encode(None, x)[1] for x in xs]
        total = kept + weighted([top(x, 20) for x in xs], weights)
        memory, update = option.reduce(memory, bodies, weights, d)
        assert torch.equal(update, top(total, 20))
        assert torch.equal(memory, total - update)
        kept = memory
    forgets = codec("gtopk", ratio=0.1, error_feedback=False)
    assert forgets.reduce(None, [forgets.encode(None, xs[0])[1]], [1.0], d)[0] is None
    assert CompressionPipeline(option, d).reduce(CodecState(), [SizeOnly(9)], [1.0]) == SizeOnly(
        4 * d
    )
