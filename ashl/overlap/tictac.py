"""TicTac: a parameter server returns its model in the order in which the next forward pass needs
it.

Use when: pulls from a server take long, and the next forward pass can begin with the first layers.
Avoid when: all-reduce is used: there are no pulls.
Alternatives: `slices`; `priority`.

Rule: pushes leave in slices during the backward pass, as with `wfbp`. Once a push is merged, the
server returns the model in messages, those of the first layers first, to all workers that it
answers in turn. `plan` decides what a message holds, see `ashl.overlap.next_forward`.
Waiting: the forward pass waits for each message by itself.
Time: in the long run a step takes max_k (R_k + S_k) + max_k (P_k + q_k). S_k is the time of the
pushes of the layers up to k, P_k that of their pulls.

Limits: one group is `none`. The server merges the slices of a push once all of them have arrived;
`slices` merges each one by itself.
Source: Hashemi, Jyothi and Campbell, "TicTac: Accelerating Distributed Deep Learning with
Communication Scheduling", MLSys 2019.
Differs: the paper has two orders. On a chain of layers TAC is the order of the forward pass, and
TIC differs only by a tie of the first two layers; so both are one here.
"""

from __future__ import annotations

from typing import ClassVar

from ashl.option import option
from ashl.overlap.next_forward import TwoWay
from ashl.overlap.timeline import StepTimeline


@option
class TicTac(TwoWay):
    """Pulls in messages, in the order of the next forward pass."""

    pulls: ClassVar[bool] = True

    def up_ns(self, timeline: StepTimeline, nbytes: int) -> int:
        return timeline.cost_ns(nbytes)
