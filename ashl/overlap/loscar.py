"""LOSCAR-SGD: a random part of the elements is averaged while local steps continue, and the merge
keeps these steps.

Use when: links are thin and workers unequal: local steps go on, with H by speed.
Avoid when: too few steps remain to mix all elements.
Alternatives: `streaming`; `delayed`; `schedule=ashl` with a server.

Rule: after H_i local steps worker i sends y_S, its parameters at the indices S. S is a random
fraction K/d = `share` of the elements, drawn from the seed in each round, the same on all workers.
Meanwhile it takes Q = `delay` more steps, to z. Then z_S ← mean of all y_S + (z_S − y_S); all other
elements remain its own. These Q steps are the first of the next H_i, so Q ≤ H_i − 1. No indices
travel. For unequal H take `sync.local_steps=plan`; the plain mean is `aggregate=uniform`. The
evaluated model has each element as of its last average.
Waiting: a worker waits for an average if it takes longer than the Q steps.

Limits: share = 1 with delay = 0 is local SGD, bit for bit.
Source: Maziane et al., "LOSCAR-SGD: Local SGD with Communication-Computation Overlap and
Delay-Corrected Sparse Model Averaging", arXiv 2605.20866, 2026, by its abstract and a description
of its rule.
Differs: in the paper Q may differ between workers, and the theory evaluates the mean of the
workers' models.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ashl.option import Ratio, option
from ashl.overlap.streaming import Fragmented
from ashl.overlap.timeline import Bucket, StepTimeline


@option
class Loscar(Fragmented):
    """Averages of random elements, which keep the local steps taken meanwhile."""

    fragments: ClassVar[int] = 1
    share: Ratio

    def plan_buckets(self, timeline: StepTimeline) -> list[Bucket]:
        return [Bucket(0, timeline.groups[0].stop, share=self.share, delay=self.delay)]

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        return landed + (own - sent)
