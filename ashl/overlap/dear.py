"""DeAR: each sum in two halves, a reduce-scatter under the backward pass and an all-gather under
the next forward pass.

Use when: an exchange takes a few steps, so that the next forward pass can hide a part of it.
Avoid when: latency is high: each message is split in two.
Alternatives: `merged` within the backward pass; `priority`.

Rule: the gradient of a layer group is reduce-scattered as soon as it is ready. Once all are, the
sums are all-gathered in the order in which the forward pass needs them. `plan` decides what a
message holds, see `ashl.overlap.next_forward`.
Waiting: the forward pass waits for each message before its first layer.
Time: a half costs half a sum. In the long run a step takes max_k (R_k + S_k/2) + max_k (S_k/2 +
q_k), with S_k the time of the sums of the layers up to k.

Limits: never faster than ideal `priority`. Slower than `wfbp` if a large group is ready early and
the forward pass is short. One group is `none`.
Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining", ICDCS 2023.
Differs: the paper tunes messages by trial runs, where this uses costs. It looks one group ahead;
here a gather begins as soon as the one before has ended.
"""

from __future__ import annotations

from typing import ClassVar

from ashl.option import option
from ashl.overlap.next_forward import TwoWay
from ashl.overlap.timeline import StepTimeline


@option
class DeAR(TwoWay):
    """Half of each sum under the backward pass, the other half under the next forward pass."""

    reduce_scatter_all_gather: ClassVar[bool] = True

    def up_ns(self, timeline: StepTimeline, nbytes: int) -> int:
        return timeline.half_ns(nbytes)
