"""DeAR: the sum of each layer group in two halves, one under the backward pass and one under the
next forward pass.

Rule: as backward comes to a group, its gradient is reduce-scattered; once all have been, the sums
are all-gathered in the order in which forward needs them, and the forward pass waits for each group
by itself. A half costs half a sum, so in the long run a step takes max_k (R_k + S_k / 2) + max_k
(S_k / 2 + q_k), with q_k the forward time from k on and S_k what the sums of the layers up to k
take. What a message holds is for `plan` to say, see `ashl.overlap.crossing`.

Limits: never faster than ideal `priority`; slower than `wfbp` where a large group is ready early
and forward is short. One group is `none`.
Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023, tuned there by trial runs. It looks one group ahead; here a gather begins
as soon as the one before has ended.
"""

from __future__ import annotations

from typing import ClassVar

from ashl.option import option
from ashl.overlap.crossing import TwoWay
from ashl.overlap.timeline import StepTimeline


@option
class DeAR(TwoWay):
    """Half of each sum under the backward pass, the other half under the next forward pass."""

    reduce_scatter_all_gather: ClassVar[bool] = True

    def up_ns(self, timeline: StepTimeline, nbytes: int) -> int:
        return timeline.half_ns(nbytes)
