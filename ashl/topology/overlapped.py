"""A step whose gradient is summed in parts, while backward goes on.

Rule: message k, a slice of the gradient, is summed over all workers as soon as it is ready everywhere and message k − 1
has ended. The sum is the same to the bit as that of the gradient in one piece. What rides along goes with the last.

Source: Zhang et al., "Poseidon", USENIX ATC 2017; what each message holds is `ashl.overlap`'s to say.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage
from ashl.stage.team import Team
from ashl.topology.estimate import draw
from ashl.topology.local_work import Work, WorkerState


async def overlapped(team: Team, stage: Stage, state: WorkerState, word: float) -> Work:
    """One gradient and the weighted sum of everybody's as the body; `team.loss` and `team.word` are sums then."""
    node, messages, start = team.node, stage.messages, team.node.now
    tags = [stage.tag("part", k) for k in range(len(messages))]
    step, span = draw(state)
    slices = [(message.start, message.stop) for message in messages]
    compute = partial(stage.trainer.gradient_in_parts, state.params, node.rank, step, span, slices)
    others = node.spawn(summed(team, tags[:-1])) if tags[:-1] else None
    ready = tuple((message.ready, tag) for message, tag in zip(messages, tags, strict=True))
    loss = await node.compute(compute, work=state.batch, parts=ready)
    step_s = node.now - start
    sums = [] if others is None else await node.join(others)
    last = await node.recv(tags[-1])
    team.begin(loss / team.size, word)
    sums.append(await team.all_reduce(last.body, team.weight))
    return Work(together(sums), loss, 1, state.batch, step_s, state.version)


async def summed(team: Team, tags: list[Any]) -> list[Any]:
    """The sums of these parts, each posted once this rank has it."""
    sums = []
    for tag in tags:
        part = await team.node.recv(tag)
        sums.append(await team.node.all_reduce(part.body * team.weight, team.ranks))
    return sums


def together(sums: list[Any]) -> Any:
    """The flat vector of its slices, the last one first."""
    if isinstance(sums[0], SizeOnly):
        return SizeOnly(sum(part.nbytes for part in sums))
    return torch.cat(sums[::-1])
