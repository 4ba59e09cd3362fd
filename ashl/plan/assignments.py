"""The members of a stage and their work, as data. `ashl.stage.members` has the functions that make
them.
"""

from dataclasses import dataclass

from ashl.plan.plan import WorkerPlan


@dataclass(frozen=True, eq=False)
class Assignments:
    """The work of all workers in a round, and the weights that follow from it."""

    workers: tuple[WorkerPlan, ...]  # by rank
    steps: tuple[int, ...]  # by rank: steps between two merges
    samples: tuple[int, ...]  # by rank: samples in these steps
    total_steps: int  # sum over all members
    total_samples: int  # sum over all members
    weights: tuple[float, ...]  # by rank: scale · w_i, 0 for a failed worker


@dataclass(frozen=True, eq=False)
class Members:
    """The workers that take part in a stage: all of them, or the survivors of an epoch."""

    ranks: tuple[int, ...]  # sorted
    lead_rank: int  # the rank that counts progress, decides when the run ends, and emits snapshots
    planned: Assignments  # their work as planned at the start of the stage
