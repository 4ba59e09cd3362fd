"""Decoupled DiLoCo: a merge waits for a quorum of learners and then for a grace window, never for
one given learner.

Use when: some workers are slow at times, or fail: a merge waits for a quorum and a grace time.
Avoid when: one worker is always slow and its data are needed: its updates are stale and rare.
Alternatives: `local_sgd` with planned H; `async_local_sgd`.

Rule: a learner pushes the Δ_i of H local steps. Once K = `min_learners` learners have pushed, the
server accepts further pushes for `grace_s` seconds, or until all have pushed. Then it takes one
outer step on Σ w_i·Δ_i over these pushes, with Σ w_i = 1. `aggregate=mean` weighs by samples, and
so by tokens. A later push is part of the next merge, although it was computed on an older model.
The paper's outer step is `outer=nesterov`.
Waiting: a learner waits for the merge that contains its push. With `overlap=delayed` it computes
meanwhile. If fewer than K learners are running, a merge waits for all of them.

Limits: K = n is `local_sgd` with this outer optimizer (DiLoCo through a server), bit for bit if the
run ends with a whole round. K = 1 without a grace window merges each push at its arrival, together
with all others that have arrived by then.
Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv
2604.21428, 2026, by its abstract and descriptions of its rule.
Differs: in the paper the model travels in fragments, and the grace window adapts by a rule that we
could not read. Here the model is one fragment and the window is constant. The paper's weights,
tokens times tokens per step, equal weights by tokens if all batches are equal.

Family: local SGD.
Status: situational.
"""

import math
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import Count, Duration, option
from ashl.stage.contract import StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule


class Gathered(NamedTuple):
    """Learners that have pushed for the next merge."""

    version: int  # merges before this one
    learners: tuple[int, ...] = ()
    enough_s: float | None = None  # run time at which there was a quorum


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
                f"sync.min_learners={self.min_learners}: more than the {num_workers} workers of the"
                f" run; take at most {num_workers}"
            )
        return num_workers + 1  # `closes_s` decides on a merge, and the number of pushes never does

    def begin(self, stage: StageConfig, progress: Progress) -> Gathered:
        return Gathered(progress.version)

    def observe(
        self, stage: StageConfig, state: Gathered, progress: Progress, push: Push
    ) -> Gathered:
        now = self._held_pushes(state, progress)
        return self._note_quorum(now._replace(learners=(*now.learners, push.worker)), progress)

    def with_joined(
        self, stage: StageConfig, state: Gathered, progress: Progress, rank: int
    ) -> Gathered:
        return self.without(stage, state, progress, rank)

    def without(
        self, stage: StageConfig, state: Gathered, progress: Progress, rank: int
    ) -> Gathered:
        now = self._held_pushes(state, progress)
        return self._note_quorum(
            now._replace(learners=tuple(other for other in now.learners if other != rank)), progress
        )

    def may_proceed(self, state: Gathered, progress: Progress) -> Iterable[int]:
        held = self._held_pushes(state, progress).learners
        return [rank for rank in progress.waiting if rank not in held]

    def closes_s(self, state: Gathered, progress: Progress) -> float:
        now = self._held_pushes(state, progress)
        if now.enough_s is None:
            return -math.inf
        return now.enough_s + (self.grace_s if len(now.learners) < progress.present else 0.0)

    def _held_pushes(self, state: Gathered, progress: Progress) -> Gathered:
        """Return the pushes held for the next merge: none directly after a merge."""
        return state if state.version == progress.version else Gathered(progress.version)

    def _note_quorum(self, state: Gathered, progress: Progress) -> Gathered:
        """Return `state` with the time at which the quorum was reached, or None without a
        quorum.
        """
        if len(state.learners) < max(1, min(self.min_learners, progress.present)):
            return state._replace(enough_s=None)
        return state._replace(enough_s=progress.now_s) if state.enough_s is None else state
