"""ASHL's first stage: asynchronous, with a large H for each worker that makes all cycles equally
long.

Rule: ASP's, w ← w + w_i·Δ_i at each arrival and that worker goes on, with the plan's H_i between
two commits.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
Heterogeneous Environments", IEEE Transactions on Computers 73(1), 2024.
"""

from typing import ClassVar

from ashl.option import option
from ashl.topology.parameter_server import ServerRule


@option
class AHL(ServerRule):
    """Asynchronous, H from the plan."""

    local_steps: ClassVar[str] = "plan"
