"""Bulk synchronous parallel: every step averages the gradients of all workers.

Use when: workers are about equally fast, or the result must equal that of one worker.
Avoid when: the slowest worker takes 1.25 times as long as the fastest, or more.
Alternatives: `lb_bsp` with batches by speed; `local_sgd` for slow links; `ssp` for unequal workers.

Rule: w ← w − γ·scale·Σ_i w_i·g_i over all n workers, Σ w_i = 1. With `exchange=difference` each
worker takes its optimizer step itself, and the differences are averaged. For optimizers that are
linear in the gradient (SGD, momentum) both give the same model.
Waiting: every worker waits for all others at each step.

Source: Valiant, "A bridging model for parallel computation", CACM 1990.

Family: synchronous steps.
Status: recommended.
"""

from typing import Literal

from ashl.option import option
from ashl.topology.all_reduce import StepRule
from ashl.topology.parameter_server import BarrierRule


@option
class BSP(BarrierRule, StepRule):
    """A barrier at every step."""

    exchange: Literal["gradient", "difference"]
