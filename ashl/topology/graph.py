"""Communication graphs of gossip, and the mixing weights on them.

Rule: in round k rank i receives from its sources and takes Σ_j w_ij·x_j, itself included. A graph
is a tuple of rounds that repeat; a static graph has one round. With n ranks:

    ring, star, complete, torus   the torus has r × c ranks, r the largest divisor of n up to √n;
                                  for a prime n it is a ring
    exponential                   rank i receives from i − 1, i − 2, i − 4, … (mod n); directed
    one_peer_exponential          one of these hops per round, in turn; if n is a power of two,
                                  every model is the mean after log2 n rounds.
    random_regular                every rank has `degree` neighbours, drawn from the seed
    a file                        a line `i j` is an edge

Weights: metropolis has w_ij = 1/(1 + max(d_i, d_j)), and the diagonal makes rows add up to 1.
Push-sum has 1/(1 + out-degree of j); its columns add up to 1 on every graph. Weights 1/(1 + d_i)
are not offered: their columns add up to 1 on regular graphs only, where they equal metropolis.

Source: Xiao, Boyd and Lall, "Distributed Average Consensus with Time-Varying Metropolis Weights",
2006; Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
NeurIPS 2021.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from ashl.data.rng import Purpose, permutation
from ashl.errors import UsageError

Sources = tuple[tuple[int, ...], ...]  # by rank: the ranks it receives from, sorted, without itself
Edge = tuple[int, int]  # the lower rank first
T = TypeVar("T")
ORDERS = 20  # number of edge orders that `matchings_of` tries
TRIES = 1000  # draws of one more cycle or matching that shares no edge with those before


class Round(NamedTuple):
    """One round of a graph."""

    rows: tuple[dict[int, float], ...]  # by rank i: {j: w_ij}, ascending, itself included
    targets: tuple[tuple[int, ...], ...]  # by rank j: the ranks that receive from it
    sources: Sources


@dataclass(frozen=True, eq=False)
class MemberGraph:
    """The graph of a run on its members, with the weights that the sync mode needs."""

    ranks: tuple[int, ...]  # members
    num_workers: int
    seed: int
    places: tuple[Edge, ...]  # edges of all rounds between members, which count from 0
    rounds: tuple[Round, ...]  # by rank

    def round(self, k: int) -> Round:
        """Return the graph of round k."""
        return self.rounds[k % len(self.rounds)]

    @cached_property
    def neighbours(self) -> Sources:
        """Return by rank the workers that share an edge with it, in any round and direction."""
        return self.sources_by_rank(sources_of(self.places, len(self.ranks)))

    def by_rank(self, by_place: Sequence[T], missing: T) -> tuple[T, ...]:
        """Return values by rank from values by place; `missing` for ranks that are no members."""
        found = dict(zip(self.ranks, by_place, strict=True))
        return tuple(found.get(rank, missing) for rank in range(self.num_workers))

    def sources_by_rank(self, by_place: Sources) -> Sources:
        """Return the sources of each rank from those of each place."""
        return self.by_rank([tuple(self.ranks[j] for j in places) for places in by_place], ())


@lru_cache(maxsize=64)
def graph_among(
    graph: str, weights: str, degree: int, ranks: tuple[int, ...], num_workers: int, seed: int
) -> MemberGraph:
    """Return the graph on these members, the same object for all of them."""
    n = len(ranks)
    rounds, places = rounds_of(graph, weights, degree, n, seed), edges_of(graph, degree, n, seed)
    found = MemberGraph(ranks, num_workers, seed, places, rounds)
    if n == num_workers:
        return found
    rows = [
        [{ranks[j]: weight for j, weight in row.items()} for row in each.rows] for each in rounds
    ]
    by_rank = (
        Round(
            found.by_rank(own, {}),
            found.sources_by_rank(each.targets),
            found.sources_by_rank(each.sources),
        )
        for own, each in zip(rows, rounds, strict=True)
    )
    return replace(found, rounds=tuple(by_rank))


def ring(n: int) -> set[Edge]:
    return {edge(i, (i + 1) % n) for i in range(n)} if n > 1 else set()


def star(n: int) -> set[Edge]:
    return {(0, i) for i in range(1, n)}


def complete(n: int) -> set[Edge]:
    return {(i, j) for j in range(n) for i in range(j)}


def torus(n: int) -> set[Edge]:
    rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
    cols = n // rows
    right = {edge(i, i - i % cols + (i + 1) % cols) for i in range(n)}
    down = {edge(i, (i + cols) % n) for i in range(n)}
    return {(i, j) for i, j in right | down if i != j}


def random_regular(n: int, degree: int, seed: int) -> set[Edge]:
    """Return a union of random cycles through all ranks, and a perfect matching if the degree is
    odd.
    """
    if degree >= n or n * degree % 2:
        raise UsageError(
            f"topology.graph=random_regular cannot give each of {n} workers"
            f" topology.degree={degree} neighbours; take a degree below {n}"
            + (", and an even one for an odd number of workers" if n % 2 else "")
        )
    if degree == n - 1:
        return complete(n)
    edges: set[Edge] = set()
    for layer in range(-(-degree // 2)):
        single = degree % 2 == 1 and layer == 0
        for attempt in range(TRIES):
            order = permutation(n, seed, Purpose.GRAPH, layer, attempt).tolist()
            path = zip(order, [*order[1:], order[0]], strict=True)
            drawn = {edge(i, j) for k, (i, j) in enumerate(path) if not (single and k % 2)}
            if not drawn & edges and len(drawn) == (n // 2 if single else n):
                edges |= drawn
                break
        else:
            raise UsageError(
                f"no random graph of {n} workers with {degree} neighbours was found; take"
                " graph=complete"
            )
    return edges


UNDIRECTED: dict[str, Callable[[int], set[Edge]]] = {
    "ring": ring,
    "star": star,
    "complete": complete,
    "torus": torus,
}
# graphs that exist for every number of workers
ANY_SIZE = (*UNDIRECTED, "exponential", "one_peer_exponential")
NAMES = (*UNDIRECTED, "exponential", "one_peer_exponential", "random_regular")


def edge(i: int, j: int) -> Edge:
    return (i, j) if i < j else (j, i)


def sources_of(edges: Iterable[Edge], n: int) -> Sources:
    """Return the sources of each rank if both ends of an edge receive from each other."""
    sources: list[set[int]] = [set() for _ in range(n)]
    for i, j in edges:
        sources[i].add(j)
        sources[j].add(i)
    return tuple(tuple(sorted(each)) for each in sources)


@lru_cache(maxsize=64)
def build_named_graph(graph: str, n: int, degree: int, seed: int) -> tuple[Sources, ...]:
    """Return the sources of every rank by round, for a graph with a name."""
    hops = [1 << t for t in range(max(n - 1, 1).bit_length()) if 1 << t < n]
    if graph == "exponential":
        return (tuple(tuple(sorted((i - hop) % n for hop in hops)) for i in range(n)),)
    if graph == "one_peer_exponential":
        return tuple(tuple(((i - hop) % n,) for i in range(n)) for hop in hops) or (((),) * n,)
    edges = random_regular(n, degree, seed) if graph == "random_regular" else UNDIRECTED[graph](n)
    return (sources_of(edges, n),)


def rows_of(sources: Sources, weights: str) -> tuple[dict[int, float], ...]:
    """Return the rows of the mixing matrix: "metropolis", or "columns" for push-sum."""
    n = len(sources)
    out_degrees = [0] * n
    for neighbours in sources:
        for j in neighbours:
            out_degrees[j] += 1
    degrees = [len(neighbours) for neighbours in sources]
    rows = []
    for i, neighbours in enumerate(sources):
        if weights == "metropolis":
            row = {j: 1 / (1 + max(degrees[i], degrees[j])) for j in neighbours}
            row[i] = 1.0 - sum(row.values())
        else:
            row = {j: 1 / (1 + out_degrees[j]) for j in neighbours}
            row[i] = 1 / (1 + out_degrees[i])
        rows.append(dict(sorted(row.items())))
    return tuple(rows)


def round_of(rows: Sequence[dict[int, float]]) -> Round:
    targets: list[list[int]] = [[] for _ in rows]
    for i, row in enumerate(rows):
        for j in row:
            if j != i:
                targets[j].append(i)
    sources = tuple(tuple(j for j in row if j != i) for i, row in enumerate(rows))
    return Round(tuple(rows), tuple(map(tuple, targets)), sources)


def read_file(path: str, n: int) -> Sources:
    """Read a graph from a file of edges. Raises: UsageError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(NAMES)
        raise UsageError(
            f"topology.graph={path} is neither a file that can be read nor one of {known}"
        ) from error
    edges: set[Edge] = set()
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        ends = [int(field) for field in fields if field.isdecimal() and int(field) < n]
        if len(ends) != 2 or len(fields) != 2:
            raise UsageError(
                f"{path}, line {number}: expected two ranks from 0 to {n - 1}, not {line.strip()!r}"
            )
        if ends[0] != ends[1]:
            edges.add(edge(*ends))
    return sources_of(edges, n)


def rounds_of(graph: str, weights: str, degree: int, n: int, seed: int) -> tuple[Round, ...]:
    """Return the graph with its weights, by round.

    Args: weights: "metropolis", or "columns" for push-sum.
    Raises: UsageError if the graph is not connected.
    """
    by_round = sources_by_round(graph, n, degree, seed)
    near = tuple(tuple(j for sources in by_round for j in sources[i]) for i in range(n))
    if min(depths(near)) < 0:
        raise UsageError(
            f"topology.graph={graph} is not connected: some workers never receive from others; give"
            " it more edges"
        )
    return tuple(round_of(rows_of(sources, weights)) for sources in by_round)


def sources_by_round(graph: str, n: int, degree: int, seed: int) -> tuple[Sources, ...]:
    """Return the sources of every rank by round, for a graph with a name or in a file."""
    return build_named_graph(graph, n, degree, seed) if graph in NAMES else (read_file(graph, n),)


def edges_of(graph: str, degree: int, n: int, seed: int) -> tuple[Edge, ...]:
    """Return the edges of all rounds, without their direction."""
    edges = set[Edge]()
    for sources in sources_by_round(graph, n, degree, seed):
        for i, neighbours in enumerate(sources):
            edges |= {edge(i, j) for j in neighbours}
    return tuple(sorted(edges))


def matrix(each: Round) -> np.ndarray:
    """Return W, float64 [n, n]."""
    n = len(each.rows)
    dense = np.zeros((n, n))
    for i, row in enumerate(each.rows):
        for j, weight in row.items():
            dense[i, j] = weight
    return dense


def depths(sources: Sources) -> list[int]:
    """Return each rank's distance from rank 0, in edges; -1 if there is no path."""
    depth = [0] + [-1] * (len(sources) - 1)
    fresh = [0]
    for rank in fresh:  # the list grows in the loop
        for other in sources[rank]:
            if depth[other] < 0:
                depth[other] = depth[rank] + 1
                fresh.append(other)
    return depth


def matching(edges: tuple[Edge, ...] | None, n: int, seed: int, k: int) -> dict[int, int]:
    """Draw the pairs of round k from the seed, identically on all ranks.

    They are a maximal matching of the edges, or of all pairs if `edges` is None. A rank without a
    partner is not in the result.
    """
    if edges is None:
        order = permutation(n, seed, Purpose.PAIRS, 0, k).tolist()
        chosen = zip(order[::2], order[1::2], strict=False)
    else:
        chosen = (edges[e] for e in permutation(len(edges), seed, Purpose.PAIRS, 0, k).tolist())
    met: dict[int, int] = {}
    for i, j in chosen:
        if i not in met and j not in met:
            met[i], met[j] = j, i
    return met


def matchings_of(edges: Sequence[Edge], n: int) -> list[list[Edge]]:
    """Partition the edges of a graph into matchings.

    There are Δ matchings, with Δ the largest degree, if one of `ORDERS` orders of the edges allows
    it; otherwise Δ + 1.
    Source: Misra and Gries, "A Constructive Proof of Vizing's Theorem", 1992. Differs: the paper
    always uses Δ + 1.
    """
    most = max(map(len, sources_of(edges, n)), default=0)
    for k in range(ORDERS):
        order = permutation(len(edges), 0, Purpose.GRAPH, 0, k).tolist() if k else range(len(edges))
        if (found := colour_edges([edges[e] for e in order], n, most)) is not None:
            return found
    found = colour_edges(edges, n, most + 1)
    assert found is not None, "Vizing's theorem"
    return found


def colour_edges(edges: Iterable[Edge], n: int, count: int) -> list[list[Edge]] | None:
    """Colour edges with `count` colours so that edges of one rank differ.

    Returns: the edges by colour; None if an edge found no colour, which cannot happen for Δ + 1.
    """
    at: list[dict[int, int]] = [{} for _ in range(n)]  # by rank: {colour: rank at the other end}
    for hub, first in edges:
        mine = first_free_colour(at[hub], at[hub], count)
        fan, spare = [first], [first_free_colour(at[first], at[hub], count)]
        while (other := at[hub].get(spare[-1], first)) not in fan and len(at[other]) < count:
            fan.append(other)
            spare.append(first_free_colour(at[other], at[hub], count))
        # the last colour suffices if the fan is maximal
        for colour in spare:
            swap_colours(at, hub, colour, mine)
            before = {other: c for c, other in at[hub].items()}
            ends = (
                k
                for k, other in enumerate(fan)
                if colour not in at[other] and can_shift_colours(at, fan[: k + 1], before)
            )
            if (end := next(ends, None)) is not None:
                break
            swap_colours(at, hub, mine, colour)
        else:
            return None
        # each edge of the fan takes the colour of the next one
        for one, other in pairwise(fan[: end + 1]):
            del at[other][before[other]]
            at[one][before[other]], at[hub][before[other]] = hub, one
        at[hub][colour], at[fan[end]][colour] = fan[end], hub
    return [[(i, at[i][c]) for i in range(n) if at[i].get(c, -1) > i] for c in range(count)]


def first_free_colour(mine: Mapping[int, int], other: Mapping[int, int], count: int) -> int:
    """Return the first colour that is free at both ranks, else the first that is free at `mine`."""
    colours = [colour for colour in range(count) if colour not in mine]
    return next((colour for colour in colours if colour not in other), colours[0])


def can_shift_colours(
    at: Sequence[Mapping[int, int]], fan: Sequence[int], colours: Mapping[int, int]
) -> bool:
    """Return True if the colour of each edge of a fan is free at the end of the edge before."""
    return all(colours[other] not in at[one] for one, other in pairwise(fan))


def swap_colours(at: Sequence[dict[int, int]], start: int, first: int, second: int) -> None:
    """Exchange two colours along the path of edges with these colours, from `start` with the
    first.
    """
    path, colours = [start], (first, second)
    while (other := at[path[-1]].get(colours[(len(path) - 1) % 2])) is not None:
        path.append(other)
    steps = list(enumerate(pairwise(path)))
    for k, (i, j) in steps:
        del at[i][colours[k % 2]], at[j][colours[k % 2]]
    for k, (i, j) in steps:
        at[i][colours[1 - k % 2]], at[j][colours[1 - k % 2]] = j, i
