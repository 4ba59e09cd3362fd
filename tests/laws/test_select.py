"""The selection of Top-K is exact: it has the same magnitudes as torch.topk, for every vector."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ashl.compression import kernels
from ashl.compression.coding import (
    INDEX_CODES,
    VARIABLE,
    IndexCode,
    index_bytes,
    index_width,
    read_indices,
    write_indices,
)
from ashl.compression.kernels import SAMPLE, SMALL, largest_indices
from ashl.compression.payload import as_bytes

LONG = SMALL + 12_345  # long enough to be sampled
VECTORS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, d: rng.standard_normal(d),
    "heavy": lambda rng, d: rng.standard_cauchy(d) ** 3,
    "layered": lambda rng, d: rng.standard_normal(d) * 10.0 ** (np.arange(d) * 9 // d - 6),
    "sorted": lambda rng, d: np.sort(rng.standard_normal(d)),
    "few values": lambda rng, d: rng.integers(-3, 4, d),
    "constant": lambda rng, d: np.full(d, -2.0),
    "zero": lambda rng, d: np.zeros(d) * -1,
    "mostly zero": lambda rng, d: rng.standard_normal(d) * (rng.random(d) < 1e-3),
    "not finite": lambda rng, d: rng.choice([np.nan, np.inf, -np.inf, -0.0, 1.0, 1e-45], d),
}


def check(x: np.ndarray, k: int) -> None:
    before = x.tobytes()
    places = largest_indices(torch.from_numpy(x), k).numpy()
    assert x.tobytes() == before
    assert places.shape == (k,)
    assert k < 2 or bool((np.diff(places) > 0).all())
    chosen = torch.from_numpy(x[places]).abs().sort(descending=True).values
    assert (
        chosen.numpy().tobytes()
        == torch.topk(torch.from_numpy(x).abs(), k).values.numpy().tobytes()
    )
    last = np.nanmin(np.where(np.isnan(x[places]), np.inf, np.abs(x[places])))
    ties = np.flatnonzero(np.abs(x) == last)
    taken = np.isin(ties, places)
    assert bool((taken[:-1] >= taken[1:]).all()), "of equal magnitudes the first are taken"


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("d", [1, 2, 1000, LONG])
def test_same_as_torch(name: str, d: int) -> None:
    x = VECTORS[name](np.random.default_rng(d), d).astype(np.float32)
    for k in {1, 2, d // 1000, d // 100, d // 20, d // 3, d - 1, d}:
        if 1 <= k <= d:
            check(x, k)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.data())
def test_any_short_vector(values: list[float], data: st.DataObject) -> None:
    check(np.array(values, np.float32), data.draw(st.integers(1, len(values))))


def test_a_sample_that_misleads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is sampled is large and nothing else is: the bound leaves too few, and all are
    looked at.
    """
    x = np.random.default_rng(0).standard_normal(LONG).astype(np.float32)
    stride = next(s for s in range(LONG // SAMPLE, LONG) if np.gcd(s, 210) == 1)
    x[stride // 2 :: stride] += 1000
    sampled, calls, choose = len(x[stride // 2 :: stride]), [], kernels._choose_largest
    monkeypatch.setattr(
        kernels, "_choose_largest", lambda keys, k: (calls.append(len(keys)), choose(keys, k))[1]
    )
    check(x, sampled + 100)
    assert calls == [LONG]
    x[stride // 2 :: stride] -= 1000
    check(x, 1000)
    assert 1000 <= calls[1] < 2000


@pytest.mark.parametrize("code", INDEX_CODES)
@pytest.mark.parametrize("d", [1, 2, 3, 33, 255, 256, 257, 2**16, 2**16 + 1])
def test_indices_come_back(code: IndexCode, d: int) -> None:
    rng = np.random.default_rng(d)
    for k in {1, 2, 31, 32, 33, d // 2, d - 1, d}:
        if 1 <= k <= d:
            indices = torch.from_numpy(np.sort(rng.permutation(d)[:k]))
            buffer = as_bytes(write_indices(code, indices, d))
            declared = index_bytes(code, k, d)
            assert buffer.nbytes <= declared if code in VARIABLE else buffer.nbytes == declared
            assert torch.equal(read_indices(code, buffer, k, d).long(), indices)


def test_widest_indices() -> None:
    d = 2**31 - 1
    indices = torch.tensor([0, 1, 2**30, d - 1])
    assert index_width(d) == 31
    for code in ("int32", "packed", "golomb"):
        buffer = as_bytes(write_indices(code, indices, d))
        assert torch.equal(read_indices(code, buffer, 4, d).long(), indices)
