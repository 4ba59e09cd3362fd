"""Ringleader ASGD: asynchronous, with the same number of steps along everybody's data, however fast
who is.

Rule: the server keeps of each worker i the sum G_i of the gradients that it sent in this round, and
their number b_i. A round first waits until all have sent one; from the push that makes it complete
on, each worker's next push joins its G_i, the model steps, w ← w − γ·Σ_i w_i·G_i/b_i, and that
worker alone is given the new model. So there are n steps a round, each along a mean of all workers'
data. What a worker sends after its step counts for the next round, and it goes on with the model
that it has. Nobody waits, nothing is thrown away; what is applied is at most 2n − 2 steps old.

Of a worker that is lost nobody waits for a gradient any more: a round is complete, and over, with
those who are left. Its G_i leaves the sum, Σ w_i = 1 over the others, and what of its gradients was
in no step is dropped and counted. Who comes has its first step in the round after; what it sends
until then counts for that one.

Limit: one worker is SGD. Staleness is counted from a worker's last reply, also where that brought
no model. Source: Maranjyan and Richtárik, "Ringleader ASGD: The First Asynchronous SGD with Optimal
Time Complexity under Data Heterogeneity", ICLR 2026, arXiv 2509.22860; its listing was not at hand,
so that the order of the two phases is by its description.
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
from ashl.stage.progress import FAILURE, Progress
from ashl.stage.stage import CODEC, FAULT_TOLERANT, WEIGHTS, Stage
from ashl.topology.parameter_server import ServerRule, ServerState, Updates

Sums = dict[int, Push]  # by worker: G_i, the b_i steps in it, and their samples


@dataclass
class Table:
    """The round: what came for it, what came for the next one, the workers whose step in it is
    still to come, those of them that have sent nothing for it, whether it has had a step, and who
    had the last one.
    """

    sums: Sums = field(default_factory=dict)
    later: Sums = field(default_factory=dict)
    due: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    used: bool = False
    stepped: int | None = None

    def open_round(self, workers: Iterable[int]) -> Table:
        """The next round, with a step for each of these."""
        due = set(workers)
        return Table(self.later, {}, due, due - self.later.keys(), stepped=self.stepped)

    def add_push(self, push: Push) -> bool:
        """A gradient has come; whether the model steps."""
        worker, sums = push.worker, self.sums if push.worker in self.due else self.later
        if (own := sums.get(worker)) is not None:
            push = own._replace(
                body=own.body + push.body, steps=own.steps + 1, samples=own.samples + push.samples
            )
        sums[worker] = push
        self.missing.discard(worker)
        self.stepped = None if self.missing or worker not in self.due else worker
        self.used = self.used or self.stepped is not None
        return self.stepped is not None

    def forget(self, worker: int) -> list[Push]:
        """This worker is gone; returns what was in no step."""
        now, later = self.sums.pop(worker, None), self.later.pop(worker, None)
        self.due.discard(worker)
        self.missing.discard(worker)
        return [own for own in (None if self.used else now, later) if own is not None]


@option
class Ringleader(ServerRule):
    """A table of gradients, and a step for each worker in turn."""

    exchange: ClassVar[str] = "gradient"
    whole_steps: ClassVar[bool] = True
    supports: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, FAULT_TOLERANT})

    def begin(self, stage: Stage, progress: Progress) -> Table:
        return Table().open_round(present_workers(stage, progress))

    def messages(self) -> Gradients:
        return GRADIENTS


class Gradients(Updates):
    """Gradients go up, and a model comes down to who had a step."""

    async def apply_push(
        self, ctx: RankContext, stage: Stage, state: ServerState, message: Message
    ) -> bool:
        return await ctx.compute(
            partial(self.fold_push, stage, state, message), work=1, kind="apply"
        )

    def fold_push(self, stage: Stage, state: ServerState, message: Message) -> bool:
        table, progress, worker = state.rule_state, state.progress, message.src
        steps, samples, loss, version, *_ = message.meta
        lr = stage.trainer.rate(progress.samples)
        progress.commit(worker, int(steps), int(samples))
        body = stage.link.decode(state.ends, worker, message.body)
        push = Push(
            worker, body, int(steps), int(samples), progress.version - int(version), loss, 0, 0, 0
        )
        if not table.add_push(push._replace(body=stage.aggregate.fold([push], [1.0]))):
            return False
        sums = [table.sums[rank] for rank in sorted(table.sums)]
        weights = stage.with_redistributed_shards(progress.gone).weights_of(
            sums, set(stage.workers) - table.sums.keys()
        )
        terms = [own.body * (weight / own.steps) for own, weight in zip(sums, weights, strict=True)]
        state.moments, _, state.params = stage.sync.step(stage, state, sum_in_rank_order(terms), lr)
        table.due.remove(worker)
        self.renew(stage, state)
        progress.merge()
        return True

    def on_membership_change(self, stage: Stage, state: ServerState, rank: int) -> None:
        progress = state.progress
        for own in state.rule_state.forget(rank) if rank in progress.gone else ():
            progress.take_back(rank, own.steps, own.steps, own.samples)
            for _ in range(own.steps):
                progress.count_dropped(rank, 1, FAILURE)
        self.renew(stage, state)

    def renew(self, stage: Stage, state: ServerState) -> None:
        """Once all have had their step the next round begins."""
        if not state.rule_state.due:
            state.rule_state = state.rule_state.open_round(present_workers(stage, state.progress))

    async def answer(
        self, ctx: RankContext, stage: Stage, state: ServerState, rank: int, changed: bool
    ) -> Any:
        return state.params if state.rule_state.stepped == rank else None


GRADIENTS = Gradients()


def present_workers(stage: Stage, progress: Progress) -> list[int]:
    return [rank for rank in stage.workers if rank not in progress.gone]
