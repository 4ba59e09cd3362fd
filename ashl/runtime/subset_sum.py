"""Sums over some of the ranks without a process group of their own: straight between the members, by tagged messages.

To make a process group takes all ranks, and on demand it hangs where members have made a different number of groups
before. Here member j gets chunk j of everybody's vector, sums it in rank order and gives the sum to the others: that
moves 2(g − 1)/g of the vector each way, as a ring does, and gives the same bits as any other sum in rank order. A team
has one sum at a time, and its messages are marked with a number of its own, so that a link may serve several teams.

A lost member breaks only the links to it, and nobody would know for how long to wait for a message of one that lacks
something and has stopped. So all who are there send all that they can; in place of a sum that lacks a term goes what
no arithmetic makes, and whoever gets that knows.

Who has come anew is reached by the group of two that each peer has with it. So nothing of an earlier life comes into a
sum, and a sum that is of an earlier life lacks a term.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ashl.runtime.rendezvous import world
from ashl.runtime.sums import sum_in_rank_order

MEET, CHUNKS, SUMS = range(3)  # planes of a team
MISSING = 255  # all bytes of a sum that lacks a term: a NaN, but not the one that arithmetic makes
FIRST, TEAMS = 16, 2**29  # tags below are the transport's; gloo's end at 2^31

Ways = Mapping[int, tuple[dist.ProcessGroup, int]]  # to ranks that came later, or from one: a group, the place there


def greatest(
    numbers: Tensor, group: tuple[int, ...], rank: int, team: int, ways: Ways, lost: Collection[int] = ()
) -> Tensor:
    """The maximum over the group of a few numbers, each by itself; returns once all members have come. `team` marks the
    group's messages. Raises RuntimeError where one is lost, as those are that are known to be."""
    g, me = len(group), group.index(rank)
    from_all = [numbers if i == me else torch.empty_like(numbers) for i in range(g)]
    if error := _swap([numbers] * g, from_all, group, rank, tag(team, MEET), ways, lost):
        raise error
    return torch.stack(from_all).amax(0)


def all_reduce(
    tensor: Tensor, group: tuple[int, ...], rank: int, team: int, ways: Ways, lost: Collection[int] = ()
) -> Tensor:
    """A new vector [d] with the sum over the group, of which `rank` is a member. `team` marks the group's messages.
    Raises RuntimeError where a member is lost, as those are that are known to be."""
    g, me = len(group), group.index(rank)
    if g == 2:  # as many bytes in one hop
        both = [tensor if i == me else torch.empty_like(tensor) for i in range(2)]
        if error := _swap([tensor, tensor], both, group, rank, tag(team, CHUNKS), ways, lost):
            raise error
        return sum_in_rank_order(both)
    d = tensor.numel()
    padded = torch.nn.functional.pad(tensor, (0, -d % g))
    mine = list(padded.chunk(g))
    parts = [mine[me] if i == me else torch.empty_like(mine[me]) for i in range(g)]
    error = _swap(mine, parts, group, rank, tag(team, CHUNKS), ways, lost)
    total = torch.empty_like(padded)
    sums = list(total.chunk(g))
    if error is None:
        sums[me].copy_(sum_in_rank_order(parts))
    else:
        sums[me].view(torch.uint8).fill_(MISSING)
    error = _swap([sums[me]] * g, sums, group, rank, tag(team, SUMS), ways, lost) or error
    firsts = total[:: len(mine[0])]
    if firsts.isnan().any() and any((first.view(1).view(torch.uint8) == MISSING).all() for first in firsts):
        error = error or RuntimeError("a member of the team is not connected to another")
    if error is not None:
        raise error
    return total[:d]


def tag(team: int, plane: int) -> int:
    return FIRST + 3 * (team % TEAMS) + plane


def _swap(
    out: Sequence[Tensor],
    into: Sequence[Tensor],
    group: tuple[int, ...],
    rank: int,
    tag: int,
    ways: Ways,
    lost: Collection[int],
) -> RuntimeError | None:
    """To the i-th member `out[i]`, from it `into[i]`; returns why that was not done with one of them, if it was not."""
    peers = [(i, *(ways.get(peer) or (world(), peer))) for i, peer in enumerate(group) if peer not in (rank, *lost)]
    work, errors = [], [RuntimeError(f"rank {peer} has failed") for peer in group if peer in lost]
    for sends, boxes in ((False, into), (True, out)):
        for i, pg, place in peers:
            try:
                work.append((pg.send if sends else pg.recv)([boxes[i]], place, tag))
            except RuntimeError as error:
                errors.append(error)
    for item in work:
        try:
            item.wait()
        except RuntimeError as error:
            errors.append(error)
    return errors[0] if errors else None
