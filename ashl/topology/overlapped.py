"""A step whose gradient is summed in parts, while backward goes on.

Rule: message k, a slice of the gradient, is summed over all workers as soon as it is ready everywhere and message k − 1
has ended. The sum is the same to the bit as that of the gradient in one piece. What rides along goes with the last.
Where a codec works in each message by itself, see `topology.coding`.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; what each message holds is `ashl.overlap`'s to say.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ashl.runtime.effects import Tag
from ashl.runtime.sums import together
from ashl.stage.stage import Stage
from ashl.stage.team import Team
from ashl.topology.coding import Coding
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work, WorkerState


async def overlapped(team: Team, stage: Stage, state: WorkerState, version: int, word: float) -> Work:
    """One gradient and the weighted sum of everybody's as the body; `team.loss` and `team.word` are sums then."""
    node, start, tags = team.node, team.node.now, [tag for _, tag in stage.ready]
    step, span = draw(state)
    coding = Coding.of(team, stage, state, version) if stage.links else None
    compute = partial(stage.trainer.gradient_in_parts, state.params, node.rank, step, span, stage.slices)
    others = node.spawn(exchanged(replace(team, carried=True), coding, tags[:-1])) if tags[:-1] else None
    encoding = None if coding is None else coding.encoding
    loss = await node.compute(compute, work=state.batch, parts=stage.ready, encoding=encoding)
    step_s = node.now - start
    came = [] if others is None else await node.join(others)
    team.begin((loss if coding is None or coding.ended() else math.nan) / team.size, word)
    came += await exchanged(team, coding, tags[-1:])
    update = together(came[::-1]) if coding is None else await coding.decoded(came)
    return Work(update, loss, 1, state.batch, step_s, state.version)


async def exchanged(team: Team, coding: Coding | None, tags: Sequence[Tag]) -> list[Any]:
    """What came of these messages, each exchanged once this rank has it."""
    came = []
    for tag in tags:
        body = (await team.node.recv(tag)).body
        summed = team.all_reduce(body, team.weight) if coding is None else coding.exchanged(team, tag[2], body)
        came.append(await summed)
    return came
