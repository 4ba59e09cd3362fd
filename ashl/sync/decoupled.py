"""Decoupled DiLoCo: a merge waits for a quorum of learners and then for a grace window, never for
one given learner.

Use when: some workers are slow at times, or fail: a merge waits for a quorum and a grace time.
Avoid when: one worker is always slow and its data are needed: its updates are stale and rare.
Alternatives: `local_sgd` with planned H; `async_local_sgd`.

Rule: a learner pushes the Δ_i of H local steps. Once K = `min_learners` learners have pushed, the
server accepts further pushes for `grace_s` seconds, or until all have pushed. Then it takes one
outer step on Σ w_i·Δ_i over these pushes, with Σ w_i = 1. `aggregate=mean` weighs by samples, and
so by tokens. A later push is part of the next merge, although it was computed on an older model.
The paper's outer step is `outer=nesterov`. With `grace_mads` = k the window follows the arrivals:
it ends median + k·MAD seconds after the last merge, over the seconds between a learner's merge and
its next push, of the last max(64, 2·n) pushes. MAD is the median absolute deviation from the
median. It never ends before there is a quorum. Until 2·n pushes have arrived, the window is
`grace_s`.
Waiting: a learner waits for the merge that contains its push. With `overlap=delayed` it computes
meanwhile. If fewer than K learners are running, a merge waits for all of them.

Limits: K = n is `local_sgd` with this outer optimizer (DiLoCo through a server), bit for bit if the
run ends with a whole round. K = 1 without a grace window merges each push at its arrival, together
with all others that have arrived by then.
Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv
2604.21428, 2026, by its abstract and descriptions of its rule.
Differs: in the paper the model travels in fragments, and the grace window adapts by a rule that we
could not read. Here the model is one fragment, and the window is constant or follows arrivals. The
paper's weights, tokens times tokens per step, equal weights by tokens if all batches are equal.

Family: local SGD.
Status: situational.
"""

import math
from collections.abc import Iterable
from statistics import median
from typing import ClassVar, Literal, NamedTuple

from ashl.aggregate.weighted import Push
from ashl.errors import UsageError
from ashl.option import Count, Duration, NonNegative, option
from ashl.stage.contract import StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ServerRule, ServerState

ARRIVALS = 64  # pushes whose delays are kept, or two for each worker if that is more


def replace_values(
    values: tuple[float, ...], indices: Iterable[int], value: float
) -> tuple[float, ...]:
    """Return the values with `value` at these indices."""
    changed = set(indices)
    return tuple(value if index in changed else own for index, own in enumerate(values))


class Gathered(NamedTuple):
    """Learners that have pushed for the next merge."""

    version: int  # merges before this one
    learners: tuple[int, ...] = ()
    enough_s: float | None = None  # run time at which there was a quorum
    started_s: float = 0.0  # run time of the merge before
    last_s: float = 0.0  # run time of the last push
    released_s: tuple[float, ...] = ()  # by learner: run time of its last merge
    # seconds between a learner's merge and its next push, of the last pushes
    delays_s: tuple[float, ...] = ()


@option
class Decoupled(ServerRule):
    """A quorum, a grace window, and then a merge."""

    averages: ClassVar[bool] = True
    takes_all: ClassVar[bool] = True
    local_steps: Count | Literal["plan"]
    min_learners: Count
    grace_s: Duration
    grace_mads: NonNegative | None

    def quorum(self, num_workers: int) -> int:
        if self.min_learners > num_workers:
            raise UsageError(
                f"sync.min_learners={self.min_learners}: more than the {num_workers} workers of the"
                f" run; take at most {num_workers}"
            )
        return num_workers + 1  # `closes_s` decides on a merge, and the number of pushes never does

    def begin(self, stage: StageConfig, progress: Progress) -> Gathered:
        now_s = progress.now_s
        released_s = (now_s,) * stage.num_workers if self.grace_mads is not None else ()
        return Gathered(progress.version, started_s=now_s, released_s=released_s)

    def observe(
        self, stage: StageConfig, state: Gathered, progress: Progress, push: Push
    ) -> Gathered:
        now = self._held_pushes(state, progress)
        if self.grace_mads is not None:
            delay_s = progress.now_s - now.released_s[push.worker]
            kept = max(ARRIVALS, 2 * len(now.released_s))
            now = now._replace(delays_s=(*now.delays_s, delay_s)[-kept:], last_s=progress.now_s)
        return self._note_quorum(now._replace(learners=(*now.learners, push.worker)), progress)

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        self.without(stage, state, rank)
        if self.grace_mads is not None:
            now, now_s = state.rule_state, state.progress.now_s
            released_s = replace_values(now.released_s, (rank,), now_s)
            state.rule_state = now._replace(released_s=released_s)

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        now = self._held_pushes(state.rule_state, state.progress)
        learners = tuple(other for other in now.learners if other != rank)
        state.rule_state = self._note_quorum(now._replace(learners=learners), state.progress)

    def may_proceed(self, state: Gathered, progress: Progress) -> Iterable[int]:
        held = self._held_pushes(state, progress).learners
        return [rank for rank in progress.waiting if rank not in held]

    def closes_s(self, state: Gathered, progress: Progress) -> float:
        now = self._held_pushes(state, progress)
        if now.enough_s is None:
            return -math.inf
        if len(now.learners) >= progress.num_present:
            return now.enough_s
        return self._deadline_s(now, now.enough_s)

    def _deadline_s(self, state: Gathered, enough_s: float) -> float:
        """Return the end of the grace window of a merge that has a quorum since `enough_s`."""
        if self.grace_mads is None or len(state.delays_s) < 2 * len(state.released_s):
            return enough_s + self.grace_s
        middle_s = median(state.delays_s)
        mad_s = median(abs(delay_s - middle_s) for delay_s in state.delays_s)
        return max(enough_s, state.started_s + middle_s + self.grace_mads * mad_s)

    def _held_pushes(self, state: Gathered, progress: Progress) -> Gathered:
        """Return the pushes held for the next merge: none directly after a merge."""
        if state.version == progress.version:
            return state
        if self.grace_mads is None:
            return Gathered(progress.version)
        merged_s = state.last_s
        if state.enough_s is not None and len(state.learners) < progress.num_present:
            merged_s = max(merged_s, min(progress.now_s, self._deadline_s(state, state.enough_s)))
        return Gathered(
            progress.version,
            started_s=merged_s,
            last_s=merged_s,
            released_s=replace_values(state.released_s, state.learners, merged_s),
            delays_s=state.delays_s,
        )

    def _note_quorum(self, state: Gathered, progress: Progress) -> Gathered:
        """Return `state` with the time at which the quorum was reached, or None without a
        quorum.
        """
        if len(state.learners) < max(1, min(self.min_learners, progress.num_present)):
            return state._replace(enough_s=None)
        return state._replace(enough_s=progress.now_s) if state.enough_s is None else state
