"""TicTac: a parameter server's model comes back in the order in which the next forward pass needs
it.

Rule: slices of a push leave as backward comes to them, as with `wfbp`. Once a push is merged the
model comes back message by message, those that forward needs first before the others, to all
workers that are answered in turn; the forward pass waits for each message by itself. So in the long
run a step takes max_k (R_k + S_k) + max_k (P_k + q_k), with S_k what pushes of the layers up to k
take, P_k what their pulls do, and q_k the forward time from k on. What a message holds is for
`plan` to say, see `ashl.overlap.crossing`.

Limits: one group is `none`. Of the paper's two orders, TAC is that of the forward pass on a chain
of layers, and TIC leaves only its first two tied, so here both are this one. Slices are merged once
their push has come as a whole; with `slices` each is as soon as it has come from all.
Source: Hashemi, Jyothi and Campbell, "TicTac: Accelerating Distributed Deep Learning with
Communication Scheduling", MLSys 2019.
"""

from __future__ import annotations

from typing import ClassVar

from ashl.option import option
from ashl.overlap.crossing import TwoWay
from ashl.overlap.timeline import StepTimeline


@option
class TicTac(TwoWay):
    """Pulls in parts, in the order of the next forward pass."""

    pulls: ClassVar[bool] = True

    def up_ns(self, timeline: StepTimeline, nbytes: int) -> int:
        return timeline.cost_ns(nbytes)
