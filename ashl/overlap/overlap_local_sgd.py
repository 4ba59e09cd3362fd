"""Overlap-Local-SGD: workers keep models of their own and are pulled towards an anchor, which is
averaged meanwhile.

Rule: at a border, with the anchor z as last averaged and the own model x, x ← (1 − α)·x + α·z, from
which the next steps go on, while z ← z + v is under way with v ← μ·v + Σ c_j·(x_j − z). Without
momentum z is the mean of the pulled-back models; μ is that of `outer`: slowmo with alpha = 1 and
beta = μ, which like the released code keeps v in units of the learning rate. What is evaluated is
the anchor.

Limits: α = 1 is `delayed` with local_weight = 0, but sends nothing: x_j − z is then 0 and nothing
is ever learned, so α < 1. At a parameter server without rounds each push moves the anchor by
c_j·(x_j − z) alone, as asynchronous elastic averaging. Source: Wang, Liang and Joshi, "Overlap
Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD", ICASSP 2020;
the released code, JYWa/Overlap_Local_SGD. α = 0.6 and μ = 0.7 as recalled from the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ashl.option import Number, option
from ashl.overlap.contract import Delayed


@option
class OverlapLocalSGD(Delayed):
    """Local models, pulled towards an anchor that is averaged while they go on."""

    needs_steps: ClassVar[bool] = True
    alpha: Annotated[float, Number, Field(ge=0, lt=1)]

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        local = start + progress
        local = local + (landed - local) * self.alpha
        return local - landed, local
