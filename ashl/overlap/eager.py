"""Eager updates: each worker takes the outer step on its own part of an exchange at once, and on
the others' one late.

Rule: with z the model as exchanges have landed in it and d_i what worker i has learned in a piece
of local steps, sent as it is, the next piece starts from y_i = z + the outer optimizer's step on
c_i·d_i, with moments that the worker's own parts alone have made. z then takes the outer step on Σ
c_j·d_j, as DiLoCo does. As the steps of such an optimizer add up, y_i is what the paper has: the
outer optimizer's path of worker i along c_i·d_i(t) + Σ_{j≠i} c_j·d_j(t − 1). What is evaluated is
z, alike for all. With a codec z has what it left of d_i, and y_i all of it. No message is longer
for it; each worker keeps one vector of moments more.

Limits: one worker is DiLoCo, bit for bit; `outer=average` is `delayed` with local_weight = 1/n.
Outer optimizers whose steps add up (`Outer.linear`), and modes that go in rounds. Source: Kale,
Douillard and Donchev, "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv
2502.12996, 2025, whose replicas have models of their own throughout, with outer=nesterov and AdamW
on the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ashl.option import option
from ashl.overlap.contract import Delayed


@option
class Eager(Delayed):
    """The outer step on one's own part now, on the others' one round late."""

    needs_steps: ClassVar[bool] = True
    steps_ahead: ClassVar[bool] = True

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        return progress, ahead()
