"""Wait-free backpropagation: each layer group is sent the moment backward has come to it.

Rule: the message of group l starts at max(R_l, the end of the message before), while groups l − 1,
…, 1 are computed; a step takes F + max_k (R_k + S_k) with S_k = Σ_{l ≤ k} c_l, R counted from the
start of backward. The last message is never hidden.

At a parameter server the slices of a push leave so; those of all workers queue at its port. Under
all-reduce a round in which a worker is lost is done once more without it, all of its messages.

Limits: one group is `none`. Many small groups cost a latency each: then take `merged`.
Source: Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep
Learning on GPU Clusters", USENIX ATC 2017.
"""

from __future__ import annotations

from ashl.option import option
from ashl.overlap.contract import Overlap
from ashl.overlap.timeline import StepTimeline


@option
class WFBP(Overlap):
    """A message for each layer group, as it is ready."""

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (1,) * len(timeline.ready_ns)
