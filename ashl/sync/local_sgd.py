"""Local SGD: H steps on each worker's own model, then an average of all models.

Use when: links are slow and workers about equally fast; with planned H also for unequal ones.
Avoid when: shards are skewed and H is large, or one worker is slow at a fixed H.
Alternatives: `bsp` if links are fast; `ssp` with planned H without a barrier.

Rule: w ← w + scale·Σ_i w_i·(w_i^H − w), with w_i^H the model of worker i after H steps from w, and
Σ w_i = 1. All workers continue from the new w. Another `outer` than `average` steps along the same
sum; `outer=nesterov` is DiLoCo. The moments of a worker's optimizer are not averaged.
Waiting: every worker waits for all others at each average.

Limit: H = 1 is BSP (SGD, momentum).
Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

Family: local SGD.
Status: recommended.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import BarrierRule


@option
class LocalSGD(BarrierRule, StepRule):
    """An average every H steps."""

    local_steps: Count | Literal["plan"]
