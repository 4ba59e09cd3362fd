"""Ringleader ASGD: asynchronous, with the same number of steps along everybody's data, however fast who is.

Rule: the server keeps of each worker i the sum G_i of the gradients that it sent in this round, and their number b_i. A
round first waits until all have sent one; from the push that makes it complete on, each worker's next push joins its
G_i, the model steps, w ← w − γ·Σ_i w_i·G_i/b_i, and that worker alone is given the new model. So there are n steps a
round, each along a mean of all workers' data. What a worker sends after its step counts for the next round, and it goes
on with the model that it has. Nobody waits, nothing is thrown away; what is applied is at most 2n − 2 steps old.

Limit: one worker is SGD. Staleness is counted from a worker's last reply, also where that brought no model. Source:
Maranjyan and Richtárik, "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
Heterogeneity", ICLR 2026, arXiv 2509.22860; its listing was not at hand, so that the order of the two phases is by its
description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ashl.option import option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.runtime.sums import sum_in_rank_order
from ashl.stage.rule import CODEC, WEIGHTS
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.topology.parameter_server import ServerRule, ServerState, Updates

Sums = dict[int, tuple[Any, int]]  # G_i and b_i


@dataclass
class Table:
    """The round: what came for it, what came for the next one, who has had its step, and who had the last one."""

    sums: Sums = field(default_factory=dict)
    later: Sums = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    stepped: int | None = None

    def take(self, worker: int, gradient: Any, num_workers: int) -> bool:
        """A gradient has come; whether the model steps."""
        sums = self.later if worker in self.done else self.sums
        total, count = sums.get(worker, (None, 0))
        sums[worker] = (gradient if total is None else total + gradient, count + 1)
        steps = worker not in self.done and len(self.sums) == num_workers
        self.stepped = worker if steps else None
        return steps

    def after(self, num_workers: int) -> None:
        """The model has stepped for this worker; with the last one the next round begins."""
        assert self.stepped is not None
        self.done.add(self.stepped)
        if len(self.done) == num_workers:
            self.sums, self.later, self.done = self.later, {}, set()


@option
class Ringleader(ServerRule):
    """A table of gradients, and a step for each worker in turn."""

    exchange: ClassVar[str] = "gradient"
    carries: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS})

    def begin(self, stage: Stage, tally: Tally) -> Table:
        return Table()

    def messages(self) -> Gradients:
        return GRADIENTS


class Gradients(Updates):
    """Gradients go up, and a model comes down to who had a step."""

    async def absorb(self, node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
        return await node.compute(partial(self.merged, stage, state, message), work=1, kind="apply")

    def merged(self, stage: Stage, state: ServerState, message: Message) -> bool:
        table, tally, worker, n = state.rule_state, state.tally, message.src, stage.num_workers
        steps, samples = message.meta[:2]
        lr = stage.trainer.rate(tally.samples)
        tally.commit(worker, int(steps), int(samples))
        if not table.take(worker, stage.link.decode(state.ends, worker, message.body), n):
            return False
        terms = [total * (stage.team_weights[rank] / count) for rank, (total, count) in sorted(table.sums.items())]
        state.moments, _, state.params = stage.sync.step(stage, state, sum_in_rank_order(terms), lr)
        table.after(n)
        tally.merge()
        return True

    async def answer(self, node: Node, stage: Stage, state: ServerState, rank: int, changed: bool) -> Any:
        return state.params if state.rule_state.stepped == rank else None


GRADIENTS = Gradients()
