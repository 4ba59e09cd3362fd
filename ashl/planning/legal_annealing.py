"""What is annealed during a run, refused where nothing can be: the server's step, and H by gradient noise."""

from collections.abc import Sequence
from itertools import pairwise

from ashl.errors import UsageError
from ashl.plan.plan import StagePlan
from ashl.planner.goodput import Goodput
from ashl.planning.build import Parts, StageParts
from ashl.planning.legal import chosen
from ashl.topology.halos import Halos
from ashl.topology.parameter_server import UPDATES, ServerRule


def check_annealing(parts: Parts, stages: Sequence[StagePlan]) -> None:
    """Raises UsageError, with what to take instead."""
    for (before, stage), own in zip(pairwise(stages), parts.stages[1:], strict=True):
        if stage.aggregate["scale"] != before.aggregate["scale"] and own.sync.exchange != "difference":
            raise UsageError(
                f"the server's step is another one in stage {stage.name}, and sync={chosen(own.sync)} has none: it "
                "merges gradients, on which the optimizer steps; take a mode that merges updates, as sync=local_sgd "
                "sync.local_steps=1, or let the rate fall with optimizer.schedule=cosine"
            )
    if isinstance(parts.planner, Goodput):
        for stage, own in zip(stages, parts.stages, strict=True):
            if stage.h_preset is not None and (why := unseen(own, parts)):
                raise UsageError(
                    f"planner=goodput weighs whole updates against each other, and in stage {stage.name} {why}; take "
                    "planner=online"
                )


def unseen(own: StageParts, parts: Parts) -> str | None:
    """Why no server sees whole updates one by one, where none does."""
    if not parts.runtime.gradients:
        return "there are none (runtime.gradients=false)"
    if not own.topology.has_server or isinstance(own.topology, Halos):
        return f"topology={chosen(own.topology)} has no server that sees them"
    if own.compression.flags.reduces:
        return f"compression={chosen(own.compression)} makes them only of all bodies together"
    if own.overlap.fragments:
        return f"overlap={chosen(own.overlap)} brings a fragment at a time"
    plain = isinstance(own.sync, ServerRule) and own.sync.messages() is UPDATES and not own.sync.momentum_travels
    if not plain or own.sync.exchange != "difference":
        return f"sync={chosen(own.sync)} pushes something else"
    return None
