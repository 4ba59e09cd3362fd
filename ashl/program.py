"""One rank's way through a plan: the stages in order, its state carried across. The same on both kernels."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence

from torch import Tensor

from ashl.planner.assignment import assignment_of
from ashl.runtime.node import Node
from ashl.stage import STOP, Stage


async def program(node: Node, stages: Sequence[Stage]) -> None:
    """Play this rank's role in every stage, until one ends the run."""
    first = stages[0]
    state = first.topology.begin(first, node.rank)
    if node.rank == first.home:
        node.counter = state.clock
    for index in range(len(stages)):
        stage = stages[index]
        if await role(stage, node.rank)(node, stage, state) == STOP:
            break
        if state.assigned is not None:
            stages, state.assigned = reassigned(stages, index + 1, state.assigned), None
    if node.rank == first.home:
        clock = state.clock
        node.snapshot(state.params, final=True, time_ns=clock.end_ns, **clock.report())


def role(stage: Stage, rank: int) -> Callable[..., Coroutine]:
    """The loop of this rank: the topology's, unless the sync mode has one of its own."""
    owner = stage.sync if hasattr(stage.sync, "role") else stage.topology
    return owner.role(stage, rank)


def reassigned(stages: Sequence[Stage], first: int, assigned: Tensor) -> list[Stage]:
    """The stages from `first` on with what a profiling stage has planned for their workers."""
    rows = assigned.view(len(stages) - first, stages[0].num_workers, 4).tolist()
    after = [stage.assigned([assignment_of(row) for row in r]) for stage, r in zip(stages[first:], rows, strict=True)]
    return [*stages[:first], *after]
