"""LOSCAR-SGD: a random share of the elements is averaged while local steps go on, which the merge
keeps.

Rule: after H_i local steps worker i sends y_S, its parameters at the places S, a share K/d that all
draw alike for each round, and takes Q = `delay` more steps, to z. Then z_S ← mean of all y_S + (z_S
− y_S); all other elements stay its own. The steps beside an exchange are the first of the next H_i,
at most H_i − 1. Unequal H is `sync.local_steps=plan`, the plain mean `aggregate=uniform`. Places
travel in no message. What is evaluated is the model as averages have landed in it, each element as
of its last; the theory is of the mean of the workers' models.

Limits: share = 1 with delay = 0 is local SGD, bit for bit. Source: Maziane et al., "LOSCAR-SGD:
Local SGD with Communication-Computation Overlap and Delay-Corrected Sparse Model Averaging", arXiv
2605.20866, 2026, by its abstract and a description of its rule, where Q may differ by worker.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ashl.option import Ratio, option
from ashl.overlap.streaming import Fragmented


@option
class Loscar(Fragmented):
    """Random coordinates, with a merge that keeps what was learned meanwhile."""

    fragments: ClassVar[int] = 1
    share: Ratio

    def mix(self, own: Any, landed: Any, sent: Any) -> Any:
        return landed + (own - sent)
