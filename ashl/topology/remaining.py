"""The graph of the workers that are left.

Rule: the edges of the lost are gone, and the others have Metropolis weights; a directed graph is used in both
directions then, as its columns would no longer add up to 1. For push-sum directions stay, and columns add up to 1.
"""

from collections.abc import Collection, Iterable, Sequence

from ashl.topology.graph import Edge, Round, Sources, round_of, rows_of, sources_of


def remaining(rounds: Sequence[Round], gone: Collection[int], columns: bool) -> tuple[Round, ...]:
    """These rounds without the edges of who is gone."""
    n = len(rounds[0].rows)
    found = []
    for each in rounds:
        sources = tuple(
            () if i in gone else tuple(j for j in heard if j not in gone) for i, heard in enumerate(each.sources)
        )
        if not columns:
            sources = sources_of(((i, j) for i, heard in enumerate(sources) for j in heard if i != j), n)
        found.append(round_of(rows_of(sources, "columns" if columns else "metropolis")))
    return tuple(found)


def relabelled(edges: Iterable[Edge], ranks: Sequence[int]) -> tuple[Edge, ...]:
    """The edges between these ranks, by their places among them."""
    place = {rank: k for k, rank in enumerate(ranks)}
    return tuple((place[i], place[j]) for i, j in edges if i in place and j in place)


def distances(near: Sources, start: int) -> dict[int, int]:
    """From one rank, of all that a path leads to."""
    found = {start: 0}
    fresh = [start]
    for rank in fresh:  # grows while it is read
        for other in near[rank]:
            if other not in found:
                found[other] = found[rank] + 1
                fresh.append(other)
    return found
