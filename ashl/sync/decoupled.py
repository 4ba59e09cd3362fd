"""Decoupled DiLoCo: a merge waits for a quorum of learners and a moment longer, and for nobody
else.

Rule: a learner pushes what H local steps made of the model, and waits for the merge that its push
is in. Once K = `min_learners` have pushed, the server takes in what comes within `grace_s` seconds
more, or until all have pushed; then one outer step on Σ w_i·Δ_i, Σ w_i = 1 over those who are in
it: by samples, and so by tokens, with `aggregate=mean`. Who comes later is in the next merge, on
whatever model it was computed. Where fewer than K are there, all of them are waited for. With
`overlap=delayed` a learner computes on while it waits. The paper has `outer=nesterov`.

Limits: K = n is `local_sgd` with this outer optimizer, DiLoCo through a server, bit for bit where a
run ends with a whole round; K = 1 without grace merges each push as it comes, and what has come at
that moment with it.
Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv
2604.21428, 2026, by its abstract and descriptions of its rule. There the model travels in fragments
and the window adapts, in a way that could not be read; here the model is one piece and the window
constant. Its weights, tokens times tokens per step, are those by tokens where batches are equal.
"""

import math
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import Count, Duration, option
from ashl.stage.progress import Progress
from ashl.stage.stage import Stage
from ashl.topology.parameter_server import ServerRule


class Gathered(NamedTuple):
    """Who has pushed for the merge after this version, and when they were enough for it."""

    version: int
    learners: tuple[int, ...] = ()
    enough_s: float | None = None


@option
class Decoupled(ServerRule):
    """A quorum, a grace window, and then a merge."""

    averages: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True
    local_steps: Count | Literal["plan"]
    min_learners: Count
    grace_s: Duration

    def quorum(self, num_workers: int) -> int:
        if self.min_learners > num_workers:
            raise UsageError(
                f"sync.min_learners={self.min_learners} is more than the {num_workers} workers that"
                f" there are; take at most {num_workers}"
            )
        return num_workers + 1  # no number of pushes makes a merge: `closes_s` says when

    def begin(self, stage: Stage, progress: Progress) -> Gathered:
        return Gathered(progress.version)

    def observe(self, stage: Stage, state: Gathered, progress: Progress, push: Push) -> Gathered:
        now = self._now(state, progress)
        return self._judged(now._replace(learners=(*now.learners, push.worker)), progress)

    def on_membership_change(
        self, stage: Stage, state: Gathered, progress: Progress, rank: int
    ) -> Gathered:
        now = self._now(state, progress)
        return self._judged(
            now._replace(learners=tuple(other for other in now.learners if other != rank)), progress
        )

    def may_proceed(self, state: Gathered, progress: Progress) -> Iterable[int]:
        held = self._now(state, progress).learners
        return [rank for rank in progress.waiting if rank not in held]

    def closes_s(self, state: Gathered, progress: Progress) -> float:
        now = self._now(state, progress)
        if now.enough_s is None:
            return -math.inf
        return now.enough_s + (self.grace_s if len(now.learners) < progress.present else 0.0)

    def _now(self, state: Gathered, progress: Progress) -> Gathered:
        """What is held now: nothing after a merge."""
        return state if state.version == progress.version else Gathered(progress.version)

    def _judged(self, state: Gathered, progress: Progress) -> Gathered:
        """With the moment at which there were enough, where there are."""
        if len(state.learners) < max(1, min(self.min_learners, progress.present)):
            return state._replace(enough_s=None)
        return state._replace(enough_s=progress.now_s) if state.enough_s is None else state
