"""Overlap-Local-SGD: workers keep their own models, which are pulled towards an anchor that is
averaged meanwhile.

Use when: local SGD should hide its exchange, and models may be pulled towards an older mean.
Avoid when: steps are few: the anchor costs about 1.45 times the steps.
Alternatives: `delayed`; `streaming`.

Rule: between two pieces of local steps, with the anchor z and the own model x, x ← (1 − α)·x + α·z.
The next piece starts from x. Meanwhile z ← z + v is exchanged, with v ← μ·v + Σ c_j·(x_j − z).
Without momentum z becomes the mean of the pulled models. μ is that of `outer`: slowmo with alpha =
1 and beta = μ, which keeps v in units of the learning rate, as the released code does. The
evaluated model is the anchor.
Waiting: a worker waits for an exchange only if it takes longer than the next piece.

Limits: α = 1 is `delayed` with local_weight = 0, but sends nothing: x_j − z is then 0 and no worker
learns, so α < 1. At a parameter server without rounds each push moves the anchor by c_j·(x_j − z)
alone, as asynchronous elastic averaging does.
Source: Wang, Liang and Joshi, "Overlap Local-SGD: An Algorithmic Approach to Hide Communication
Delays in Distributed SGD", ICASSP 2020; the released code, JYWa/Overlap_Local_SGD. α = 0.6 and μ =
0.7 are recalled from the paper and not verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Number, option
from ashl.overlap.contract import Delayed


@option
class OverlapLocalSGD(Delayed):
    """Local models, pulled towards an anchor that is averaged during the next steps."""

    needs_steps: ClassVar[bool] = True
    alpha: Annotated[float, Number, Field(ge=0, lt=1)]

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        local = start + progress
        local = local + (landed - local) * self.alpha
        return local - landed, local
