"""Backup workers: of n workers, the first n − e of a step make the update; those that come later
are dropped.

Rule: w ← w − γ·mean of the first n − e gradients computed on the current w. A late worker's
gradient is thrown away and counted, what its compressor left behind stays with it, and it goes on
with the current model. With persistently slow workers the model never sees their data.

Limit: e = 0 is BSP. Source: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv
1604.00981.
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
                f"sync.backups={self.backups} leaves no worker to wait for among {num_workers}"
                f" workers; take at most {num_workers - 1}"
            )
        return num_workers - self.backups
