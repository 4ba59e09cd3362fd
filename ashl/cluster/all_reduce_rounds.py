"""Message schedules of all-reduce algorithms: sender, receiver and pieces of every round.

A vector is split into equal pieces; a message is a run of consecutive pieces. Members are ordered
node by node, and in rank order within a node. With n members, latency α, β seconds per byte and S
bytes, where all links are equal:

- ring: 2(n − 1) rounds of S/n. 2(n − 1)·α + 2(n − 1)/n·Sβ.
- halving: recursive halving of the vector, then doubling, with neighbours at the distances 1, 2, 4
… of the largest power of two p ≤ n. 2·log₂p·α + 2(p − 1)/p·Sβ. If n > p, n − p members first send
their whole vector to a neighbour and receive the sum last: 2(α + Sβ) more.
- tree: a binomial tree, up and down. 2⌈log₂n⌉·(α + Sβ).
- star: all members send their vector to the first member and receive the sum: 2(α + (n − 1)·Sβ),
through its NIC. It is a parameter server that sends gradients instead of models, each worker with a
model of its own.
- hierarchical: reduce-scatter inside each node, all-reduce of each shard over the nodes, all-gather
inside. With m nodes of k members: 2(k − 1)·α' + 2(k − 1)/k·Sβ' inside, and 2(m − 1)·α + 2(m −
1)/m·Sβ through each node's NIC. If nodes have different numbers of members, the number of shards is
that of the smallest node.

Sources: Patarasuk and Yuan, JPDC 2009 (ring); Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 2005 (halving, tree); Mikami et al.,
"Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018 (2D-torus: hierarchical);
Wen et al., "TernGrad", NeurIPS 2017 (star: its parameter localization).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

Algorithm = Literal["auto", "ring", "halving", "tree", "star", "hierarchical"]


class Round(NamedTuple):
    """Messages that are in flight at once: pieces [start, stop) from one member to another.

    Members are numbered by their position in the group. The receiver adds the pieces to its own
    (`adds`), or replaces its own by them.
    """

    src: np.ndarray
    dst: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    adds: bool


def ring(nodes: Sequence[np.ndarray]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) of the ring algorithm."""
    members = np.concatenate(nodes)
    n, at = len(members), np.arange(len(members))
    following = np.roll(members, -1)

    def rounds() -> Iterator[Round]:
        for first, adds in ((0, True), (1, False)):
            for t in range(n - 1):
                piece = (at + first - t) % n
                yield Round(members, following, piece, piece + 1, adds)

    return n, rounds()


def halving(nodes: Sequence[np.ndarray]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) of recursive halving and doubling."""
    members = np.concatenate(nodes)
    levels = len(members).bit_length() - 1
    p = 1 << levels
    beyond = len(members) - p
    near, far = members[: 2 * beyond : 2], members[1 : 2 * beyond : 2]
    core = np.concatenate([near, members[2 * beyond :]])

    def rounds() -> Iterator[Round]:
        at, nothing, all_of_it = np.arange(p), np.zeros(beyond, dtype=int), np.full(beyond, p)
        low = np.zeros(p, dtype=int)  # first piece that each member still holds
        if beyond:
            yield Round(far, near, nothing, all_of_it, True)
        for level in range(levels):
            half, upper = p >> (level + 1), (at >> level) & 1
            yield Round(
                core,
                core[at ^ (1 << level)],
                low + (1 - upper) * half,
                low + (2 - upper) * half,
                True,
            )
            low = low + upper * half
        for level in reversed(range(levels)):
            half, upper = p >> (level + 1), (at >> level) & 1
            yield Round(core, core[at ^ (1 << level)], low, low + half, False)
            low = low - upper * half
        if beyond:
            yield Round(near, far, nothing, all_of_it, False)

    return p, rounds()


def tree(nodes: Sequence[np.ndarray]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) of the binomial tree."""
    members = np.concatenate(nodes)
    levels = range((len(members) - 1).bit_length())

    def rounds() -> Iterator[Round]:
        for adds in (True, False):
            for level in levels if adds else reversed(levels):
                lower = np.arange(1 << level, len(members), 2 << level)
                ends = members[lower], members[lower - (1 << level)]
                yield Round(
                    *(ends if adds else ends[::-1]), np.zeros_like(lower), np.ones_like(lower), adds
                )

    return 1, rounds()


def star(nodes: Sequence[np.ndarray]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) of the star."""
    members = np.concatenate(nodes)
    others = members[1:]
    hub, none, one = np.full_like(others, members[0]), np.zeros_like(others), np.ones_like(others)
    both = (Round(others, hub, none, one, True), Round(hub, others, none, one, False))
    return 1, iter(both if others.size else ())


def hierarchical(nodes: Sequence[np.ndarray]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) of the hierarchical algorithm.

    In each of its parts every member sends directly to the receiver of the piece.
    """
    m, shards, most = len(nodes), min(map(len, nodes)), max(map(len, nodes))
    owners = np.stack([members[:shards] for members in nodes])

    def rounds_inside_nodes(adds: bool) -> Iterator[Round]:
        for t in range(1, most):
            ends = []
            for members in (members for members in nodes if len(members) > t):
                at = np.arange(len(members))
                to = (at + t) % len(members)
                shard = to if adds else at
                ends.append(np.stack([members[at], members[to], shard])[:, shard < shards])
            src, dst, shard = np.concatenate(ends, axis=1)
            yield Round(src, dst, shard * m, (shard + 1) * m, adds)

    def rounds_across_nodes(adds: bool) -> Iterator[Round]:
        at, first = np.arange(m), np.arange(shards) * m
        for t in range(1, m):
            to = (at + t) % m
            piece = (first + (to if adds else at)[:, None]).ravel()
            yield Round(owners.ravel(), owners[to].ravel(), piece, piece + 1, adds)

    def rounds() -> Iterator[Round]:
        for part, adds in (
            (rounds_inside_nodes, True),
            (rounds_across_nodes, True),
            (rounds_across_nodes, False),
            (rounds_inside_nodes, False),
        ):
            yield from part(adds)

    return shards * m, rounds()


BY_NAME: dict[str, Callable[[Sequence[np.ndarray]], tuple[int, Iterator[Round]]]] = {
    "ring": ring,
    "halving": halving,
    "tree": tree,
    "star": star,
    "hierarchical": hierarchical,
}


def rounds_of(algorithm: str, nodes: Sequence[int]) -> tuple[int, Iterator[Round]]:
    """Return (number of pieces, rounds) for a group whose members are on the nodes `nodes`."""
    at = np.array(nodes)
    return BY_NAME[algorithm]([np.flatnonzero(at == node) for node in dict.fromkeys(nodes)])


def nodes_of_members(group: Sequence[int], node: Sequence[int] | None) -> tuple[int, ...]:
    """Return the node of each member; a node of its own for each where `node` is None."""
    return tuple(group) if node is None else tuple(node[rank] for rank in group)
