"""Who takes part in which round of gossip in rounds, where workers may be lost and come back.

A view says who takes part from its first round on. All members of one make the next one together
(`ashl.topology.views`), before anybody begins a round of it; so everybody has the same views one after the other, and
knows of each round who is in it.

Of each worker its lives are counted: 2·l while it is in its life l (or asks to be let in), 2·l + 1 once that is over.
These numbers only grow, so that it does not matter in which order, and how often, something is heard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ashl.runtime.effects import Tag
from ashl.runtime.node import Node
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally

if TYPE_CHECKING:
    from ashl.topology.gossip import RoundRule, RoundState

Lives = dict[int, int]


class View(NamedTuple):
    """Who takes no part from a round on; of how many rounds of those who end there the others have heard."""

    first: int
    gone: frozenset[int]
    rounds: dict[int, int]
    known: Lives  # as of which all have agreed on it
    came: dict[int, int]  # who begins with it, and from whom it has its model

    @property
    def returns(self) -> bool:
        """Whether anybody has come (back) by then."""
        return bool(self.came) or self.known != dict.fromkeys(self.gone, 1)


ALL_THERE = View(0, frozenset(), {}, {}, {})


def last_view(state: RoundState) -> View:
    return state.views[-1] if state.views else ALL_THERE


def gone_in(state: RoundState) -> frozenset[int]:
    """Who takes no part by the last view."""
    return last_view(state).gone


def carried_over(views: Sequence[View], joins: bool) -> tuple[View, ...]:
    """Where another stage begins: those of the last view are in it from the first round on. Where workers may come, a
    view keeps its number, by which they know of two the later one."""
    if not views:
        return ()
    return (ALL_THERE,) * (joins * (len(views) - 1)) + (views[-1]._replace(first=0, rounds={}, came={}),)


def note(known: Lives, heard: Mapping[int, int]) -> None:
    """Take in what is heard of workers' lives."""
    for rank, life in heard.items():
        if life > known.get(rank, 0):
            known[rank] = life


def staying(view: View, known: Lives, num_workers: int) -> list[int]:
    """The members of a view that are not known to be lost since: those who make the next one."""
    there = (rank for rank in range(num_workers) if rank not in view.gone)
    return [rank for rank in there if known.get(rank, 0) == view.known.get(rank, 0)]


def asking(view: View, known: Lives, num_workers: int) -> list[int]:
    """Who is there, is no member, and asks to be."""
    there = (rank for rank in range(num_workers) if known.get(rank, 0) % 2 == 0)
    return [rank for rank in there if rank in view.gone or known.get(rank, 0) > view.known.get(rank, 0)]


def start_of(views: Sequence[View], rank: int) -> int:
    """The first round of this stage of a member's present life."""
    return next((view.first for view in reversed(views) if rank in view.came), 0)


def rounds_of(state: RoundState, rank: int, k: int) -> float:
    """How many rounds count of the life in which a worker is, or was, in round k."""
    return next((v.rounds[rank] for v in state.views if rank in v.rounds and k < v.first), math.inf)


def round_tag(stage: Stage, state: RoundState, rank: int, k: int) -> Tag:
    """The tag of what a worker says in round k, of the life in which it is there: what an earlier one had sent ahead
    may lie there still."""
    if not state.views:
        return stage.tag("gossip", k)
    life = next((view.known.get(rank, 0) // 2 for view in reversed(state.views) if view.first <= k), 0)
    return stage.tag(f"gossip{life or ''}", k)


def turned(node: Node, stage: Stage, state: RoundState, k: int) -> Stage:
    """The stage as it is in round k, with the counts of those who have been lost or have come for it."""
    tally, rule = state.tally, cast("RoundRule", stage.sync)
    while state.turned < len(state.views) and state.views[state.turned].first <= k:
        view, here = state.views[state.turned], stage.among(state.views[state.turned].gone)
        assert isinstance(tally, Tally)
        for rank in sorted(view.rounds):
            start = start_of(state.views[: state.turned], rank)
            take_back(stage, state, rank, view.first - max(start, view.rounds[rank] - rule.early))
            tally.lose(rank)
        for rank in sorted(view.came):
            tally.come(rank)
        state.turned += 1
        state.steps, state.samples = tally.steps, tally.samples
        state.rule_state = rule.changed(here, state, node.rank)
        state.plan_round(here, node.rank)
        counts: Any = state
        node.counter = counts if node.rank == here.home else None
    return stage.among(state.views[state.turned - 1].gone if state.turned else ())


def count(stage: Stage, state: RoundState) -> None:
    """All workers have merged once more."""
    tally = state.tally
    if isinstance(tally, Tally):
        tally.observe_all(cast("RoundRule", stage.sync).lag, state.header.loss, "the workers' loss", commits=1)
        tally.commit_all(stage.round_steps, stage.round_totals[1])
        tally.merge()
    else:
        tally.advance(*stage.round_totals, stage.num_workers)
        tally.version += 1
    state.version, state.steps, state.samples = tally.version, tally.steps, tally.samples


def take_back(stage: Stage, state: RoundState, rank: int, rounds: int) -> None:
    """So many of the rounds that were counted of a worker are part of no model that is left."""
    steps, samples, tally = stage.round_steps[rank], stage.round_samples[rank], state.tally
    assert isinstance(tally, Tally)
    before = tally.commits[rank]
    tally.take_back(rank, rounds, rounds * steps, rounds * samples)
    if state.in_time is not None:
        late = before - state.in_time.tally.commits[rank]  # rounds that do not count anyway
        rounds = max(0, rounds - late)
        state.in_time.tally.take_back(rank, rounds, rounds * steps, rounds * samples)
