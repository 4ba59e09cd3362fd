"""Wait-free backpropagation: each layer group is sent as soon as the backward pass has computed its
gradient.

Use when: a model has few large layers and links have little latency.
Avoid when: there are many small layers: each message costs a latency.
Alternatives: `merged`, which is never slower by prediction; `none`.

Rule: the message of group l starts at max(R_l, end of the message before), while the backward pass
computes groups l − 1, …, 1. At a parameter server the slices of a push leave in this way, and those
of all workers queue at the server's NIC.
Waiting: a step ends with its last message, which nothing hides.
Time: a step takes F + max_k (R_k + S_k) with S_k = Σ_{l ≤ k} c_l.
Failures: under all-reduce survivors repeat the round in which a worker failed, with all of its
messages.

Limits: one group is `none`. Many small groups pay one latency each; take `merged` there.
Source: Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep
Learning on GPU Clusters", USENIX ATC 2017.
"""

from __future__ import annotations

from ashl.option import option
from ashl.overlap.contract import Overlap
from ashl.overlap.timeline import StepTimeline


@option
class WFBP(Overlap):
    """One message per layer group, as it is ready."""

    def messages(self, timeline: StepTimeline) -> tuple[int, ...]:
        return (1,) * len(timeline.ready_ns)
