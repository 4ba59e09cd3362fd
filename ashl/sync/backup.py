"""Backup workers: the first n − e pushes of a step make the update, and later ones are dropped.

Use when: one worker is slow now and then, and all shards have the same classes.
Avoid when: the same worker is always slowest: its data are then never learned.
Alternatives: `lb_bsp` for permanent differences; `ssp` to use late work; `decoupled` with
`sync.grace_mads` for a deadline that follows the arrivals.

Rule: w ← w − γ·mean of the first n − e gradients computed on the current model, with e = `backups`.
A later gradient is dropped and counted, and its compressor's residual takes it back. With
`exchange=difference` the first n − e differences are averaged instead.
Waiting: a worker waits until n − e pushes of its step have arrived. A late worker proceeds at once,
with the current model. If the same workers are always late, the model never learns from their data.

Limit: e = 0 is BSP.
Source: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

Family: synchronous steps.
Status: situational.
"""

from typing import Literal

from ashl.errors import UsageError
from ashl.option import Natural, option
from ashl.topology.parameter_server import BarrierRule


@option
class Backup(BarrierRule):
    """A barrier that does not wait for the last `backups` workers."""

    backups: Natural
    exchange: Literal["gradient", "difference"]

    def quorum(self, num_workers: int) -> int:
        if self.backups >= num_workers:
            raise UsageError(
                f"sync.backups={self.backups}: leaves no worker to wait for among {num_workers}"
                f" workers; take at most {num_workers - 1}"
            )
        return num_workers - self.backups
