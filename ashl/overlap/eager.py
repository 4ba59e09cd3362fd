"""Eager updates: a worker takes the outer step on its own part of an exchange at once, and on the
others' parts one exchange late.

Use when: DiLoCo's exchange takes about as long as its local steps, and momentum should stay.
Avoid when: worker steps are noisy: in a comparison it reached the target loss in one of six runs.
Alternatives: `delayed` (CoCoD-SGD); `streaming`.

Rule: z is the model with all finished exchanges, the same on all workers. Worker i learned d_i in a
piece of local steps and sends d_i. Its next piece starts from y_i = z + the outer optimizer's step
on c_i·d_i, with moments from its own parts alone. Then z takes the outer step on Σ c_j·d_j, as in
DiLoCo. Steps of a linear outer optimizer add up, so y_i follows the paper's rule: its outer
optimizer steps along c_i·d_i(t) + Σ_{j≠i} c_j·d_j(t − 1). The evaluated model is z. With a codec z
contains the decoded d_i, and y_i the exact one. No message is longer; each worker holds one vector
of moments more.
Waiting: a worker waits for an exchange only if it takes longer than the next piece.

Limits: one worker is DiLoCo, bit for bit. `outer=average` with equal weights is `delayed` with
local_weight = 1/n. It supports linear outer optimizers (`Outer.linear`) and modes with synchronous
rounds.
Source: Kale, Douillard and Donchev, "Eager Updates For Overlapped Communication and Computation in
DiLoCo", arXiv 2502.12996, 2025, with outer=nesterov and AdamW on the workers.
Differs: the paper's replicas keep models of their own throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ashl.option import option
from ashl.overlap.contract import Delayed


@option
class Eager(Delayed):
    """An outer step on the own part at once, on the others' parts one round late."""

    needs_steps: ClassVar[bool] = True
    steps_ahead: ClassVar[bool] = True

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        return progress, ahead()
