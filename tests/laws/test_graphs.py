"""Graphs and their weights: doubly stochastic, connected, as fast as the theory says; and files
that are wrong.
"""

from itertools import combinations, product

import numpy as np
import pytest

from ashl.errors import UsageError
from ashl.sync.matcha import edge_weight, laplacian, make_sampling
from ashl.topology.graph import (
    NAMES,
    build_named_graph,
    depths,
    edges_of,
    matching,
    matchings_of,
    matrix,
    rounds_of,
    sources_of,
)

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)


def matrices(
    graph: str, n: int, weights: str = "metropolis", degree: int = 2, seed: int = 0
) -> list[np.ndarray]:
    return [matrix(each) for each in rounds_of(graph, weights, degree, n, seed)]


def second(w: np.ndarray) -> float:
    """The second largest magnitude of an eigenvalue: what a round leaves of the distance from the
    mean.
    """
    return float(np.sort(np.abs(np.linalg.eigvals(w)))[-2])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("graph", NAMES)
def test_mixing_matrices_are_doubly_stochastic(graph: str, n: int) -> None:
    if graph == "random_regular" and n < 3:
        return
    rounds = matrices(graph, n)
    for w in rounds:
        assert (w >= 0).all()
        np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(w.sum(1), 1, atol=1e-12)
        assert (np.diag(w) > 0).all()
        if "exponential" not in graph:
            np.testing.assert_array_equal(w, w.T)
    product = np.linalg.matrix_power(np.linalg.multi_dot([*rounds, np.eye(n), np.eye(n)]), 400)
    np.testing.assert_allclose(
        product, np.full((n, n), 1 / n), atol=1e-3
    )  # it is connected: all become the mean


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("graph", ["ring", "star", "exponential", "one_peer_exponential"])
def test_push_sum_weights_are_column_stochastic(graph: str, n: int) -> None:
    for w in matrices(graph, n, "columns"):
        np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_known_spectral_gaps(n: int) -> None:
    (ring,), (star,), (complete,) = (matrices(graph, n) for graph in ("ring", "star", "complete"))
    assert second(ring) == pytest.approx(
        max(abs(1 + 2 * np.cos(2 * np.pi * k / n)) for k in range(1, n)) / 3
    )
    assert second(star) == pytest.approx(1 - 1 / n)
    assert second(complete) == pytest.approx(0, abs=1e-7)
    (exponential,) = matrices("exponential", n)
    assert second(exponential) == pytest.approx(1 - 2 / (1 + np.log2(n)))  # Ying et al., Theorem 1


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 64])
def test_one_peer_exponential_is_the_mean_after_log2_n_rounds(n: int) -> None:
    rounds = matrices("one_peer_exponential", n)
    assert len(rounds) == max(1, int(np.log2(n)))
    product = np.eye(n)
    for w in rounds:
        product = w @ product
    np.testing.assert_array_equal(product, np.full((n, n), 1 / n))


@pytest.mark.parametrize(("n", "degree"), [(8, 3), (16, 4), (9, 4), (16, 7), (5, 4), (16, 15)])
def test_random_regular(n: int, degree: int) -> None:
    drawn = [edges_of("random_regular", degree, n, seed) for seed in range(3)]
    for edges in drawn:
        assert {len(each) for each in sources_of(edges, n)} == {degree}
        assert min(depths(sources_of(edges, n))) == 0
    assert edges_of("random_regular", degree, n, 0) == drawn[0]
    assert len(set(drawn)) == (1 if degree == n - 1 else 3)


def test_a_torus_has_four_neighbours() -> None:
    assert {len(each) for each in build_named_graph("torus", 12, 1, 0)[0]} == {4}
    assert build_named_graph("torus", 12, 1, 0)[0][0] == (1, 3, 4, 8)
    assert build_named_graph("torus", 7, 1, 0) == build_named_graph("ring", 7, 1, 0)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_matchings_pair_whom_they_can(n: int) -> None:
    seen = set()
    for k in range(60):
        met = matching(None, n, 3, k)
        assert all(met[met[rank]] == rank != met[rank] for rank in met)
        assert len(met) == n - n % 2
        seen |= set(met.items())
    assert len(seen) == n * (n - 1)
    ring = edges_of("ring", 1, n, 0)
    for k in range(20):
        met = matching(ring, n, 3, k)
        assert all((min(pair), max(pair)) in ring for pair in met.items())
        left = set(range(n)) - set(met)
        assert not [e for e in ring if set(e) <= left], "it is maximal"


WRONG = {
    "0 1\n1 2\n2 x\n": "line 3: expected two ranks from 0 to 3",
    "0 1\n1 4\n": "line 2: expected two ranks from 0 to 3",
    "0 1 0.5\n1 2\n": "line 1: expected two ranks from 0 to 3",
    "0 1\n2 3\n": "is not connected",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.replace("\n", ", ")[:20])
def test_a_wrong_file_is_refused_in_words(text: str, tmp_path) -> None:
    path = tmp_path / "my.edges"
    path.write_text(text)
    with pytest.raises(UsageError, match=WRONG[text]):
        rounds_of(str(path), "metropolis", 2, 4, 0)


def test_a_changed_file_is_read_again(tmp_path) -> None:
    path = tmp_path / "my.edges"
    path.write_text("0 1 # the first\n\n1 2\n")
    (before,) = matrices(str(path), 3)
    np.testing.assert_allclose(
        before, [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    )
    path.write_text("0 1\n1 2\n2 0\n")
    (after,) = matrices(str(path), 3)
    np.testing.assert_allclose(after, np.full((3, 3), 1 / 3))


@pytest.mark.parametrize(
    ("graph", "n", "count"),
    [
        ("complete", 6, 5),
        ("complete", 7, 7),
        ("complete", 16, 15),
        ("torus", 16, 4),
        ("ring", 7, 3),
        ("star", 6, 5),
    ],
)
def test_a_graph_is_split_into_as_few_matchings_as_can_be(graph: str, n: int, count: int) -> None:
    """Six workers who all meet each other took 7, one after the other into the first that
    would do.
    """
    assert len(make_sampling(edges_of(graph, 2, n, 0), n, 0.5).matchings) == count


@pytest.mark.parametrize("seed", range(40))
def test_a_split_is_one_and_never_far_from_the_fewest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, density = int(rng.integers(2, 13)), rng.random()
    edges = [(i, j) for i, j in combinations(range(n), 2) if rng.random() < density]
    matchings = matchings_of(edges, n)
    assert sorted(one for matching in matchings for one in matching) == edges
    assert all(
        len({end for one in matching for end in one}) == 2 * len(matching) for matching in matchings
    )
    assert len(matchings) <= 1 + max(map(len, sources_of(edges, n)))


@pytest.mark.parametrize(
    ("graph", "n"), [("ring", 7), ("torus", 12), ("star", 6), ("random_regular", 10)]
)
def test_matcha_samples_within_its_budget_and_mixes_on_average(graph: str, n: int) -> None:
    edges = edges_of(graph, 4, n, 1)
    plan = make_sampling(edges, n, 0.5)
    assert sorted(one for matching in plan.matchings for one in matching) == list(edges)
    assert all(
        len({end for one in matching for end in one}) == 2 * len(matching)
        for matching in plan.matchings
    )
    assert plan.probabilities.sum() == pytest.approx(0.5 * len(plan.matchings), abs=1e-6)
    assert ((plan.probabilities >= 0) & (plan.probabilities <= 1)).all()
    laplacians = [laplacian(matching, n) for matching in plan.matchings]

    def connectivity(chances: np.ndarray) -> float:
        return np.linalg.eigvalsh(sum(p * one for p, one in zip(chances, laplacians, strict=True)))[
            1
        ]

    assert connectivity(plan.probabilities) >= connectivity(np.full(len(laplacians), 0.5)) - 1e-12
    expected = np.zeros((n, n))  # E[W'W], by going through all draws
    for drawn in product([0, 1], repeat=len(laplacians)):
        chance = np.prod(
            [p if b else 1 - p for p, b in zip(plan.probabilities, drawn, strict=True)]
        )
        w = np.eye(n) - plan.alpha * sum(b * one for b, one in zip(drawn, laplacians, strict=True))
        np.testing.assert_allclose(w.sum(0), 1)
        expected += chance * w.T @ w
    contraction = np.linalg.eigvalsh(expected - 1 / n)[-1]
    assert contraction < 1
    for other in (0.9 * plan.alpha, 1.1 * plan.alpha):
        assert edge_weight(laplacians, plan.probabilities, n) == pytest.approx(plan.alpha)
        mean = sum(p * one for p, one in zip(plan.probabilities, laplacians, strict=True))
        spread = mean @ mean + 2 * sum(
            p * (1 - p) * one for p, one in zip(plan.probabilities, laplacians, strict=True)
        )
        there = np.linalg.eigvalsh(np.eye(n) - 2 * other * mean + other**2 * spread - 1 / n)[-1]
        assert there >= contraction - 1e-9
