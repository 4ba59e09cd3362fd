"""What sums over groups of workers cost, and gathering bytes, by the rounds that they make.

Rule: some rounds in a row of a step and a sum that is merged, as an all-reduce does, by as many groups at once as there
are. A sum costs by how much a round is longer than the longest step in it. Members come to it one after the other: what
who has come waits for the last one, beyond what their steps differ by, is a part of that, and so is the time in which
it keeps a core busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch

from ashl.plan.full import Sum
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.stage.team import Team
from ashl.sync.timing.exchanges import a_step, answers, blank, close_round, instruct, sizes_of, time_sum
from ashl.sync.timing.fits import cost_with_least
from ashl.topology.local_work import WorkerState

SUMS, GATHER = -9, -10  # orders, with bytes, by how many, and perhaps between steps
SUMS_S = 8.0  # in all
ROUNDS = 3, 30  # of sums of every size, at least and at most
IN_A_ROW = 8
SHORT_S = 0.05  # of a step, at most, for it to come between sums: beside a longer one a pause costs nothing
TEAMS = 7  # sizes of groups that sum, at most


async def time_sums(
    node: Node, stage: Stage, state: WorkerState, nbytes: int, group: int, *, gather: bool, steps: bool
) -> list[float]:
    """(seconds of a core for a sum and a step before it; then of each round when its step began here, when its sum did,
    and when that ended): in a row, after a first one at which all meet."""
    batch, first = stage.worker(node.rank).batch, node.rank // group * group
    team, tally = Team(node, stage, stage.workers[first : first + group], [1 / group] * group), Tally(stage.num_workers)
    await time_sum(node, stage, nbytes, group, gather=gather)
    used, found = node.used, list[float]()
    for k in range(IN_A_ROW):
        found.append(node.now)
        if steps:
            await node.compute(partial(a_step, node, stage, state, k, batch), work=batch)
        found.append(node.now)
        _, tally = await merged(team, blank(stage, nbytes), tally, gather=gather)
        found.append(node.now)
        if steps:
            close_round(node, stage, state)
    return [(node.used - used) / IN_A_ROW, *found]


async def merged(team: Team, body: Any, tally: Tally, *, gather: bool) -> tuple[Any, Tally]:
    """(a model with the sum of everybody's body, or after what was gathered, and the counts with it)."""
    stage, model = team.stage, body
    team.begin(0.0, 0)
    if gather:
        await team.all_gather(body if isinstance(body, SizeOnly) else body.view(torch.uint8))
        model = update = blank(stage, stage.trainer.dense_bytes)
    else:
        update = await team.all_reduce(body, team.weight)
    return model + update, stage.counted(tally, team.loss)


async def all_sums(node: Node, stage: Stage, steps_s: Sequence[float]) -> tuple[Sum, ...]:
    """Of groups of workers, by size."""
    n = stage.num_workers
    groups = range(2, n + 1) if n <= TEAMS + 1 else sorted({*(2**k for k in range(1, TEAMS) if 2**k < n), n})
    return tuple([await summed(node, stage, SUMS, group, SUMS_S / len(groups), steps_s) for group in groups])


async def summed(node: Node, stage: Stage, what: int, group: int, budget_s: float, steps_s: Sequence[float]) -> Sum:
    """What it costs each of as many groups as there are at once, or to gather the bytes of all together: by how much a
    round is longer than the longest step in it, as who has the sum first may have to wait for a core, or for others, in
    the next one. And in which share of that it keeps a core busy at each, beyond what a step before it costs, and in
    which who has come to it waits for the last."""
    times, took_s, used_s, waited_s, end_s = dict[int, list[float]](), 0.0, 0.0, 0.0, node.now + budget_s
    teams = [stage.workers[first : first + group] for first in range(0, stage.num_workers - group + 1, group)]
    members, short = stage.workers[: group * len(teams)], max(steps_s) < SHORT_S
    for k in range(ROUNDS[1]):
        if k >= ROUNDS[0] and node.now >= end_s:
            break
        for nbytes in sizes_of(stage)[1:]:
            await instruct(node, stage, members, what, nbytes, group, short)
            found = await answers(node, stage, members)
            rows = [beyond_steps([found[rank][1:] for rank in team]) for team in teams]
            taken_s, apart_s = map(fmean, zip(*rows, strict=True))
            times.setdefault(nbytes * (group if what == GATHER else 1), []).append(taken_s)
            took_s, waited_s = took_s + taken_s, waited_s + apart_s
            used_s += fmean(max(0.0, row[0] - short * steps_s[rank]) for rank, row in found.items())
    busy, waited = (min(1.0, part_s / took_s) if took_s else 0.0 for part_s in (used_s, waited_s))
    return Sum(group=group, cost=cost_with_least(times), busy=busy, waited=waited)


def beyond_steps(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds by which a round of a team is longer than the longest step in it, and those of them in which members wait
    for the last one, where they found this."""
    rounds_s = fmean(row[-1] - row[0] for row in rows)
    steps_s = [[come - before for before, come in zip(row[::3], row[1::3], strict=True)] for row in rows]
    longest_s = math.fsum(map(max, zip(*steps_s, strict=True)))
    last_s = math.fsum(map(max, zip(*(row[1::3] for row in rows), strict=True)))
    waited_s = last_s - fmean(math.fsum(row[1::3]) for row in rows)
    beyond_s, apart_s = rounds_s - longest_s, waited_s - (longest_s - fmean(map(math.fsum, steps_s)))
    return max(0.0, beyond_s) / IN_A_ROW, min(max(0.0, apart_s), max(0.0, beyond_s)) / IN_A_ROW
