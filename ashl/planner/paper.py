"""ASHL's planner as printed: H rounded to fill the cycle of the slowest worker.

Rule (Algorithm 1): T_max = max_i (t_i · H_preset + push_i + pull_i); H_i = round((T_max − push_i −
pull_i) / t_i), half to even; D_i = H_i / Σ H. The worker that defines T_max keeps H_preset; each
cycle is within t_i / 2 of T_max.
Rule (Algorithm 2): rest_i = t_i · H_i + compress_i + pull_i; T_max = max_i (rest_i + push_i ·
r_preset); R_i = min(1, (T_max − rest_i) / push_i). The worker that defines T_max compresses at
r_preset; no other one sends less.

Differs: R_i = 1 if a push takes no time. The decisions assume a push of push_i · R_i, as the paper
does. The predicted cycles use the encoded bytes, so they may be longer.

Source: Shen et al., "ASHL", IEEE TC 73(1), 2024, Algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from ashl.option import option
from ashl.plan.profile import Profile
from ashl.planner.assignment import Assignment, Costs, Planner, assignments, costs_of


@option
class Paper(Planner):
    """Planner that rounds H to the slowest worker's cycle."""

    def assign(
        self,
        profile: Profile,
        h_preset: int,
        r_preset: float | None,
        payload: Callable[[float], float],
    ) -> tuple[Assignment, ...]:
        costs = costs_of(profile, encoded=r_preset is not None)
        steps = local_steps(costs, h_preset)
        ratios = (
            [1.0] * len(costs) if r_preset is None else compression_ratios(costs, steps, r_preset)
        )
        return assignments(costs, steps, ratios, payload)


def local_steps(costs: Sequence[Costs], h_preset: int) -> list[int]:
    """Return H of each worker by Algorithm 1, in exact fractions: H_i ≥ H_preset for all."""
    t_max = max(c.step * h_preset + c.push + c.pull for c in costs)
    return [round(Fraction(t_max - c.push - c.pull, c.step)) for c in costs]


def compression_ratios(
    costs: Sequence[Costs], steps: Sequence[int], r_preset: float
) -> list[float]:
    """Return each worker's density by Algorithm 2, in exact fractions: R_i ≥ r_preset."""
    preset = Fraction(r_preset)
    rest = [c.step * h + c.encode + c.pull for c, h in zip(costs, steps, strict=True)]
    t_max = max(r + c.push * preset for c, r in zip(costs, rest, strict=True))
    return [
        float(min(1, (t_max - r) / c.push)) if c.push else 1.0
        for c, r in zip(costs, rest, strict=True)
    ]
