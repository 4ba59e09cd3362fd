"""Sums over a group by messages of our own, as `ashl.cluster.sum_rounds` has them.

Native sums are added up on the way: the algorithm's own order, the same bits on all members. An exact sum is one in
rank order, ((x_0 + x_1) + x_2) + …, whichever way it travels: what of a piece has not all terms before it goes on
unsummed, beside the sum of the first ones. So the hops are the same, and longer: every term may have to travel to
whoever adds up a piece. 16-bit floats are added up as float32 and rounded once.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.cluster.network import Exchange, Ports
from ashl.cluster.sum_rounds import homes_of, rounds_of
from ashl.runtime.meeting import world
from ashl.runtime.sums import HALVES

Rows = dict[int, tuple[int, Any]]  # of a piece, by the first of the members in each sum: how many are in it, the sum
Keys = tuple[tuple[int, int], ...]  # the same without the sums


class Leg(NamedTuple):
    """What one member sends in a round, as (to, start, stop), and has sent, as (from, start, stop, what is in it)."""

    out: tuple[tuple[int, int, int], ...]
    into: tuple[tuple[int, int, int, Keys], ...]
    adds: bool


class Way(NamedTuple):
    """One member's way through a sum; `sent` and `received` are what moves then, in pieces."""

    pieces: int
    legs: tuple[Leg, ...]
    sent: int
    received: int


def folded(rows: Rows, add: Callable[[Any, Any], Any], exact: bool) -> Rows:
    """With everything added up that may be."""
    (first, (count, total)), *others = sorted(rows.items())
    apart: Rows = {}
    for key, (n, term) in others:
        if not exact or (first == 0 and key == count):
            count, total = count + n, add(total, term)
        else:
            apart[key] = (n, term)
    return {first: (count, total), **apart}


@lru_cache(maxsize=64)
def way_of(algorithm: str, homes: tuple[int, ...], place: int, exact: bool) -> Way:
    """That of the member at this place of a group whose members are on these machines."""
    pieces, rounds = rounds_of(algorithm, homes)
    held: list[list[Rows]] = [[{member: (1, None)}] * pieces for member in range(len(homes))]
    legs, sent, received = [], 0, 0
    for one in rounds:
        out, into, came = [], [], []
        for src, dst, start, stop in zip(*(ends.tolist() for ends in one[:4]), strict=True):
            keys = tuple((key, n) for key, (n, _) in held[src][start].items())
            came.append((dst, start, held[src][start:stop]))
            if src == place:
                out.append((dst, start, stop))
                sent += (stop - start) * len(keys)
            elif dst == place:
                into.append((src, start, stop, keys))
                received += (stop - start) * len(keys)
        for dst, start, parts in came:
            for piece, rows in enumerate(parts, start):
                held[dst][piece] = folded({**held[dst][piece], **rows}, lambda *_: None, exact) if one.adds else rows
        legs.append(Leg(tuple(out), tuple(into), one.adds))
    return Way(pieces, tuple(legs), sent, received)


class OwnSums(NamedTuple):
    """By which algorithm this rank's sums go, over which machines, and whether in rank order."""

    rank: int
    algorithm: str
    node: tuple[int, ...] | None
    exact: bool

    def all_reduce(
        self,
        tensor: Tensor,
        group: tuple[int, ...],
        op: str,
        nbytes: int,
        network: Exchange | Ports | None,
        tag: int,
        pg: dist.ProcessGroup | None,
    ) -> tuple[Tensor, tuple[int, int]]:
        """(a new tensor with the sum or maximum over the group, bytes sent and received): those of the model of cost
        where there is one, else as they travel. `nbytes` is what counts of the tensor, `pg` a process group of these
        ranks, where they have one of their own."""
        homes, place = homes_of(group, self.node), group.index(self.rank)
        known = network.summing.known(group, nbytes) if network is not None and network.summing else None
        exact = self.exact and op == "sum"
        way = way_of(known.algorithm if known else self.algorithm, homes, place, exact)
        x = tensor.float() if tensor.dtype in HALVES else tensor
        through = (world(), group) if pg is None else (pg, range(len(group)))
        total = carried(x, way, *through, torch.add if op == "sum" else torch.maximum, exact, place, tag)
        if known is None:
            moved = nbytes * way.sent // way.pieces, nbytes * way.received // way.pieces
        else:
            moved = known.sent[place], known.received[place]
        return total.to(tensor.dtype), moved


def carried(
    x: Tensor,
    way: Way,
    pg: dist.ProcessGroup,
    places: Sequence[int],
    add: Callable[[Any, Any], Any],
    exact: bool,
    place: int,
    tag: int,
) -> Tensor:
    """A new vector [d] with the sum of everybody's x [d]; in this process group the members have these places."""
    d = x.numel()
    length = -(-d // way.pieces)
    padded = torch.nn.functional.pad(x, (0, way.pieces * length - d))
    held: list[Rows] = [{place: (1, piece)} for piece in padded.view(way.pieces, length)]
    for out, into, adds in way.legs:
        boxes = [x.new_empty(stop - start, len(keys), length) for _, start, stop, keys in into]
        bodies = [torch.cat([row for rows in held[a:b] for _, row in rows.values()]) for _, a, b in out]
        work = [pg.recv([box], places[src], tag) for box, (src, *_) in zip(boxes, into, strict=True)]
        work += [pg.send([body], places[dst], tag) for body, (dst, *_) in zip(bodies, out, strict=True)]
        for item in work:
            item.wait()
        for box, (_, start, _, keys) in zip(boxes, into, strict=True):
            for piece, terms in enumerate(box, start):
                came = {key: (n, term) for (key, n), term in zip(keys, terms, strict=True)}
                held[piece] = folded({**held[piece], **came}, add, exact) if adds else came
    return torch.cat([row for rows in held for _, row in rows.values()])[:d]
