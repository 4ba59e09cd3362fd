"""Steps by which the members of a new epoch come together, shared by topologies without a
coordinator (`Topology.reform`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ashl.compression.contract import Collective
from ashl.errors import AshlError
from ashl.runtime.effects import Epoch, Tag
from ashl.runtime.plain_state import join_tensors, split_tensors
from ashl.runtime.rank_context import RankContext
from ashl.stage.contract import StageConfig
from ashl.stage.progress import FAILURE, Progress
from ashl.topology.local_work import keeps_work

NO_MODEL = -1  # version of a joining worker, which has no model yet
# a rank's part of the round that it continues with: it computes its work, or has computed it, or
# takes part without work
COMPUTES, KEEPS, IDLES = range(3)


class Standing(NamedTuple):
    """Progress of the members before they continue."""

    stage: int  # index of the stage in which all members continue
    version: int  # model version with which all members continue
    donor: int  # the lowest rank with that state, or a newer one
    outdated: tuple[int, ...]  # members with an older state, or none
    joined: tuple[int, ...]  # members without a model
    # members without work in the round that continues, if some other member keeps its work
    idle: tuple[int, ...]


def admits_idle(stage: StageConfig) -> bool:
    """Return True if a member with weight 0 changes no sum; protocols of codecs have no weights."""
    return keeps_work(stage) and not isinstance(stage.pipeline.inner_codec, Collective)


def part_in_round(stages: Sequence[StageConfig], saved: tuple[int, Any] | None) -> int:
    """Return the part of a rank in the round of a safe point: COMPUTES, KEEPS or IDLES."""
    if saved is None or saved[0] >= len(stages) or not admits_idle(stages[saved[0]]):
        return COMPUTES
    if saved[1].pending is None:
        return COMPUTES if saved[1].begun is None else KEEPS
    return KEEPS if saved[1].pending.steps else IDLES


async def compare_members(
    ctx: RankContext,
    stages: Sequence[StageConfig],
    epoch: Epoch,
    index: int,
    version: int,
    goes_back: bool = False,
) -> Standing:
    """Compare how far the members are. They exchange numbers, which take no bytes.

    Args: index: of this rank's stage; version: of its model, or NO_MODEL; goes_back: True if a
    member that is one round ahead of others goes back by that round.
    Raises: AshlError if no member has a model.
    """
    points = ctx.restart_point, ctx.before_restart_point
    parts = [part_in_round(stages, point) for point in points]
    own = torch.tensor((index, version, *parts)).view(torch.uint8)
    gathered = await ctx.all_gather(own, epoch.workers, piggybacked=own.numel())
    numbers = [tuple(part.clone().view(torch.int64).tolist()) for part in gathered]
    places = [own[:2] for own in numbers]
    newest = max(places, key=lambda place: (place[1] != NO_MODEL, place))
    if newest[1] == NO_MODEL:
        raise AshlError(
            f"0 of {stages[0].num_workers} workers remain that have the model: the run ends here"
        )
    by_rank = dict(zip(epoch.workers, places, strict=True))
    same_stage = [place[1] for place in places if place[0] == newest[0] and place[1] != NO_MODEL]
    if goes_back and newest[1] == min(same_stage) + 1:
        newest = newest[0], min(same_stage)
    ready = [rank for rank, place in by_rank.items() if place[1] != NO_MODEL and place >= newest]
    # a member that goes back continues with its part of the round before
    part_of = {
        rank: now if by_rank[rank] == newest else before
        for rank, (_, _, now, before) in zip(epoch.workers, numbers, strict=True)
        if rank in ready
    }
    joined = tuple(rank for rank, place in by_rank.items() if place[1] == NO_MODEL)
    idle = {*joined, *(rank for rank, part in part_of.items() if part == IDLES)}
    return Standing(
        stage=newest[0],
        version=newest[1],
        donor=ready[0],
        outdated=tuple(rank for rank in epoch.workers if rank not in ready),
        joined=joined,
        idle=tuple(sorted(idle)) if KEEPS in part_of.values() else (),
    )


def state_tag(epoch: Epoch, k: int) -> Tag:
    """Return the tag of the k-th message to a member that is behind: the model comes first."""
    return "state", k, epoch.number


async def send_state(ctx: RankContext, rank: int, epoch: Epoch, model: Any, known: Any) -> None:
    """Send a model, or None, and the state in `known` to a member that is behind."""
    parts = split_tensors(known)
    for k, payload in enumerate((model, *parts)):
        await ctx.send(rank, state_tag(epoch, k), payload, (len(parts),))


async def receive_state(
    ctx: RankContext, stage: StageConfig, donor: int, epoch: Epoch
) -> tuple[Any, Any]:
    """Return (model, state) from the donor, see `send_state`."""
    first = await ctx.recv(state_tag(epoch, 0), src=donor)
    parts = [
        (await ctx.recv(state_tag(epoch, k), src=donor)).payload
        for k in range(1, 1 + int(first.meta[0]))
    ]
    packages = "ashl", type(stage.outer).__module__.partition(".")[0]
    return first.payload, join_tensors(parts, packages, stage.trainer.device)


def with_members(
    progress: Progress, epoch: Epoch, joined: Sequence[int], steps: Sequence[int]
) -> Progress:
    """Return the progress with the members of an epoch.

    Steps of the round in progress count as dropped if a worker fails that was a member when the
    round began, once. So the counts are equal on members that have seen all epochs in this round
    and on those that have not.
    Args: steps: of the round in progress, by worker.
    """
    progress = progress.copy()
    failed = {*range(progress.num_workers)}.difference(epoch.workers)
    for rank in sorted((failed | {*joined}) - progress.failed):
        progress.remove_worker(rank)
        if progress.changed_at[rank] <= progress.version:
            progress.count_dropped(rank, steps[rank], FAILURE)
            progress.changed_at[rank] = progress.version + 1
    for rank in sorted(progress.failed - failed):
        progress.join(rank)
        progress.changed_at[rank] = progress.version + 1
    return progress
