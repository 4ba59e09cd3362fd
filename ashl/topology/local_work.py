"""What every worker does between two merges, whatever the topology: one gradient, or H local steps.

Source: exchange of gradients as in synchronous SGD; exchange of differences as in local SGD (Stich, ICLR 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ashl.runtime.node import Node
from ashl.stage import Stage


@dataclass
class WorkerState:
    """All that a worker needs to go on. `step` counts its minibatches; `samples` those applied as of its last pull."""

    params: Any
    moments: Any
    sender: Any = None  # the codec's state on the way up
    step: int = 0
    round: int = 0
    version: int = 0
    samples: int = 0


async def local_work(node: Node, stage: Stage, state: WorkerState) -> tuple[Any, float, int]:
    """The body to exchange, the mean loss seen, and the number of steps taken.

    gradient: g = ∇f(w; batch). difference: w_H − w after H steps of the worker's own optimizer, whose state persists.
    The learning rate is that of the samples applied as of the last pull.
    """
    trainer, batch = stage.trainer, stage.worker(node.rank).batch
    if stage.sync.exchange == "gradient":
        loss, grad = await node.compute(partial(trainer.gradient, state.params, node.rank, state.step), work=batch)
        state.step += 1
        return grad, loss, 1
    local, lr, total = state.params, trainer.rate(state.samples), 0.0
    steps = stage.worker(node.rank).local_steps
    for _ in range(steps):
        step = partial(trainer.local_step, local, state.moments, node.rank, state.step, lr)
        loss, state.moments, local = await node.compute(step, work=batch)
        state.step += 1
        total += loss
    return local - state.params, total / steps, steps
