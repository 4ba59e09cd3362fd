"""Count sketches by their own laws, and what Sketched SGD and FetchSGD make of them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ashl.compression.contract import EncodeContext
from ashl.compression.count_sketch import (
    Table,
    cells_of,
    estimate_elements,
    hash_cells,
    median,
    recover_largest,
    sketch,
)
from ashl.compression.payload import PayloadError
from tests.laws.codecs import bits, codec, decoded, vector
from tests.laws.protocols import drawn, together, top, weighted, whole

TABLE = Table(5, 101, 7)


def test_sketches_add_up() -> None:
    """Sketches of integers agree to the bit, in blocks and at once."""
    d = 70_001
    x, y = whole(d, 2)
    assert torch.equal(sketch(x, TABLE) + sketch(y, TABLE), sketch(x + y, TABLE))
    option = codec("fetch_sgd")
    bodies = [option.encode(None, v, EncodeContext(seed=7))[1] for v in (x, y, x + y)]
    one, other, both = (option.summand(body) for body in bodies)
    assert bits(option.with_summand(bodies[0], one + other)) == bits(bodies[2])
    assert one.nbytes == option.summed_bytes(None, d)
    assert torch.equal(one + other, both)


def test_a_hash_of_some_is_that_of_all() -> None:
    d, places = 70_001, np.array([0, 1, 65_535, 65_536, 70_000])
    cells, signs = cells_of(TABLE, torch.from_numpy(places))
    for row in range(TABLE.rows):
        found = np.concatenate([part.copy() for _, part in hash_cells(TABLE, row, d)])
        assert (found.min(), found.max()) == (0, 2 * TABLE.cols - 1)
        assert np.array_equal(cells[row], found[places] // 2 + row * TABLE.cols)
        assert np.array_equal(signs[row], 1 - 2 * (found[places] % 2))
        counts = np.bincount(found, minlength=2 * TABLE.cols)
        assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5


@pytest.mark.parametrize("kind", ["normal", "constant", "heavy"])
def test_an_estimate_is_unbiased(kind: str) -> None:
    """One row: mean x over the hash's draw, with a variance of ‖x‖²/cols."""
    d, draws, whole_x = 200, 600, vector(kind, 200)
    x, tables = whole_x.numpy(), [Table(1, 20, seed) for seed in range(draws)]
    guesses = np.array(
        [estimate_elements(sketch(whole_x, table), table, d).numpy() for table in tables],
        np.float64,
    )
    spread = guesses.std(0) / draws**0.5
    assert (np.abs(guesses.mean(0) - x) <= 5.5 * spread).all()
    assert guesses.var(0).mean() == pytest.approx((x.astype(np.float64) ** 2).sum() / 20, rel=0.15)


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 9])
def test_a_median(rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 1000)).astype(np.float32)
    expected = np.median(x, axis=0)
    assert np.array_equal(median(list(x.copy())), expected)


def test_heavy_elements_are_recovered() -> None:
    d, k = 100_000, 50
    x = vector("normal", d).numpy() * np.float32(0.01)
    heavy = np.random.default_rng(3).permutation(d)[:k]
    x[heavy] += np.where(np.arange(k) % 2, 5, -5).astype(np.float32)
    table = Table(5, 4000, 1)
    places, values = recover_largest(sketch(torch.from_numpy(x), table), table, d, k)
    assert set(places.tolist()) == set(heavy.tolist())
    assert np.abs(values.numpy() - x[places]).max() < 0.5


@pytest.mark.parametrize("name", ["sketch_sgd", "fetch_sgd"])
def test_sketches_of_other_seeds_do_not_add_up(name: str) -> None:
    option, x = codec(name), vector("normal", 1000)
    bodies = [option.encode(None, x, EncodeContext(seed=seed))[1] for seed in (1, 2)]
    with pytest.raises(PayloadError, match="seeds"):
        option.reduce(None, bodies, [0.5, 0.5], 1000)


def test_the_server_half_of_sketched_sgd() -> None:
    """The sketches of a merge are summed before anything is looked for."""
    option, xs = codec("sketch_sgd", recovered_fraction=0.05), whole(1000, 3)
    bodies = [option.encode(None, x)[1] for x in xs]
    memory, update = option.reduce(None, bodies, [0.25] * 3, 1000)
    assert memory is None
    assert torch.equal(
        update, decoded(option, option.encode(None, weighted(xs, [0.25] * 3))[1], 1000)
    )


@pytest.mark.limit("compression=sketch_sgd")
def test_sketched_sgd_without_collisions_is_topk_of_the_sum() -> None:
    weights = [0.5, 0.25, 0.25]
    for fields in (
        {"sketch_ratio": 1.0, "candidates": 1},
        {"candidates": 10},
    ):  # either all cells, or all are candidates
        rounds, _ = together(
            codec("sketch_sgd", recovered_fraction=0.1, **fields),
            [whole(300, 3, t) for t in range(3)],
            weights,
        )
        for row in rounds:
            assert torch.equal(
                row[0].update, top(weighted([one.x_sent for one in row], weights), 30)
            )


def test_sketched_sgd_asks_for_exact_values() -> None:
    rounds, _ = together(codec("sketch_sgd"), drawn(2000, 3, 2), [0.2, 0.3, 0.5])
    for row in rounds:
        total = weighted([one.x_sent for one in row], [0.2, 0.3, 0.5])
        sent = row[0].update != 0
        assert sent.sum() == 40
        assert torch.equal(row[0].update[sent], total[sent])


# --- FetchSGD
# --------------------------------------------------------------------------------------------------


def fetched(option: Any, vectors: list[Tensor]) -> list[Tensor]:
    """The updates of one worker's vectors."""
    memory, updates = None, []
    for x in vectors:
        memory, update = option.reduce(memory, [option.encode(None, x)[1]], [1.0], x.numel())
        updates.append(update)
    return updates


@pytest.mark.limit("compression=fetch_sgd")
@pytest.mark.parametrize("error", ["zero", "subtract"])
def test_fetch_sgd_without_collisions(error: str) -> None:
    """It is momentum and error feedback on the vector itself; with all of it kept, momentum SGD."""
    vectors = whole(200, 5)
    option = codec(
        "fetch_sgd", sketch_ratio=1.0, recovered_fraction=0.1, decay=0.5, error=error, masking=True
    )
    u = e = torch.zeros(200)
    for x, update in zip(vectors, fetched(option, vectors), strict=True):
        u = 0.5 * u + x
        e = e + u
        sent = top(e, 20)
        assert torch.equal(update, sent)
        e, u = e - sent, torch.where(sent == 0, u, 0)
    whole_vector = codec(
        "fetch_sgd", sketch_ratio=1.0, recovered_fraction=1.0, decay=0.5, error=error, masking=False
    )
    u = torch.zeros(200)
    for x, update in zip(vectors, fetched(whole_vector, vectors), strict=True):
        u = 0.5 * u + x
        assert torch.equal(update, u)
