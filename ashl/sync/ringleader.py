"""Ringleader ASGD: asynchronous, with equally many steps along the data of every worker, for all
speeds.

Use when: workers are very unequal and shards are skewed, so that `asp` would favour fast workers'
data.
Avoid when: the server has no memory for a gradient of each worker.
Alternatives: `rescaled_asgd`; `fedbuff`.

Rule: for each worker i the server keeps the sum G_i of the gradients that it pushed in this round,
and their number b_i. In the first phase of a round the server collects gradients until it has one
of every worker. From the push that completes them on, each worker's next push is added to its G_i,
and the model steps, w ← w − γ·Σ_i w_i·G_i/b_i. Only that worker receives the new model. A round has
n steps, one per worker, each along a mean over the data of all workers. Pushes that a worker sends
after its step count for the next round; they are computed on the model that it has.
Waiting: no worker waits for another one, and no push is dropped. A gradient is at most 2n − 2 steps
old when it is applied.

Failures: no round waits for a failed worker: a round is complete, and ends, with the surviving
workers. G_i of the failed worker leaves the sum, with Σ w_i = 1 over the others. Its gradients that
were part of no step are dropped and counted. A rejoining worker takes its first step in the next
round, for which its pushes count until then.

Limits: one worker is SGD. Staleness is counted from the last reply to a worker, even if that
carried no model.
Source: Maranjyan and Richtárik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time
Complexity under Data Heterogeneity", ICLR 2026, arXiv 2509.22860. Its listing was not available to
us, so the order of the two phases follows its description.

Family: asynchronous server.
Status: situational.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ashl.aggregate.weighted import Push
from ashl.option import option
from ashl.runtime.effects import Message
from ashl.runtime.rank_context import RankContext
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage.contract import CODEC, FAULT_TOLERANT, WEIGHTS, StageConfig
from ashl.stage.members import member_weights, survivors
from ashl.stage.progress import FAILURE, Progress
from ashl.topology.parameter_server import ServerRule, ServerState

Sums = dict[int, Push]  # by worker: G_i with its b_i steps and their samples


@dataclass
class Table:
    """The gradients of a round, and the workers that its steps still need."""

    sums: Sums = field(default_factory=dict)  # of this round
    later: Sums = field(default_factory=dict)  # of the next round
    due: set[int] = field(default_factory=set)  # workers whose step is still to come
    missing: set[int] = field(default_factory=set)  # workers without a gradient in this round
    used: bool = False  # True once this round has had a step
    stepped: int | None = None  # the worker whose push caused the latest step, if the latest did

    def open_round(self, workers: Iterable[int]) -> Table:
        """Return the next round, with one step for each of `workers`."""
        due = set(workers)
        return Table(self.later, {}, due, due - self.later.keys(), stepped=self.stepped)

    def add_push(self, push: Push) -> bool:
        """Add a gradient. Returns: True if the model steps."""
        worker = push.worker
        sums = self.sums if worker in self.due else self.later
        if (own := sums.get(worker)) is not None:
            push = own._replace(
                payload=own.payload + push.payload,
                steps=own.steps + 1,
                samples=own.samples + push.samples,
            )
        sums[worker] = push
        self.missing.discard(worker)
        self.stepped = None if self.missing or worker not in self.due else worker
        self.used = self.used or self.stepped is not None
        return self.stepped is not None

    def forget(self, worker: int) -> list[Push]:
        """Remove a failed worker. Returns: its gradients that were part of no step."""
        now, later = self.sums.pop(worker, None), self.later.pop(worker, None)
        self.due.discard(worker)
        self.missing.discard(worker)
        return [own for own in (None if self.used else now, later) if own is not None]


@option
class Ringleader(ServerRule):
    """A table of gradients, and one step per worker and round.

    The reply to the worker whose push caused a step holds the model, others hold nothing.
    """

    own_messages: ClassVar[bool] = True
    exchange: ClassVar[str] = "gradient"
    whole_steps: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, FAULT_TOLERANT})

    def begin(self, stage: StageConfig, progress: Progress) -> Table:
        return Table().open_round(survivors(stage, progress.failed))

    async def apply_push(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, message: Message
    ) -> bool:
        return await ctx.compute(
            partial(self._fold_push, stage, state, message), work=1, kind="apply"
        )

    def _fold_push(self, stage: StageConfig, state: ServerState, message: Message) -> bool:
        """Apply a push to the server's state. Returns: True if the model stepped."""
        table, progress, worker = state.rule_state, state.progress, message.src
        steps, samples, loss, version, *_ = message.meta
        lr = stage.trainer.rate(progress.samples)
        progress.commit(worker, int(steps), int(samples))
        body = stage.pipeline.decode(state.codec_state, worker, message.payload)
        push = Push(
            worker, body, int(steps), int(samples), progress.version - int(version), loss, 0, 0, 0
        )
        if not table.add_push(push._replace(payload=stage.aggregate.fold([push], [1.0]))):
            return False
        sums = [table.sums[rank] for rank in sorted(table.sums)]
        weights = member_weights(stage, sorted(table.sums), state.work.workers)
        terms = [
            own.payload * (weight / own.steps) for own, weight in zip(sums, weights, strict=True)
        ]
        state.moments, _, state.params = self.step(stage, state, sum_in_rank_order(terms), lr)
        table.due.remove(worker)
        self._renew(stage, state)
        progress.merge()
        return True

    def with_joined(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        self._renew(stage, state)

    def without(self, stage: StageConfig, state: ServerState, rank: int) -> None:
        progress = state.progress
        for own in state.rule_state.forget(rank):
            progress.subtract_rounds(rank, own.steps, own.steps, own.samples)
            for _ in range(own.steps):
                progress.count_dropped(rank, 1, FAILURE)
        self._renew(stage, state)

    def _renew(self, stage: StageConfig, state: ServerState) -> None:
        """Begin the next round once every worker has had its step."""
        if not state.rule_state.due:
            state.rule_state = state.rule_state.open_round(survivors(stage, state.progress.failed))

    async def answer(
        self, ctx: RankContext, stage: StageConfig, state: ServerState, rank: int, changed: bool
    ) -> Any:
        return state.params if state.rule_state.stepped == rank else None
