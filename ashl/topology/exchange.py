"""How the workers of an all-reduce come to the weighted sum of what they have, with and without compression.

Rule: everybody ends with Σ_j c_j·C(x_j), the same to the bit on all. A codec without loss, or one that is linear, is
summed on its way: 2(n − 1)/n of a body each way. The bodies of any other are gathered, (n − 1) each way, all padded to
the length of the longest, and every worker decodes and sums all of them in rank order: it grows with n, and beats a
dense sum while a body is shorter than 2/n of the vector. A `Collective` codec has a protocol of its own.

What rides along is the team's, see `ashl.stage.team`.

Source: gathering as in Alistarh et al., "QSGD", NeurIPS 2017.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from ashl.compression.contract import Collective, Turn
from ashl.size_only import SizeOnly, Vector
from ashl.stage.link import Body
from ashl.stage.stage import Stage
from ashl.stage.team import Team, TeamBrokenError
from ashl.topology.local_work import WorkerState, not_finite, report_health, reports_mean, turn_of

if TYPE_CHECKING:
    from ashl.topology.all_reduce import PeerState


async def exchanged(team: Team, stage: Stage, state: PeerState, tick: int, x: Vector) -> Vector:
    """Σ c·C(x), or Σ c·x where the rule says so, at the merge of this number; `team.loss` and `team.word` are sums
    then. Of an update that is not finite nothing is made: the mean loss says so."""
    node = team.node
    if stage.link.flags.lossless or stage.sync.sums_whole(stage, state.tally):
        return await team.all_reduce(x, team.weight)
    if not isinstance(x, SizeOnly) and not_finite(node, stage, state, x):
        x, team.loss = torch.zeros_like(x), math.nan
    looks = reports_mean(stage, tick) and not isinstance(x, SizeOnly)
    if looks:
        node.show_update(x, of=node.rank, tick=tick, weight=team.weight)
    update = await compressed(team, stage, state, tick, x)
    if looks and node.rank == stage.home:
        node.show_update(update, of=None, tick=tick)
    return update


async def compressed(team: Team, stage: Stage, state: WorkerState, tick: int, x: Vector) -> Vector:
    """The same by the codec's own way."""
    link, turn = stage.link, turn_of(stage, team.node.rank, state, tick)
    if isinstance(link.innermost, Collective):
        return await by_protocol(team, stage, state, link.innermost, x, turn)
    if link.flags.linear:  # what adds up is alike in shape
        x, turn = x * team.weight, turn._replace(ratio=least_ratio(stage), weight=team.weight)
    body = await team.compute(partial(link.encode, state.ends, x, turn), work=1)
    report_health(team.node, stage, state, x, [(link, state.ends, body)])
    if link.flags.linear:
        total = await team.all_reduce(link.summand(body, turn))
        return await team.decode(partial(link.summed, state.ends, body, total), 1)
    return await gathered(team, stage, state, x, body)


async def by_protocol(team: Team, stage: Stage, state: WorkerState, codec: Collective, x: Vector, turn: Turn) -> Vector:
    """What a protocol over all workers comes to. Raises TeamBrokenError where a worker is lost."""
    link = stage.link
    try:
        if isinstance(x, SizeOnly):
            await codec.timed(team, link.codec.share(turn), link.d)
            await team.together()
            return x
        outcome = await codec.collective(team, link.before(state.ends, x, turn))
        await team.together()
    except TeamBrokenError:
        await team.give_up(codec.peers(team.place, team.size))
        raise
    return await team.compute(partial(link.after, state.ends, x, turn, outcome))


async def gathered(team: Team, stage: Stage, state: WorkerState, x: Vector, body: Body) -> Vector:
    """Everybody's bodies, decoded and summed by everybody alike."""
    bodies = await team.all_gather(body)
    if isinstance(x, SizeOnly):
        return await team.decode(lambda: x, team.size)
    if team.lost:
        return torch.zeros_like(x)
    return await team.decode(partial(stage.link.merge, state.ends, bodies, team.weights, team.ranks), team.size)


def least_ratio(stage: Stage) -> float:
    """The kept share that all workers of a sum agree on."""
    return min(worker.compression_ratio for worker in stage.plan.workers)
