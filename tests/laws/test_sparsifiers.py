"""Guarantees of the sparsifiers beyond the laws of all codecs: their papers' figures, and small
vectors by hand.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.coding import (
    INDEX_CODES,
    draw_distinct,
    index_bytes,
    max_index_bytes,
    write_indices,
)
from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.kernels import (
    SMALL,
    estimate_threshold,
    indices_reaching,
    largest_of_rows,
)
from ashl.compression.payload import PayloadError
from ashl.compression.random_dropping import find_slope
from ashl.compression.wrappers import codec_for_layers, wrap_codec
from tests.laws.codecs import codec, decoded, length, vector


def sent(option: Any, x: Any, context: EncodeContext | None = None) -> Tensor:
    """Return C(x) at the other end."""
    x = torch.as_tensor(x, dtype=torch.float32)
    return decoded(option, option.encode(None, x, context or EncodeContext())[1], x.numel())


# --- places
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_golomb_is_within_two_percent_of_the_entropy(share: float) -> None:
    d = 1_000_000
    k = round(share * d)
    written = write_indices(
        "golomb",
        torch.from_numpy(draw_distinct(np.random.default_rng(1), k, d).astype(np.int64)),
        d,
    )
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * d / 8
    assert entropy <= 1.001 * written.nbytes <= 1.021 * entropy


@pytest.mark.parametrize("code", INDEX_CODES)
@pytest.mark.parametrize("d", [1, 2, 7, 64, 1000, 5000])
def test_no_fewer_indices_take_more_room(code: Any, d: int) -> None:
    sizes = [index_bytes(code, k, d) for k in range(1, d + 1)]
    most = np.maximum.accumulate(sizes)
    assert all(most[k - 1] <= max_index_bytes(code, k, d) for k in range(1, d + 1))


@pytest.mark.parametrize("k", [1, 7, 13, 19])
def test_every_place_and_every_pair_is_as_likely(k: int) -> None:
    rng, d, draws = np.random.default_rng(3), 20, 4000
    seen = np.zeros((draws, d))
    for row in seen:
        row[draw_distinct(rng, k, d)] = 1
    p, q = k / d, k * (k - 1) / (d * (d - 1))
    together = seen.T @ seen / draws
    assert np.abs(np.diag(together) - p).max() <= 5 * math.sqrt(p * (1 - p) / draws)
    pairs = together[~np.eye(d, dtype=bool)]
    assert np.abs(pairs - q).max() <= 5 * math.sqrt(q * (1 - q) / draws) + 1e-9


# --- random masks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [codec("random_mask"), codec("subsampling"), codec("block_coordinate")], ids=str
)
def test_workers_draw_shared_numbers_identically(option: Any) -> None:
    """Codecs take random numbers from this stream alone."""
    x = vector("normal", 1000)
    before = repr(np.random.get_state()), torch.get_rng_state()
    own = EncodeContext(seed=5, round=3).stream().integers(2**32, size=4)
    places = {
        sent(option, x, EncodeContext(seed=5, worker=w, round=3)).ne(0).numpy().tobytes()
        for w in range(4)
    }
    assert len(places) == 1
    assert sent(option, x, EncodeContext(seed=5, round=4)).ne(0).numpy().tobytes() not in places
    assert np.array_equal(own, EncodeContext(seed=5, round=3).stream().integers(2**32, size=4))
    assert repr(np.random.get_state()) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.9, 0.9985, 1.0])
@pytest.mark.parametrize(
    "option",
    [
        codec("random_mask"),
        codec("subsampling"),
        codec("block_coordinate"),
        codec("block_coordinate", order="random", scaled=True),
        codec("cast", dtype="fp16"),
        codec("cast", dtype="bf16"),
    ],
    ids=lambda option: f"{type(option).__name__}-{option.traits.contraction}",
)
def test_the_sum_of_bodies_is_the_body_of_the_sum(option: Any, ratio: float) -> None:
    turns = [EncodeContext(ratio, 1, worker, round=2) for worker in range(3)]
    xs = [
        torch.from_numpy(np.random.default_rng(w).integers(-40, 40, 1001).astype(np.float32))
        for w in range(3)
    ]
    bodies = [option.encode(None, x, context)[1] for x, context in zip(xs, turns, strict=True)]
    total = torch.stack([option.summand(body) for body in bodies]).sum(0)
    whole = decoded(option, option.with_summand(bodies[0], total), 1001)
    assert option.traits.linear
    assert torch.allclose(
        whole, torch.stack([decoded(option, body, 1001) for body in bodies]).sum(0), rtol=1e-6
    )
    assert torch.equal(
        option.summand(bodies[0]),
        option.summand(option.with_summand(bodies[1], option.summand(bodies[0]))),
    )


def test_what_is_not_linear() -> None:
    layout = (Layer("a", (3, 4)), Layer("b", (4,)))
    assert not codec("random_mask", values="bf16").traits.linear
    assert not codec("subsampling", shared=False).traits.linear
    assert not codec("random_k").traits.linear
    assert not codec_for_layers(codec("random_mask", per_layer=True), layout).traits.linear
    assert wrap_codec(codec("random_mask"), layout).traits.linear


# --- blocks
# --------------------------------------------------------------------------------------------------


@pytest.mark.limit("compression=block_coordinate")
@pytest.mark.parametrize(("d", "blocks"), [(100, 10), (101, 10), (7, 10), (1, 3), (1000, 7)])
def test_a_sweep_moves_every_element_once(d: int, blocks: int) -> None:
    option, x = codec("block_coordinate", blocks=blocks), vector("normal", d)
    sweep = [sent(option, x, EncodeContext(round=k)) for k in range(min(blocks, d))]
    assert torch.equal(torch.stack(sweep).sum(0), x)
    assert torch.equal(
        torch.stack([part != 0 for part in sweep]).sum(0), torch.ones(d, dtype=torch.int64)
    )


# --- thresholds
# --------------------------------------------------------------------------------------------------


def test_reaching_and_estimated() -> None:
    x = vector("heavy", SMALL + 5)
    assert torch.equal(indices_reaching(x, 2.0), (x.abs() >= 2).nonzero().view(-1))
    odd = torch.tensor([1, -1, math.nan, math.inf, 0.5])
    assert indices_reaching(odd, 1.0).tolist() == [0, 1, 2, 3]
    k = len(x) // 100
    assert 0.7 * k < len(indices_reaching(x, estimate_threshold(x, k))) < 1.4 * k
    assert estimate_threshold(torch.tensor([3.0, -1, 2]), 2) == 2


@pytest.mark.parametrize("k", [1, 3, 10])
def test_largest_of_rows(k: int) -> None:
    x = np.random.default_rng(0).integers(-3, 4, (50, 10)).astype(np.float32)
    x[7, 3], x[8] = np.nan, 0
    columns = largest_of_rows(torch.from_numpy(x), k).numpy()
    magnitudes = np.where(np.isnan(x), np.inf, np.abs(x))
    assert columns.shape == (50, k)
    assert bool((np.diff(columns, axis=1) > 0).all())
    chosen = np.sort(np.take_along_axis(magnitudes, columns, axis=1), axis=1)
    assert np.array_equal(chosen, np.sort(magnitudes, axis=1)[:, 10 - k :])


def test_what_reaches_the_threshold_is_sent_as_it_is() -> None:
    option = codec("threshold", threshold=1.0, error_feedback=False)
    assert sent(option, [0.5, -1.0, 0.99, 7, -0.1]).tolist() == [0, -1, 0, 7, 0]
    nothing = option.encode(None, torch.full((50,), -0.5))[1]
    assert nothing.nbytes == 20
    link, sender, rounds = wrap_codec(codec("threshold", threshold=1.0), ()), None, []
    for context in range(10):
        sender, body = link.encode(sender, torch.tensor([0.25, -0.375]))
        rounds.append(decoded(link, body, 2).tolist())
        assert context or sender.error.tolist() == [0.25, -0.375]
    assert rounds[2:4] == [[0, -1.125], [1, 0]]


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "constant", "mostly zero", "layered"])
def test_a_single_threshold_keeps_to_its_share(kind: str) -> None:
    for d in (1000, SMALL + 77):
        x, option = vector(kind, d), codec("single_threshold", ratio=0.01)
        count, k = int(sent(option, x).count_nonzero()), round(0.01 * d)
        assert count <= 2 * k
        assert count >= min(k / 2, int(x.count_nonzero())) or kind == "mostly zero"


# --- by hand
# --------------------------------------------------------------------------------------------------


@pytest.mark.limit("compression=adacomp")
def test_adacomp_by_hand() -> None:
    """Two bins of three: the second round's largest are found with the update counted twice."""
    option = codec("adacomp", dense_bin=3)
    sender, body = option.encode(None, torch.tensor([1.0, -2, 0.5, 0, 4, 2]))
    # G = g, |2g| ≥ (2, 4): elements 0 and 1, and 4 and 5; the scale is (2 + 4)/2
    assert decoded(option, body, 6).tolist() == [3, -3, 0, 0, 3, 3]
    assert sender.error.tolist() == [-2, 1, 0.5, 0, 1, -1]
    dropped = option.restore_dropped(sender, body)
    assert dropped.error.tolist() == [1, -2, 0.5, 0, 4, 2]
    sender, body = option.encode(sender, torch.tensor([-1.0, 0, 0.5, 0, 0, 0]))
    # G = (-3, 1, 1, 0, 1, -1), G + g = (-4, 1, 1.5, 0, 1, -1) against (3, 1): scale 2
    assert decoded(option, body, 6).tolist() == [-2, 0, 0, 0, 2, -2]
    assert sender.error.tolist() == [-1, 1, 1, 0, -1, 1]


def test_adacomp_knows_layers() -> None:
    """Each with bins of its kind, and a scale of its own."""
    layout = (Layer("conv", (2, 1, 1, 3)), Layer("bias", (2,)), Layer("dense", (2, 4)))
    option = codec_for_layers(codec("adacomp", conv_bin=4, dense_bin=5), layout)
    assert option.bins(16) == [(6, 4), (2, 5), (8, 5)]
    x = torch.tensor([1.0, 0, 0, 0, 3, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 9])
    assert sent(option, x).tolist() == [2, 0, 0, 0, 2, 0, 5, 0, 8, 0, 0, 0, 0, 0, 0, 8]
    with pytest.raises(PayloadError, match="of 16 elements, as the layers have; received 17"):
        option.bins(17)


@pytest.mark.limit("compression=sbc")
def test_sbc_by_hand() -> None:
    option = codec("sbc", ratio=0.4)
    assert sent(option, [5, -4, 1, -4, 0]).tolist() == [0, -4, 0, -4, 0]  # 4 is more than (5 + 1)/2
    assert sent(option, [5, -4, 4, -4, 0]).tolist() == [4.5, 0, 4.5, 0, 0]
    assert sent(option, [5, -1, -1, -1, 0]).tolist() == [5, 0, 0, 0, 0]  # the only positive one
    assert sent(option, [-3, -1, -2, -1, -2]).tolist() == [-2.5, 0, -2.5, 0, 0]
    assert sent(option, [0, 0, 0, 0, 0]).tolist() == [0] * 5
    assert option.encode(None, vector("normal", 10_000))[1].nbytes < 10_000 / 8 + 50


@pytest.mark.limit("compression=stc")
def test_stc_by_hand_and_of_everything() -> None:
    assert sent(codec("stc", ratio=0.5), [5, -1, 0.5, -3]).tolist() == [4, 0, 0, -4]
    x = vector("normal", 1000)
    scaled_sign = float(x.double().abs().mean()) * x.sign()
    assert torch.allclose(sent(codec("stc", ratio=1.0), x), scaled_sign, rtol=1e-6)
    assert codec("stc", ratio=1.0).encoded_nbytes(None, 1000) == 20 + 4 + 125


def test_random_dropping_gives_to_others_what_is_cut_off() -> None:
    x = torch.tensor([10.0, 1, -1, 1, 1, 0])
    assert find_slope(x, 10.0, 3) == pytest.approx(
        5
    )  # p = 1 and 1/2 four times, where 3/14·|x| would be 2.1 for one
    assert find_slope(x, 10.0, 6) == math.inf
    assert find_slope(x, 10.0, 1) == pytest.approx(10 / 14)


# --- chunks
# --------------------------------------------------------------------------------------------------


@pytest.mark.limit("compression=sparse_loco")
def test_sparse_loco_takes_from_every_chunk() -> None:
    x = torch.arange(1, 11, dtype=torch.float32)
    option = codec("sparse_loco", values="fp32", chunk=4, ratio=0.5)
    assert sent(option, x).tolist() == [0, 0, 3, 4, 0, 0, 7, 8, 0, 10]
    assert codec("sparse_loco", chunk=10, ratio=0.3).num_selected(None, 25) == 3 + 3 + 2, (
        "of the last five 1.5, rounded up"
    )
    assert (
        codec("sparse_loco", ratio=1 / 64).encoded_nbytes(None, 4096 * 16)
        == 20 + 4 + 16 * 64 * (2 + 12) // 8 + 8
    )
    assert torch.equal(
        sent(codec("sparse_loco", values="fp32", chunk=1000, ratio=0.1), x),
        sent(codec("topk", ratio=0.1), x),
    )


def test_a_cosine_is_one_number() -> None:
    layout = (Layer("matrix", (128, 64)), Layer("bias", (64,)), Layer("one", ()))
    option = codec_for_layers(codec("demo", ratio=0.0005), layout)
    wave = np.cos(np.pi / 64 * 5 * (np.arange(64) + 0.5))
    matrix = np.concatenate([np.outer(wave, wave), 3 * np.ones((64, 64))])
    x = torch.from_numpy(np.concatenate([matrix.reshape(-1), wave, [7]]).astype(np.float32))
    assert (
        option.encode(None, x)[1].nbytes
        == option.encoded_nbytes(None, 8257)
        < 20 + 12 + 4 * (4 + 3) + 8
    )
    assert torch.allclose(sent(option, x), x, atol=1e-4)


@pytest.mark.parametrize("shape", [(10, 84), (1,), (5, 1, 3, 3), (997,), (65, 65), (64, 64)])
def test_cosines_keep_lengths_and_come_back(shape: tuple[int, ...]) -> None:
    d = math.prod(shape)
    option = codec_for_layers(codec("demo"), (Layer("layer", shape),))
    x = vector("normal", d)
    (grid,) = option.grids(0.9, d)
    back = torch.empty(d)
    coefficients = torch.cat([grid.forward(x, 2.0, strip) for strip in grid.strips(x)])
    grid.backward(coefficients, torch.arange(grid.size).expand(coefficients.shape), back, 2.0)
    assert 4 * length(coefficients) == pytest.approx(length(x), rel=1e-5)
    assert torch.allclose(back, x, atol=1e-5)
    for ratio in (0.01, 0.3):
        assert length(x - sent(option, x, EncodeContext(ratio))) <= option.bound(ratio, d) * length(
            x
        )
