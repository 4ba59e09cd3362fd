"""One exchange late: the work of one piece travels while the next one is computed, and lands when
that is done.

Rule, with z the model as exchanges have landed in it: gradients are of z, w_{t+1} = w_t −
η·ḡ_{t−1}, where ḡ_{t−1} was computed on w_{t−1}; the first step has no gradient to apply. A piece
of local steps that went from y to y + d sends d, and the next one starts from y' = z +
local_weight·d, where z has all exchanges but that of d. With local_weight = 1 nothing that was
learned is computed away: y' is the average of the snapshots plus the own progress since, and the
mean over the workers is that of local SGD on the same updates. With local_weight = 1/n, equal
weights and `outer=average` y' has of the next average the own part, as `eager` has it with
momentum, too. At a parameter server z is the model of the last pull.

Limits: where exchanges take no time it is still one late. local_weight = 0 starts every piece from
z alone, which needs far smaller steps: what a worker has just learned is learned once more, and
lands twice. Where a stage gives way to another, those who wait hand in what they have computed
meanwhile, so that SSP's lead may there be a commit longer.
Source: Li et al., "Pipe-SGD", NeurIPS 2018 (gradients); Shen et al., "Faster Distributed Deep Net
Training: Computation and Communication Decoupled Stochastic Gradient Descent" (CoCoD-SGD), IJCAI
2019. Other values of `local_weight` are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ashl.option import Fraction, option
from ashl.overlap.contract import Delayed


@option
class OneStepDelayed(Delayed):
    """The exchange goes on while the next steps are computed, and lands one round late."""

    local_weight: Fraction

    def at_boundary(
        self, landed: Any, start: Any, progress: Any, ahead: Callable[[], Any]
    ) -> tuple[Any, Any]:
        kept = progress if self.local_weight == 1 else progress * self.local_weight
        return progress, landed + kept if self.local_weight else landed
