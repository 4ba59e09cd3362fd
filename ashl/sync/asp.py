"""Asynchronous parallel: each push is applied at its arrival, and no worker waits for another one.

Use when: workers are unequal, exchanges are short, and some staleness is harmless.
Avoid when: momentum is high, workers are many, or a server's NIC is the bottleneck.
Alternatives: `ssp` with a bound; `fedbuff` with fewer merges; `ad_psgd` without a server.

Rule: w ← w + scale·w_i·Δ_i at each arrival, with Δ_i computed on the model that worker i pulled.
The reply carries the current model. `aggregate.scale=n` is the textbook's full step per push; with
scale = 1, n pushes move the model as far as one step of BSP.
Waiting: none.

Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; Recht et al., "Hogwild",
NIPS 2011.

Family: asynchronous server.
Status: recommended.
"""

from typing import Literal

from ashl.option import Count, option
from ashl.topology.parameter_server import ServerRule


@option
class ASP(ServerRule):
    """No bound on the lead or the staleness."""

    local_steps: Count | Literal["plan"]
