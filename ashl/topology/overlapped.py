"""A step whose gradient is summed in parts, while backward goes on.

Rule: message k, a slice of the gradient, is summed over all workers as soon as it is ready everywhere and message k − 1
has ended. The sum is the same to the bit as that of the gradient in one piece. What rides along goes with the last.
Where a codec works in each message by itself, see `topology.coding`.

Where a sum of one message comes to nothing, as a worker is lost, backward goes on to its end, no later message is sent,
and nothing of the round is merged. Those who are left do it once more with the gradients that they have, message by
message (`ashl.topology.regrouping`).

Source: Zhang et al., "Poseidon", USENIX ATC 2017; what each message holds is `ashl.overlap`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ashl.runtime.effects import Tag
from ashl.runtime.sums import together
from ashl.stage.stage import Stage
from ashl.stage.team import Team, TeamBrokenError
from ashl.topology.coding import Coding
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work
from ashl.topology.regrouping import keep

if TYPE_CHECKING:
    from ashl.topology.all_reduce import PeerState

Bodies = list[Any]  # of messages, in the order in which they go


async def overlapped(team: Team, stage: Stage, state: PeerState, version: int, word: float) -> tuple[Work, Any]:
    """(one gradient, the weighted sum of everybody's); `team.loss` and `team.word` are sums then. Raises
    TeamBrokenError once the gradient is there."""
    coding = Coding.of(team, stage, state, version) if stage.links else None
    others = replace(team, carried=True)
    if state.redo is None:
        work, bodies, came = await computed(others, coding, stage, state)
    else:
        work = state.redo
        bodies = work.body if coding is None else await team.compute(partial(coding.encoded, work.body), work=1)
        came = await exchanged(others, coding, bodies[:-1])
    if stage.elastic:
        keep(state, work)
    if len(came) < len(bodies) - 1:
        raise TeamBrokenError
    team.begin((work.loss if coding is None or coding.ended() else math.nan) / team.size, word)
    came.append(await summed(team, coding, len(came), bodies[-1]))
    return work, together(came[::-1]) if coding is None else await coding.decoded(came)


async def computed(team: Team, coding: Coding | None, stage: Stage, state: PeerState) -> tuple[Work, Bodies, list[Any]]:
    """(the gradient in parts, what is sent of each, what has come of all but the last), which have been exchanged
    meanwhile, as long as nobody was lost."""
    node, start, tags = team.node, team.node.now, [tag for _, tag in stage.ready]
    step, span = draw(state)
    compute = partial(stage.trainer.gradient_in_parts, state.params, node.rank, step, span, stage.slices)
    others = node.spawn(as_ready(team, coding, tags[:-1])) if tags[:-1] else None
    encoding = None if coding is None else coding.encoding
    loss = await node.compute(compute, work=state.batch, parts=stage.ready, encoding=encoding)
    step_s = node.now - start
    bodies, came = (Bodies(), []) if others is None else await node.join(others)
    bodies.append((await node.recv(tags[-1], src=node.rank)).body)
    parts = bodies if coding is None else [coding.vectors[k] for k in range(len(tags))]
    return Work(parts, loss, 1, state.batch, step_s, state.version), bodies, came


async def as_ready(team: Team, coding: Coding | None, tags: Sequence[Tag]) -> tuple[Bodies, list[Any]]:
    """(these messages, what came of them): each is exchanged once this rank has it, up to one that comes to nothing."""
    bodies, came = Bodies(), list[Any]()
    for k, tag in enumerate(tags):
        bodies.append((await team.node.recv(tag, src=team.node.rank)).body)
        if len(came) == k:
            came += await exchanged(team, coding, bodies[k:], k)
    return bodies, came


async def exchanged(team: Team, coding: Coding | None, bodies: Bodies, first: int = 0) -> list[Any]:
    """What came of these messages, one after the other, up to the one that comes to nothing."""
    came = list[Any]()
    for k, body in enumerate(bodies, first):
        try:
            came.append(await summed(team, coding, k, body))
        except TeamBrokenError:
            break
    return came


async def summed(team: Team, coding: Coding | None, k: int, body: Any) -> Any:
    return await (team.all_reduce(body, team.weight) if coding is None else coding.exchanged(team, k, body))
