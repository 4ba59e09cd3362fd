"""AHL, the first stage of ASHL: asynchronous, with a large H_i per worker that makes all cycles
equally long.

Use when: the first stage of ASHL is to be used alone: large H by speed, and no waiting.
Avoid when: the loss must become low: unbounded leads and large H hold it up.
Alternatives: `schedule=ashl`, with SHL after it; `async_local_sgd` with a given H.

Rule: ASP's, w ← w + scale·w_i·Δ_i at each arrival. Worker i takes the plan's H_i local steps
between two commits.
Waiting: no worker waits for another one.

Source: Shen et al., "ASHL: An Adaptive Multi-Stage Distributed Deep Learning Training Scheme for
Heterogeneous Environments", IEEE Transactions on Computers 73(1), 2024.

Family: stages of ASHL.
Status: internal.
"""

from typing import ClassVar

from ashl.option import option
from ashl.topology.parameter_server import ServerRule


@option
class AHL(ServerRule):
    """Asynchronous, with H of each worker from the plan."""

    local_steps: ClassVar[str] = "plan"
