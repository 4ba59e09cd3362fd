"""MATCHA: gossip in which each round uses a random part of the graph's edges, important edges more
often.

Use when: a graph has some slow links: important edges are used more often.
Avoid when: all links are equal and fast.
Alternatives: `d_psgd` with every edge; `ad_psgd`.

Rule: the edges are decomposed into M matchings with Laplacians L_m. In each round all workers draw
from the seed which matchings are used, matching m with probability p_m (b_m = 1, else 0). Then x ←
(I − α·Σ_m b_m·L_m)·(x + Δ), over the models of all workers. The p_m maximise λ_2(Σ p_m·L_m) subject
to Σ p_m ≤ budget·M, so a round costs `budget` of a round on the whole graph. α minimises the
expected contraction factor. M is at most the maximum degree plus one, as in the paper.
Waiting: in each round a worker waits for its neighbours in the matchings that are used.

Limit: budget = 1 is D-PSGD (`atc`) with W = I − α·L.
Source: Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling",
2019, arXiv 1905.09435.
Differs: projected supergradient ascent finds the p_m and golden-section search finds α, where the
paper solves two convex programs.

Family: gossip.
Status: reproduction.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from ashl.data.rng import Purpose, bit_generator
from ashl.option import Count, Ratio, option
from ashl.size_only import Vector
from ashl.topology.gossip import GossipRound, Outgoing, Received, RoundRule, RoundState, mix_models
from ashl.topology.graph import Edge, MemberGraph, matchings_of

ASCENT = 300  # steps of the search for p
SECTIONS = 60  # steps of the search for α
GOLDEN = (5**0.5 - 1) / 2


class Sampling(NamedTuple):
    """Matchings of the graph with their probabilities, from which rounds are drawn."""

    matchings: list[list[Edge]]
    peers: tuple[dict[int, int], ...]  # by matching: the partner of each rank
    probabilities: np.ndarray  # p, float64 [M]
    alpha: float  # weight of a used edge


@option
class Matcha(RoundRule):
    """Gossip in synchronous rounds on random matchings of the graph."""

    local_steps: Count | Literal["plan"]
    budget: Ratio

    def sources(self, graph: MemberGraph, rank: int, k: int) -> tuple[int, ...]:
        plan = member_sampling(graph, self.budget)
        return tuple(
            sorted(
                plan.peers[m][rank]
                for m in used_matchings(plan, graph.seed, k)
                if rank in plan.peers[m]
            )
        )

    async def outgoing(self, now: GossipRound, state: RoundState, delta: Any) -> Outgoing:
        state.params = state.params + delta
        return {j: (state.params, ()) for j in self.sources(now.graph, now.rank, now.k)}

    def merge(self, now: GossipRound, state: RoundState, delta: Vector, received: Received) -> None:
        alpha = member_sampling(now.graph, self.budget).alpha
        row = {**dict.fromkeys(received, alpha), now.rank: 1 - alpha * len(received)}
        state.params = (
            mix_models(dict(sorted(row.items())), now.rank, state.params, received)
            if received
            else state.params
        )


def used_matchings(plan: Sampling, seed: int, k: int) -> list[int]:
    """Return the matchings of round k, the same on all workers."""
    words = bit_generator(seed, Purpose.PAIRS, 0, k).random_raw(len(plan.probabilities))
    return [m for m, word in enumerate(words) if float(word) / 2**64 < plan.probabilities[m]]


@lru_cache(maxsize=16)
def member_sampling(graph: MemberGraph, budget: float) -> Sampling:
    """Return the matchings of a graph, with partners by rank."""
    ranks = graph.ranks
    plan = make_sampling(graph.places, len(ranks), budget)
    peers = tuple({ranks[i]: ranks[j] for i, j in met.items()} for met in plan.peers)
    return plan._replace(peers=peers)


@lru_cache(maxsize=16)
def make_sampling(edges: tuple[Edge, ...], n: int, budget: float) -> Sampling:
    """Return the matchings of the graph, the probability of each, and the weight of a used edge."""
    if not edges:  # a single worker
        return Sampling([], (), np.zeros(0), 0.0)
    matchings = matchings_of(edges, n)
    laplacians = [laplacian(matching, n) for matching in matchings]
    chances = matching_probabilities(laplacians, budget)
    peers = tuple(
        {i: j for a, b in matching for i, j in ((a, b), (b, a))} for matching in matchings
    )
    return Sampling(matchings, peers, chances, edge_weight(laplacians, chances, n))


def laplacian(edges: Sequence[Edge], n: int) -> np.ndarray:
    dense = np.zeros((n, n))
    for i, j in edges:
        dense[[i, j], [i, j]] += 1
        dense[[i, j], [j, i]] -= 1
    return dense


def matching_probabilities(laplacians: list[np.ndarray], budget: float) -> np.ndarray:
    """Return p in [0, 1]^M with Σ p = budget·M for which λ_2(Σ p_m·L_m) is largest.

    λ_2 is concave in p; with v its eigenvector, the numbers v'·L_m·v are a supergradient.
    """
    total = budget * len(laplacians)
    best = chances = np.full(len(laplacians), budget)
    most = -1.0
    for step in range(1, ASCENT + 1 if budget < 1 else 1):
        values, vectors = np.linalg.eigh(
            sum(p * one for p, one in zip(chances, laplacians, strict=True))
        )
        if values[1] > most:
            most, best = values[1], chances
        uphill = np.array([vectors[:, 1] @ one @ vectors[:, 1] for one in laplacians])
        chances = project_probabilities(
            chances + uphill / (np.linalg.norm(uphill) + 1e-12) / step**0.5, total
        )
    return best


def project_probabilities(p: np.ndarray, total: float) -> np.ndarray:
    """Return the nearest point with 0 ≤ p ≤ 1 and Σ p = total, by clipping p plus a constant."""
    low, high = -1.0 - p.max(), 1.0 - p.min()
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if np.clip(p + shift, 0, 1).sum() < total else (low, shift)
    return np.clip(p + high, 0, 1)


def edge_weight(laplacians: list[np.ndarray], chances: np.ndarray, n: int) -> float:
    """Return the α for which the largest eigenvalue of E[W'W] − J is smallest; it is convex in α.

    With L = Σ p_m·L_m, E[W'W] = I − 2α·L + α²·(L² + 2·Σ p_m(1 − p_m)·L_m); J is the averaging
    matrix.
    """
    mean = sum(p * one for p, one in zip(chances, laplacians, strict=True))
    spread = mean @ mean + 2 * sum(
        p * (1 - p) * one for p, one in zip(chances, laplacians, strict=True)
    )

    def contraction(alpha: float) -> float:
        return np.linalg.eigvalsh(
            np.eye(n) - 2 * alpha * mean + alpha**2 * spread - np.ones((n, n)) / n
        )[-1]

    low, high = 0.0, 1.0
    for _ in range(SECTIONS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if contraction(left) < contraction(right) else (left, high)
    return float((low + high) / 2)
