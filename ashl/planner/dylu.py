"""DyLU, dynamic local updates: H in proportion to speed, relative to the fastest worker.

Rule: H_i = max(1, ⌊H_preset·v_i / max_j v_j⌋) with v_i = 1 / t_i steps per second, so that H_preset
is the fastest worker's H. D_i = H_i / Σ H. Links are ignored, and every worker compresses at
r_preset.

Limit: equal workers all have H_preset. Source: Liu et al., "Asynchronous Local-SGD Training for
Language Modeling", arXiv 2401.09135 (dynamic local updates).
"""

from collections.abc import Callable

from ashl.option import option
from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, Planner, assignments, costs_of


@option
class DyLU(Planner):
    """Planner with the fastest worker as the anchor."""

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        costs = costs_of(profile, encoded=r_preset is not None)
        fastest = min(c.step for c in costs)
        steps = [max(1, h_preset * fastest // c.step) for c in costs]
        ratios = [1.0 if r_preset is None else r_preset] * len(costs)
        return assignments(costs, steps, ratios, payload)
