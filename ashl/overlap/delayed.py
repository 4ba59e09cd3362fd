"""One-step-delayed exchange: a piece of work travels while the next one is computed, and is applied
when that is done.

Use when: an exchange takes about as long as the steps between two, and workers are few.
Avoid when: workers are many and asynchronous: staleness doubles.
Alternatives: `merged`, which learns the same; `eager` and `streaming` with local steps.

Rule for gradients: w_{t+1} = w_t − η·ḡ_{t−1}, with ḡ_{t−1} computed on w_{t−1}. The first step has
no gradient to apply.
Rule for local steps: a piece that went from y to y + d sends d. The next one starts from y' = z +
local_weight·d, with z the model after all exchanges but that of d. With local_weight = 1 no
progress is left out: y' is the average model plus the worker's own progress since. The mean over
the workers is then that of local SGD on the same updates. With local_weight = 1/n, equal weights
and `outer=average`, y' contains the worker's own part of the next average; `eager` has the same
with momentum. At a parameter server z is the model of the last pull.
Waiting: a worker waits for an exchange only if it takes longer than the next piece.

Limits: an exchange that takes no time is still applied one piece late. local_weight = 0 starts
every piece from z alone, which needs much smaller steps: a worker learns the same progress twice,
and it is applied twice.
Source: Li et al., "Pipe-SGD", NeurIPS 2018 (gradients); Shen et al., "Faster Distributed Deep Net
Training: Computation and Communication Decoupled Stochastic Gradient Descent" (CoCoD-SGD), IJCAI
2019. Values of `local_weight` below 1 are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ashl.option import Fraction, option
from ashl.overlap.contract import Delayed


@option
class OneStepDelayed(Delayed):
    """An exchange under the next piece of work, applied one round late."""

    local_weight: Fraction

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        kept = progress if self.local_weight == 1 else progress * self.local_weight
        return progress, landed + kept if self.local_weight else landed
